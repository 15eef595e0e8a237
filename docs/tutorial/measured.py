"""Read the results of `measure.py` in a chapter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).parent / "results"


def measured(name: str) -> dict[str, Any]:
    """Read the numbers of an experiment, and print the command, processor and date."""
    results: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    print(f"{results['command']}\n{results['processor']}, {results['date']}")
    return results


def with_spread(values: Sequence[float]) -> str:
    """Format the mean, lowest and highest of some accuracies in per cent, or a single one.

    >>> with_spread([0.98, 0.99, 0.97])
    '98.00 % (97.00 to 99.00)'
    """
    if len(values) == 1:
        return f"{100 * values[0]:.2f} %"
    low, middle, high = (
        100 * value for value in (min(values), mean(values), max(values))
    )
    return f"{middle:.2f} % ({low:.2f} to {high:.2f})"
