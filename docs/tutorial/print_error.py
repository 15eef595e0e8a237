"""The error message with which a bug shows."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import vitkit


def print_error(attempt: Callable[[], object]) -> None:
    """Call a function that must fail, and print the first line of its error."""
    try:
        attempt()
    except (RuntimeError, TypeError, vitkit.VitkitError) as error:
        print(
            textwrap.fill(
                f"{type(error).__name__}: {str(error).splitlines()[0]}", width=88
            )
        )
    else:
        raise AssertionError("no error")
