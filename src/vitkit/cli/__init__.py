"""The command `vitkit`: one verb per file, wiring only.

Exit codes: 0 done; 2 the user's input, data or settings are wrong; 3 a number is not finite;
128 + N stopped by signal N after saving (130 for Ctrl-C, 143 for SIGTERM); 1 a fault of ours.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import sys
from contextlib import suppress
from importlib import import_module

from vitkit.errors import Interrupted, SettingError, VitkitError, did_you_mean, exit_code
from vitkit.io.progress import let_stdout_go
from vitkit.process import keep_freed_memory, shorten_spinning

VERBS = {
    "check": "what is wrong with your images, before you train on them",
    "train": "train a ViT on your images",
    "eval": "how good a checkpoint is on a split",
    "compare": "whether one run or checkpoint is better than another",
    "predict": "what a checkpoint says of images",
    "explain": "what a checkpoint looks at in images",
    "embed": "the features of images, as an .npz file",
    "inspect": "what a file of weights is, of any known format",
    "convert": "write a checkpoint in another format, with a proof",
    "summary": "the layer table of a model or a checkpoint",
    "models": "the models there are",
}

NEEDED = {
    "check": ("DATA",),
    "train": ("DATA",),
    "eval": ("CHECKPOINT", "DATA"),
    "compare": ("CHECKPOINT", "OTHER_CHECKPOINT"),
    "predict": ("CHECKPOINT", "IMAGES"),
    "explain": ("CHECKPOINT", "IMAGES"),
    "embed": ("CHECKPOINT", "IMAGES"),
    "inspect": ("FILE",),
    "convert": ("FILE", "OUT"),
    "summary": ("MODEL",),
}
"""The arguments that a verb cannot do without, in their order."""


def main() -> None:
    """Run the command line and leave with its exit code."""
    shorten_spinning(os.environ)
    if sys.argv[1:2] == ["train"]:
        keep_freed_memory()
    try:
        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # once more, while the first one was reported
        code = 128 + signal.SIGINT
    if code > 128:
        from vitkit.training.interrupts import end_process

        sys.stdout.flush()
        end_process(code)  # nothing is left to do, and a further signal shall print no traceback
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; errors are one line on stderr."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    if not arguments or arguments[0] in ("-h", "--help"):
        _say(_help())
        return 0
    if arguments[0] == "--version":
        from importlib.metadata import version

        _say(f"vitkit {version('vitkit')}")
        return 0
    verb, *rest = arguments
    if verb not in VERBS:
        _complain(
            f"there is no verb {verb!r}{did_you_mean(verb, VERBS)}; `vitkit --help` lists all"
        )
        return 2
    try:
        _check_given(verb, rest)
        import_module(f"vitkit.cli.{verb}").run(rest)
        sys.stdout.flush()
    except VitkitError as error:
        if debug:
            raise
        _complain(str(error))
        return exit_code(error)
    except KeyboardInterrupt as error:
        _complain(_what_it_met(error))
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has left (`| head`)
        let_stdout_go()
        return 0
    except Exception as error:  # the last line of defence: whatever comes here is a fault of ours
        if debug:
            raise
        if _is_of_stdout(error):
            let_stdout_go()
            _complain(f"cannot write what is printed: {error}; choose another place for it")
            return 2
        _complain(f"a fault of vitkit's: {type(error).__name__}: {error}; --debug shows where")
        return 1
    return 0


def _check_given(verb: str, arguments: list[str]) -> None:
    """Raise `SettingError` where there are fewer words than the verb needs, whatever they mean.

    Values of flags are words, too, so what passes may still lack an argument.
    """
    needed = NEEDED.get(verb, ())
    words = [word for word in arguments if not re.match(r"--?\w[^=]*$", word)]
    missing = needed[len(words) :]
    if missing and not {"-h", "--help"} & set(arguments):
        raise SettingError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing; expected: "
            f"vitkit {verb} {' '.join(needed)} [flags]"
        )


def _what_it_met(error: KeyboardInterrupt) -> str:
    """What to say of a Ctrl-C; a second one may have come while the first one was dealt with."""
    first = error.__context__
    while first is not None and not isinstance(first, Interrupted):
        first = first.__context__
    return str(first) if first is not None else "stopped by SIGINT"


def _is_of_stdout(error: Exception) -> bool:
    """Whether an error is that of a full disk, and of no file with a name."""
    full = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return isinstance(error, OSError) and error.errno in full and error.filename is None


def _help() -> str:
    verbs = "\n".join(f"  {name:<10} {text}" for name, text in VERBS.items())
    return (
        "usage: vitkit VERB ... [--debug]\n\nPlain Vision Transformers.\n\n"
        f"{verbs}\n\n`vitkit VERB --help` says more; --debug shows tracebacks."
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _complain(text: str) -> None:
    with suppress(OSError):  # the terminal may be closed; the exit code says it, too
        sys.stderr.write("vitkit: " + " ".join(text.split("\n")) + "\n")
