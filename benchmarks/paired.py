"""Time several ways of doing one thing in turn (A B B A), and compare them with an interval."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import quantiles

import torch
import torch._dynamo.utils
from versus import speed_ratio, turn_order

VISIT = 0.1
"""Seconds that a row runs before the next row's turn, at least."""
FEWEST_CALLS = 3
"""Calls of a row in one turn, at least."""


@dataclass
class Row:
    """One way of doing it.

    Attributes:
        call: takes the number of the call, by which it may choose its inputs.
        warm: calls before the timed ones.
        wait: whether each call is waited for, which makes its time a latency.
        seconds: of a call, a number for each turn.
        warm_seconds: of the calls before, compilation included.
    """

    call: Callable[[int], object]
    warm: int = 3
    wait: bool = False
    seconds: list[float] = field(default_factory=list)
    warm_seconds: float = 0.0


def finish() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run(row: Row, calls: int) -> float:
    """Return the seconds of a call, as the mean of `calls` calls."""
    finish()
    start = time.perf_counter()
    for number in range(calls):
        row.call(number)
        if row.wait:
            finish()
    finish()
    return (time.perf_counter() - start) / calls


def warm_up(row: Row) -> None:
    """Make the calls that are not timed."""
    row.warm_seconds = run(row, row.warm) * row.warm


def graphs() -> int:
    """Return how many graphs torch's compiler has made in this process."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def in_turn(rows: dict[str, Row], blocks: int) -> None:
    """Time warm rows: in each block all rows in a drawn order, then in reverse.

    Raises:
        SystemExit: a row was compiled again while it was timed.
    """
    before = graphs()
    first = run(next(iter(rows.values())), FEWEST_CALLS)
    calls = max(FEWEST_CALLS, math.ceil(VISIT / first))
    for name in turn_order(rows, blocks):
        rows[name].seconds.append(run(rows[name], calls))
    if graphs() != before:
        raise SystemExit("a model was compiled again while it was timed")


def compared(rows: dict[str, Row]) -> dict[str, dict[str, object]]:
    """Return each row's median, quartiles, and how many times as fast it is as others.

    "faster" is relative to the first row; a row with the word "compiled" is also compared with
    the first compiled row.
    """
    base = next(iter(rows.values()))
    compiled = next((row for name, row in rows.items() if "compiled" in name), None)
    made: dict[str, dict[str, object]] = {}
    for name, row in rows.items():
        low, middle, high = quantiles(row.seconds, n=4)
        made[name] = {"seconds": middle, "quartiles": [low, high],
                      "faster": speed_ratio(row.seconds, base.seconds),
                      "warm_up_seconds": row.warm_seconds}  # fmt: skip
        if compiled is not None and "compiled" in name:
            made[name]["faster_than_compiled"] = speed_ratio(row.seconds, compiled.seconds)
    return made
