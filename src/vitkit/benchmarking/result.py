"""The result of a benchmark: what was measured of each contender, and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vitkit.benchmarking.statistics import Interval, per_second, speed_ratio

if TYPE_CHECKING:
    from vitkit.engines.choosing.agreement import Agreement

TaskName = Literal["inference", "latency", "training", "loader"]
VERSION = 2
"""Of the layout of the JSON."""


@dataclass(frozen=True)
class BenchmarkRow:
    """The measurement of one contender in one task.

    Attributes:
        contender: its name.
        is_ours: whether it is vitkit's.
        precision: that it computes in.
        library: that computes, with its version.
        seconds: of a call, a number for each turn.
        images: of a call.
        agreement: of its logits with ours in float32; None for loaders.
        peak_mb: most memory of its process while it ran, in MB of 10^6 bytes.
        build_seconds: until it had computed the first logits, conversion and loading included.
        warm_up_seconds: of the first calls with the size of the batch, compilation included.
    """

    contender: str
    is_ours: bool
    precision: str
    library: str
    seconds: tuple[float, ...]
    images: int
    agreement: Agreement | None
    peak_mb: float
    build_seconds: float
    warm_up_seconds: float

    @property
    def images_per_second(self) -> Interval:
        """Images per second, by the median turn."""
        return per_second(self.seconds, self.images)


@dataclass(frozen=True)
class TaskResult:
    """One task by all contenders.

    Attributes:
        task: `inference`, `latency`, `training` or `loader`.
        batch_size: images of a call.
        rows: in the order of their turns; the first one is the base of all ratios.
        again: the base once more, in a process of its own, if there was one.
        excluded: contender -> why it was not timed, in one line.
        operations: for one image, a multiply-add counts as two; 0 for loaders.
    """

    task: TaskName
    batch_size: int
    rows: tuple[BenchmarkRow, ...]
    again: BenchmarkRow | None
    excluded: Mapping[str, str]
    operations: float = 0.0

    def faster(self, row: BenchmarkRow) -> Interval:
        """Return how many times as fast a row is as the base."""
        return self.compare(row, self.rows[0])

    def compare(self, row: BenchmarkRow, base: BenchmarkRow) -> Interval:
        """Return how many times as fast a row is as another one."""
        return speed_ratio(row.seconds, base.seconds)

    @property
    def noise(self) -> Interval | None:
        """The base compared with itself: what differs less from 1 means nothing."""
        return None if self.again is None else self.faster(self.again)

    @property
    def fastest_other(self) -> BenchmarkRow | None:
        """The fastest contender that is not vitkit's."""
        others = [row for row in self.rows if not row.is_ours]
        return max(others, key=lambda row: row.images_per_second.value, default=None)

    @property
    def fastest_own(self) -> BenchmarkRow | None:
        """The fastest contender of vitkit's."""
        own = [row for row in self.rows if row.is_ours]
        return max(own, key=lambda row: row.images_per_second.value, default=None)

    def share_of_peak(self, row: BenchmarkRow, peaks: Mapping[str, float]) -> float | None:
        """Return a row's operations per second as a part of the matrix peak, if both are known.

        Args:
            row: of this task.
            peaks: precision -> largest speed of matrix products, in operations per second.
        """
        peak = peaks.get(row.precision)
        if not peak or not self.operations:
            return None
        return row.images_per_second.value * self.operations / peak

    def to_json(self, peaks: Mapping[str, float]) -> dict[str, Any]:
        """Return plain values; `faster` is relative to the first row."""
        rows = []
        for row in (*self.rows, *filter(None, [self.again])):
            rows.append(
                {
                    "contender": row.contender,
                    "is_ours": row.is_ours,
                    "precision": row.precision,
                    "library": row.library,
                    "images_per_second": list(row.images_per_second),
                    "faster": list(self.faster(row)),
                    "seconds": list(row.seconds),
                    "logits": None if row.agreement is None else asdict(row.agreement),
                    "share_of_peak": self.share_of_peak(row, peaks),
                    "peak_mb": row.peak_mb,
                    "build_seconds": row.build_seconds,
                    "warm_up_seconds": row.warm_up_seconds,
                }
            )
        noise = self.noise
        return {
            "task": self.task,
            "batch_size": self.batch_size,
            "operations_per_image": self.operations,
            "rows": rows,
            "noise": None if noise is None else list(noise),
            "not_timed": dict(self.excluded),
        }


@dataclass(frozen=True)
class BenchmarkResult:
    """The tasks of a benchmark.

    Attributes:
        model: as it was named.
        settings: precision, threads, rounds and the like.
        machine: facts of the machine.
        products: precision -> library -> speed of matrix products, in operations per second; int8
            is not among them.
        tasks: what was measured.
        left_out: contender -> why it took part in no task.
    """

    model: str
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    products: Mapping[str, Mapping[str, float]]
    tasks: tuple[TaskResult, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def matrix_peaks(self) -> dict[str, float]:
        """Precision -> largest speed of matrix products, in operations per second."""
        return {name: max(speeds.values()) for name, speeds in self.products.items()}

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        peaks = self.matrix_peaks
        tasks = [task.to_json(peaks) for task in self.tasks]
        return {
            "benchmark": VERSION,
            "model": self.model,
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            "matrix_products": {name: dict(speeds) for name, speeds in self.products.items()},
            "matrix_peaks": peaks,
            "tasks": tasks,
            "left_out": dict(self.left_out),
        }
