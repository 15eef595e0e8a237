"""Errors of other runtimes as one line: a missing package, an operator, a damaged file."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vitkit.engines.telemetry import import_runtime
from vitkit.errors import CheckpointError, MissingExtraError, VitkitError

LONGEST_REASON = 300
"""Characters of a runtime's message that are quoted; some quote a whole graph."""


def runtime_module(name: str) -> Any:
    """Import the library of a runtime, with its telemetry switched off.

    Args:
        name: of the module, such as `onnxruntime`.

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


@contextmanager
def one_line_errors(path: Path, runtime: str, action: str) -> Iterator[None]:
    """Turn any error of a runtime into a `CheckpointError` of one line, and hide its warnings.

    Args:
        path: the artefact.
        runtime: its name.
        action: what it was to do, such as `open`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except VitkitError:
        raise
    except Exception as error:  # runtimes raise classes of their own
        raise CheckpointError(f"{path}: {runtime} cannot {action} it: {first_line(error)}") from (
            error
        )


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that has letters, shortened."""
    for line in str(error).splitlines():
        if any(character.isalpha() for character in line):
            return line.strip()[:LONGEST_REASON]
    return type(error).__name__
