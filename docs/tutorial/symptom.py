"""The symptom of a bug: the error that it ends with."""

from __future__ import annotations

from collections.abc import Callable

import vitkit


def fails(attempt: Callable[[], object]) -> None:
    """Runs it and prints the first line of the error it ends with."""
    try:
        attempt()
    except (RuntimeError, TypeError, vitkit.VitkitError) as error:
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    else:
        raise AssertionError("no error")
