"""The tables of a benchmark on a terminal, at most 80 columns wide."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

from vitkit.benchmarking.machine import QUIET_LOAD
from vitkit.benchmarking.result import BenchmarkResult, BenchmarkRow, TaskResult
from vitkit.benchmarking.statistics import Interval
from vitkit.messages import plural, short_number

WIDTH = 80
NAME = 26
"""Characters of the first column: the longest name, with a precision."""
COLUMNS = f"  {{:<{NAME}}}{{:>9}}{{:>8}}{{:>16}}{{:>9}}{{:>8}}"
"""Of the table of a task: name, speed, ratio, its interval, share of the peak, memory."""
TITLES = {
    "inference": "inference, {batch}",
    "latency": "one image at a time",
    "training": "training step, {batch}",
    "loader": "loading of JPEGs, {batch}, one thread",
}
OPERATIONS = 1e9
"""Operations per second in a GFLOP/s."""


def format_tables(result: BenchmarkResult) -> str:
    """Return all tables of a result, with what stands above and below them."""
    lines = [*_head(result), ""]
    for task in result.tasks:
        lines += [*_task(task, result.matrix_peaks), ""]
    for name, reason in result.left_out.items():
        lines += _folded(f"left out: {name}: {reason}")
    return "\n".join(lines).rstrip() + "\n"


def _head(result: BenchmarkResult) -> Iterator[str]:
    settings, machine = result.settings, result.machine
    threads = plural(settings["threads"], "thread")
    rounds = plural(settings["rounds"], "round")
    yield from _folded(f"{result.model}, {settings['precision']}, {threads}, {rounds}")
    load = machine["load_before"]
    yield from _folded(f"on {machine['processor']}, load {load:.1f} before")
    if load > QUIET_LOAD:
        yield from _folded(
            f"the machine was busy: its load before is above {QUIET_LOAD}, that of an idle one"
        )
    for precision, peak in result.matrix_peaks.items():
        speeds = result.products[precision]
        library = max(speeds, key=speeds.__getitem__)
        yield from _folded(
            f"largest matrix product measured in {precision}: {peak / OPERATIONS:,.0f} GFLOP/s, by "
            f"{library}"
        )


def _task(task: TaskResult, peaks: Mapping[str, float]) -> Iterator[str]:
    """Yield the lines of one task; brackets hold 95 % intervals."""
    title = TITLES[task.task].format(batch=f"batch {task.batch_size}")
    if not task.rows:
        yield title
        yield "  nothing was measured"
    else:
        yield from _folded(f"{title} (x: times as fast as {task.rows[0].contender})")
        speed = "ms" if task.task == "latency" else "images/s"
        yield COLUMNS.format("", speed, "x", "[95 %]", "of peak", "MB")
        for row in task.rows:
            yield _row(task, row, peaks)
        if task.task == "latency":
            yield "  MB: of the whole process, with conversion and earlier batches"
        yield from _conclusions(task, peaks)
    for name, reason in task.excluded.items():
        yield from _folded(f"  {name}: not timed: {reason}")


def _row(task: TaskResult, row: BenchmarkRow, peaks: Mapping[str, float]) -> str:
    images = row.images_per_second.value
    speed = f"{1e3 / images:.2f}" if task.task == "latency" else short_number(images)
    faster = task.faster(row)
    interval = f"[{faster.low:.2f}, {faster.high:.2f}]"
    share = task.share_of_peak(row, peaks)
    part = "-" if share is None else f"{100 * share:.0f} %"
    return COLUMNS.format(
        row.contender, speed, f"{faster.value:.2f}", interval, part, f"{row.peak_mb:.0f}"
    )


def _conclusions(task: TaskResult, peaks: Mapping[str, float]) -> Iterator[str]:
    """Yield impossible shares, the noise, and vitkit beside the fastest of the others."""
    if any((task.share_of_peak(row, peaks) or 0.0) > 1.0 for row in task.rows):
        yield from _folded(
            "  a share above 100 %: the peak was measured while other programs ran, or its "
            "libraries have slower products"
        )
    base = task.rows[0].contender
    noise = task.noise
    if noise is not None:
        verdict = "" if noise.contains(1.0) else ": the machine was not steady"
        yield from _folded(f"  {base} beside itself: {interval_text(noise)}{verdict}")
    own, other = task.fastest_own, task.fastest_other
    if own is not None and other is not None:
        faster = task.compare(own, other)
        yield from _folded(
            f"  {own.contender} beside the fastest other, {other.contender}: "
            f"{interval_text(faster)} (both chosen by these times)"
        )


def interval_text(interval: Interval) -> str:
    """Return a ratio with its interval.

    >>> interval_text(Interval(1.234, 1.2, 1.3))
    '1.23 x [1.20, 1.30]'
    """
    return f"{interval.value:.2f} x [{interval.low:.2f}, {interval.high:.2f}]"


def _folded(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.wrap(text, WIDTH, initial_indent="", subsequent_indent=indent)
