"""The command `vitkit`: one verb per file, parsing and printing only.

`vitkit/errors.py` has the exit codes with their meanings.

A new verb is a file with a function `run(arguments)` and a line of `VERBS`. Nothing here may import
torch: `vitkit --help` must not wait for it.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import traceback
from contextlib import suppress
from importlib import import_module

import vitkit
from vitkit.errors import (
    DONE,
    FAULT,
    USER_ERROR,
    Interrupted,
    SettingError,
    VitkitError,
    exit_code,
    of_signal,
)
from vitkit.messages import did_you_mean, discard_stdout
from vitkit.process import (
    keep_freed_memory,
    shorten_spinning,
)

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


def main() -> None:
    """Run the command line and exit with its code."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (`>&-`)
            null = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the process ends
            setattr(sys, name, null)
    shorten_spinning(os.environ)  # read when torch loads OpenMP
    if sys.argv[1:2] and sys.argv[1] in KEEP_MEMORY:
        keep_freed_memory()
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # a second Ctrl-C, while the first was reported
        code = of_signal(signal.SIGINT)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; print errors as one line on stderr."""
    # not a flag of a verb: it decides how the errors of all verbs are shown
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if arguments[:1] == ["help"]:  # `help VERB` is `VERB --help`
        wanted = "--help-all" if "--help-all" in arguments else "--help"
        arguments = [*arguments[1:2], wanted]
    verb, *rest = arguments or ["--help"]
    try:
        _call(verb, rest)
        sys.stdout.flush()  # here, so that a full disk or a closed pipe is handled below
    except VitkitError as error:
        _print_error(str(error), debug=debug)
        return exit_code(error)
    except KeyboardInterrupt as error:
        _print_error(_interruption(verb, error))
        return of_signal(signal.SIGINT)
    except BrokenPipeError:  # the reader closed the pipe (`| head`)
        discard_stdout()
        return DONE
    except Exception as error:  # noqa: BLE001 - a full disk or memory, or a bug of vitkit
        return _report_other(error, verb, debug=debug)
    return DONE


def _report_other(error: Exception, verb: str, *, debug: bool) -> int:
    """Print an error that was not raised on purpose, and return the exit code."""
    if _is_full_stdout(error):
        discard_stdout()
        _print_error(
            f"cannot write to the standard output: {error}; free some space, or redirect the "
            "output to another place",
            debug=debug,
        )
        return USER_ERROR
    if _is_out_of_memory(error):
        first = str(error).partition("\n")[0] or type(error).__name__
        _print_error(f"out of memory: {first}; {_less_memory(verb)}", debug=debug)
        return USER_ERROR
    _print_error(
        f"internal error, please report it: {type(error).__name__}: {error}; --debug shows "
        "the traceback",
        debug=debug,
    )
    return FAULT


def _is_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:  # the error is not about tensors
        return isinstance(error, MemoryError)
    from vitkit.devices import is_out_of_memory

    return is_out_of_memory(error)


def _less_memory(verb: str) -> str:
    """Suggest how to reduce the memory of a verb."""
    if verb in ("train", "eval", "compare", "predict", "embed"):
        return "lower --batch-size, or pass --device cpu"
    if verb in ("explain", "report"):
        return "pass --device cpu, or end other programs"
    return "end other programs"


def _call(verb: str, arguments: list[str]) -> None:
    """Print the version or a help text, or run the verb.

    Raises:
        VitkitError: what the verb raises; `SettingError` where there is no such verb.
    """
    if verb in ("-h", "--help", "help"):
        _print(_help())
        return
    if verb == "--version":
        _print(f"vitkit {vitkit.__version__}")
        return
    if verb in MOVED_VERBS:
        raise SettingError(f"vitkit {verb} is now {MOVED_VERBS[verb]}")
    if verb not in VERBS:
        near = did_you_mean(verb, [*VERBS, "help"])
        raise SettingError(f"there is no verb {verb!r}{near}; `vitkit --help` lists all")
    from vitkit.cli.arguments import command_of
    from vitkit.cli.parsing import HELP_ALL, read_words, wants_help

    module = import_module(f"vitkit.cli.{verb}")
    if wants_help(arguments):
        from vitkit.cli.arguments import help_text

        command = command_of(verb, module, arguments)
        _print(help_text(command, everything=HELP_ALL in arguments))
    elif hasattr(module, "describe"):  # it reads its arguments itself
        module.run(arguments)
    else:
        module.run(read_words(command_of(verb, module, arguments), arguments).ordered)


def _interruption(verb: str, error: KeyboardInterrupt) -> str:
    """Describe a Ctrl-C; it may be the second one, received while the first was handled."""
    first = error.__context__
    while first is not None and not isinstance(first, Interrupted):
        first = first.__context__
    if first is not None:
        return str(first)
    if verb == "train":
        return "stopped by SIGINT before training began; no run was changed"
    return "stopped by SIGINT; every file that it has written is complete"


def _is_full_stdout(error: Exception) -> bool:
    """Return True for the error of a full disk that is not about a named file."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in full and error.filename is None


def _help() -> str:
    verbs = "\n".join(f"  {name:<11} {text}" for name, text in VERBS.items())
    return (
        "usage: vitkit VERB ... [--debug]\n\nPlain Vision Transformers.\n\n"
        f"{verbs}\n\n"
        "`vitkit help VERB` describes a verb; --debug shows the traceback of an error.\n\n"
        f"{EXAMPLES}"
    )


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


def _print_error(text: str, *, debug: bool = False) -> None:
    """Print an error in one line; `debug`: after the traceback of the current exception."""
    try:
        sys.stdout.flush()  # what was printed comes first
    except OSError:  # the error is more important
        discard_stdout()
    with suppress(OSError):  # the terminal may be closed; the exit code remains
        if debug:
            traceback.print_exc()
        sys.stderr.write("vitkit: " + " ".join(text.split("\n")) + "\n")
