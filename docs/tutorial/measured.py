"""Reads in a chapter what `measure.py` has written, and says which command wrote it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

RESULTS = Path(__file__).parent / "results"


def measured(name: str) -> dict[str, Any] | None:
    """The numbers of an experiment; where they are missing, the command that makes them."""
    place = RESULTS / f"{name}.json"
    if not place.exists():
        print(f"{name} has not been measured yet: python docs/tutorial/measure.py {name}")
        return None
    found: dict[str, Any] = json.loads(place.read_text())
    print(f"{found['command']}\n{found['processor']}, {found['date']}")
    return found


def not_measured(name: str) -> Axes:
    """An empty picture that says so."""
    _, place = plt.subplots(figsize=(5, 1))
    place.axis("off")
    place.set_title(f"{name}: not measured yet")
    return place


def with_spread(values: Sequence[float]) -> str:
    """Mean, lowest and highest of some accuracies, in per cent; one alone as it is.

    >>> with_spread([0.98, 0.99, 0.97])
    '98.00 % (97.00 to 99.00)'
    """
    if len(values) == 1:
        return f"{100 * values[0]:.2f} %"
    low, middle, high = (100 * value for value in (min(values), mean(values), max(values)))
    return f"{middle:.2f} % ({low:.2f} to {high:.2f})"
