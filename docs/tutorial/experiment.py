"""A measurement of the tutorial: a function from its settings to numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Numbers = dict[str, Any]
"""The results of a measurement, as JSON values."""


@dataclass(frozen=True)
class Options:
    """The options of an experiment.

    Attributes:
        seeds: one training is run for each.
        data_root: the folder of named datasets such as `mnist`.
        quick: a few steps on the digits, only to check that the code runs.
        run: the folder of a finished `vitkit train`, which is read instead of training again.
    """

    seeds: tuple[int, ...] = (0, 1, 2)
    data_root: str | None = None
    quick: bool = False
    run: str | None = None


@dataclass(frozen=True)
class Experiment:
    """One measurement.

    Attributes:
        measure: returns the numbers, and prints a line for each training.
        about: a short description.
        seeds: the default seeds.
    """

    measure: Callable[[Options], Numbers]
    about: str
    seeds: tuple[int, ...] = (0, 1, 2)
