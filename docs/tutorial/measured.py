"""Reads in a chapter what `measure.py` has written, and says which command wrote it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).parent / "results"


def measured(name: str) -> dict[str, Any]:
    """The numbers of an experiment; prints how they came about."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    print(f"{found['command']}\n{found['processor']}, {found['date']}")
    return found


def with_spread(values: Sequence[float]) -> str:
    """Mean, lowest and highest of some accuracies, in per cent; one alone as it is.

    >>> with_spread([0.98, 0.99, 0.97])
    '98.00 % (97.00 to 99.00)'
    """
    if len(values) == 1:
        return f"{100 * values[0]:.2f} %"
    low, middle, high = (100 * value for value in (min(values), mean(values), max(values)))
    return f"{middle:.2f} % ({low:.2f} to {high:.2f})"
