"""Errors of other runtimes as one line: a missing package, an operator, a damaged file."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from vitkit.engines.telemetry import import_runtime
from vitkit.errors import CheckpointError, MissingExtraError, VitkitError

LONGEST_REASON = 300
"""Characters of a runtime's message that are quoted; some quote a whole graph."""


def runtime_module(name: str) -> Any:
    """Import the library of a runtime, with its telemetry switched off.

    Args:
        name: name of the module, such as `onnxruntime`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return import_runtime(name)
    except ImportError as error:
        raise MissingExtraError(
            f"{name} cannot be imported ({first_line(error)}); install it with: "
            "pip install 'vitkit[export]'"
        ) from None


class RuntimeFailure(CheckpointError):
    """A runtime cannot write, open or run a model."""


@contextmanager
def one_line_errors(path: Path, runtime: str, action: str) -> Iterator[None]:
    """Turn any error of a runtime into a `RuntimeFailure` of one line, and hide its warnings.

    Errors of the system stay as they are where a file is written. Warnings are not hidden while a
    model runs: their filters are those of the whole process, whose threads may run models, too.

    Args:
        path: the artefact.
        runtime: its name.
        action: what it was to do: `open`, `run`, or `write` and more words.
    """
    try:
        with nullcontext() if action == "run" else _hidden_warnings():
            yield
    except VitkitError:
        raise
    except Exception as error:  # runtimes have their own exceptions
        if isinstance(error, OSError) and action.startswith("write"):
            raise
        message = f"{path}: {runtime} cannot {action} it: {first_line(error)}"
        raise RuntimeFailure(message) from error


@contextmanager
def _hidden_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that has letters, shortened."""
    for line in str(error).splitlines():
        if any(character.isalpha() for character in line):
            return line.strip()[:LONGEST_REASON]
    return type(error).__name__
