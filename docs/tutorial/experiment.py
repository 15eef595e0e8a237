"""A measurement of the tutorial: a function from its settings to numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Numbers = dict[str, Any]
"""What a measurement found, as JSON values."""


@dataclass(frozen=True)
class Asked:
    """The settings with which an experiment is run.

    Attributes:
        seeds: one training for each.
        data_root: where named data sets such as `mnist` lie.
        quick: seconds instead of minutes, on digits; only to see that the code runs.
        run: the folder of a finished `vitkit train`, read instead of training again.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    data_root: str | None = None
    quick: bool = False
    run: str | None = None


@dataclass(frozen=True)
class Experiment:
    """One measurement.

    Attributes:
        measure: makes the numbers; prints a line for each training.
        about: what it measures, in a few words.
        seeds: those it is run with where none are asked for.
    """

    measure: Callable[[Asked], Numbers]
    about: str
    seeds: tuple[int, ...] = (0, 1, 2)
