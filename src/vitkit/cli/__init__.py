"""The command `vitkit`: one verb per file, wiring only.

Exit codes: 0 done; 2 the user's input, data or settings are wrong; 3 a number is not finite;
130 and 143 stopped by a signal after saving; 1 a fault of ours.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module

from vitkit.errors import VitkitError, did_you_mean, exit_code

VERBS = {
    "check": "what is wrong with your pictures, before you train on them",
    "train": "train a ViT on your pictures",
    "eval": "how good a checkpoint is on a split",
    "compare": "whether one run or checkpoint is better than another",
    "predict": "what a checkpoint says of pictures",
    "explain": "what a checkpoint looks at in pictures",
    "embed": "the features of pictures, as an .npz file",
    "inspect": "what a file of weights is, of any known format",
    "convert": "write a checkpoint in another format, with a proof",
    "summary": "the layer table of a model or a checkpoint",
    "models": "the models there are",
}


def main() -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(run(sys.argv[1:]))


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
        import_module(f"vitkit.cli.{verb}").run(rest)
        sys.stdout.flush()
    except VitkitError as error:
        if debug:
            raise
        _complain(str(error))
        return exit_code(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has left (`| head`); keep the interpreter from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # the last line of defence: whatever comes here is a fault of ours
        if debug:
            raise
        _complain(f"a fault of vitkit's: {type(error).__name__}: {error}; --debug shows where")
        return 1
    return 0


def _help() -> str:
    verbs = "\n".join(f"  {name:<10} {text}" for name, text in VERBS.items())
    return (
        "usage: vitkit VERB ... [--debug]\n\nPlain Vision Transformers.\n\n"
        f"{verbs}\n\n`vitkit VERB --help` says more; --debug shows tracebacks."
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


def _complain(text: str) -> None:
    sys.stderr.write("vitkit: " + " ".join(text.split("\n")) + "\n")
