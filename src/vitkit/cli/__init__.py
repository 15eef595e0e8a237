"""The command `vitkit`: each verb is a function, read and called by what its signature says.

`vitkit/errors.py` has the exit codes with their meanings.

A new verb is a function `VERB_command` in a module `VERB` (or in that of `HOMES`), with `EXAMPLES`
beside it, and a line of `VERBS`. Nothing here may import torch: `vitkit --help` must not wait for
it.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

import vitkit
from vitkit import errors, messages, process

if TYPE_CHECKING:
    from vitkit.cli.arguments import Command

VERBS = {
    "check": "find problems in your images before you train on them",
    "train": "train a ViT on your images",
    "eval": "evaluate a checkpoint on a split of a dataset",
    "compare": "test whether one run or checkpoint is better than another",
    "predict": "classify images with a checkpoint",
    "explain": "show what a checkpoint looks at in images",
    "embed": "write the features of images to an .npz file",
    "inspect": "identify a weights file of any known format",
    "convert": "write a checkpoint in another format, and verify it",
    "export": "write a checkpoint for another runtime, and check it there",
    "report": "write a page about a run: scores, curves, mistakes, calibration",
    "summary": "print the layer table of a model or a checkpoint",
    "plan": "estimate memory, speed and days of a training before it is started",
    "models": "list the models, or the published checkpoints",
    "completion": "print the script that completes commands in your shell",
}
"""Verb -> its line of `vitkit --help`."""
HOMES = {
    "completion": "help",
    "embed": "predict",
    "inspect": "convert",
    "report": "compare",
    "summary": "models",
}
"""Verb -> the module that has it, where that has another name."""
MOVED_VERBS = {
    "bench": "`python benchmarks/versus MODEL` in a checkout of the repository",
}
"""Verb that is no longer one -> what to type instead."""
KEEP_MEMORY = ("train", "explain", "report")
"""Verbs that run a model in torch in this process, call after call, and without an engine."""

EXAMPLES = """examples:
  # train on a folder with one folder of images per class
  vitkit train photos
  # classify an image with the best weights of a run
  vitkit predict runs/photos-vit-1 cat.jpg
  # list the published checkpoints of one family
  vitkit models 'vit_small*' --pretrained"""


def main(words: list[str] | None = None) -> None:
    """Run the command line and exit with its code.

    Args:
        words: the words after `vitkit`; default those of this process.
    """
    words = sys.argv[1:] if words is None else words
    process.shorten_spinning(os.environ)  # read when torch loads OpenMP
    if words[:1] and words[0] in KEEP_MEMORY:
        process.keep_freed_memory()
    code = run(words)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; print errors as one line on stderr."""
    # not a flag of a verb: it decides how the errors of all verbs are shown
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if arguments[:1] == ["help"]:  # `help VERB` is `VERB --help`
        wanted = "--help"
        if "--help-all" in arguments:
            wanted = "--help-all"
        arguments = [*arguments[1:2], wanted]
    verb, *rest = arguments or ["--help"]
    try:
        _call(verb, rest)
        sys.stdout.flush()  # here, so that a full disk or a closed pipe is handled below
    except errors.VitkitError as error:
        _print_error(str(error), debug=debug)
        return errors.exit_code(error)
    except BrokenPipeError:  # the reader closed the pipe (`| head`)
        messages.discard_stdout()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - full memory, or a bug
        code, message = _described(error, verb)
        _print_error(message, debug=debug)
        return code
    return errors.DONE


def _described(error: BaseException, verb: str) -> tuple[int, str]:
    """Return the exit code and the message of an error that was not raised on purpose."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__context__  # numpy makes an ImportError of a Ctrl-C
    if cause is not None:
        message = "stopped by SIGINT; every file that it has written is complete"
        return errors.of_signal(signal.SIGINT), message
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        messages.discard_stdout()
        return errors.USER_ERROR, (
            f"cannot write to the standard output: {error}; free some space, or redirect the "
            "output to another place"
        )
    if _is_out_of_memory(error):
        first = str(error).partition("\n")[0] or type(error).__name__
        return errors.USER_ERROR, f"out of memory: {first}; {_less_memory(verb)}"
    return errors.FAULT, (
        f"internal error, please report it: {type(error).__name__}: {error}; --debug shows "
        "the traceback"
    )


def _is_out_of_memory(error: BaseException) -> bool:
    if "torch" not in sys.modules or not isinstance(error, Exception):
        return isinstance(error, MemoryError)  # not about tensors
    from vitkit.devices import is_out_of_memory

    return is_out_of_memory(error)


def _less_memory(verb: str) -> str:
    """Suggest how to reduce the memory of a verb."""
    if verb in ("train", "eval", "compare", "predict", "embed"):
        return "lower --batch-size, or pass --device cpu"
    if verb in ("explain", "report"):
        return "pass --device cpu, or end other programs"
    return "end other programs"


def _call(verb: str, words: list[str]) -> None:
    """Print the version or a help text, or run the verb.

    Raises:
        VitkitError: what the verb raises; `SettingError` where there is no such verb.
    """
    if verb in ("-h", "--help", "help"):
        sys.stdout.write(_help())
        return
    if verb == "--version":
        sys.stdout.write(f"vitkit {vitkit.__version__}\n")
        return
    if verb in MOVED_VERBS:
        raise errors.SettingError(f"vitkit {verb} is now {MOVED_VERBS[verb]}")
    if verb not in VERBS:
        near = messages.did_you_mean(verb, [*VERBS, "help"])
        raise errors.SettingError(f"there is no verb {verb!r}{near}; `vitkit --help` lists all")
    from vitkit.cli.arguments import HELP_ALL, as_flags, parse, wants_help

    command = command_of(verb, words)
    if wants_help(words):
        from vitkit.cli.help import help_text

        sys.stdout.write(f"{help_text(command, everything=HELP_ALL in words)}\n")
        return
    given = parse(command, words)
    with as_flags(command, given):
        command.function(**given)


def command_of(verb: str, words: Sequence[str] = ()) -> Command:
    """Return what a verb takes.

    Args:
        verb: one of `VERBS`. Its module may have a function `describe`.
        words: as typed; some decide the defaults of others in the help.
    """
    from vitkit.cli.arguments import describe_function

    module = import_module(f"vitkit.cli.{HOMES.get(verb, verb)}")
    if hasattr(module, "describe"):
        described: Command = module.describe(words)
        return described
    examples = [example for example in module.EXAMPLES if f"vitkit {verb} " in example]
    return describe_function(verb, getattr(module, f"{verb}_command"), examples)


def _help() -> str:
    verbs = "\n".join(f"  {name:<11} {text}" for name, text in VERBS.items())
    return (
        "usage: vitkit VERB ... [--debug]\n\nPlain Vision Transformers.\n\n"
        f"{verbs}\n\n"
        "`vitkit help VERB` describes a verb; --debug shows the traceback of an error.\n\n"
        f"{EXAMPLES}\n"
    )


def _print_error(text: str, *, debug: bool = False) -> None:
    """Print an error in one line; `debug`: after the traceback of the current exception."""
    try:
        sys.stdout.flush()  # what was printed comes first
    except OSError:  # the error is more important
        messages.discard_stdout()
    with suppress(OSError):  # the terminal may be closed; the exit code remains
        if debug:
            traceback.print_exc()
        sys.stderr.write("vitkit: " + " ".join(text.split("\n")) + "\n")
