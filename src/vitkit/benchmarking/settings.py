"""Settings of a benchmark, and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from vitkit.benchmarking.result import TaskName
from vitkit.engines.registry import PRECISIONS
from vitkit.errors import SettingError
from vitkit.messages import did_you_mean
from vitkit.process import available_cores

TASKS: tuple[TaskName, ...] = get_args(TaskName)
DEFAULT_TASKS: tuple[TaskName, ...] = ("inference", "latency")


@dataclass(frozen=True)
class BenchmarkSettings:
    """Settings of a benchmark.

    Attributes:
        precision: float32, bfloat16 or int8.
        batch_size: images of a call, in all tasks but latency.
        threads: of the processor.
        rounds: each contender has two turns in a round.
        seconds: of a turn, at least; a slow call takes longer.
        tasks: some of `TASKS`.
    """

    precision: str
    batch_size: int
    threads: int
    rounds: int
    seconds: float
    tasks: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "tasks": list(self.tasks)}


def benchmark_settings(
    *,
    precision: str = "float32",
    batch_size: int = 8,
    threads: int | None = None,
    rounds: int = 7,
    seconds: int | float = 0.5,
    tasks: Sequence[str] = (),
) -> BenchmarkSettings:
    """Check settings and complete them.

    Args:
        precision: float32, bfloat16 or int8.
        batch_size: 1 or more.
        threads: 1 or more; default the cores that this process may use.
        rounds: 2 or more.
        seconds: above 0.
        tasks: some of `TASKS`; default inference and latency.

    Raises:
        SettingError: a value that cannot be.
    """
    threads = available_cores() if threads is None else threads
    for field, value in (("batch_size", batch_size), ("threads", threads)):
        if value < 1:
            raise SettingError.about(field, value, "must be 1 or more")
    if rounds < 2:
        expected = "must be 2 or more, as an interval needs at least 2 rounds"
        raise SettingError.about("rounds", rounds, expected)
    if not 0 < seconds <= 600:
        raise SettingError.about("seconds", seconds, "must be above 0 and at most 600")
    if precision not in PRECISIONS:
        near = did_you_mean(precision, PRECISIONS)
        raise SettingError.about(
            "precision", precision, f"must be one of {', '.join(PRECISIONS)}{near}"
        )
    for task in tasks:
        if task not in TASKS:
            near = did_you_mean(task, TASKS)
            raise SettingError.about("tasks", task, f"must be one of {', '.join(TASKS)}{near}")
    if precision == "int8" and "training" in tasks:
        raise SettingError("--tasks training has no int8; pass --precision float32 or bfloat16")
    chosen = tuple(task for task in TASKS if task in (tasks or DEFAULT_TASKS))
    return BenchmarkSettings(precision, batch_size, threads, rounds, seconds, chosen)
