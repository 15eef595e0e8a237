"""The figure of a benchmark: a bar for each contender, with its interval and its ratio."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitkit.benchmarking.result import BenchmarkResult, TaskResult
from vitkit.io.atomic import write_bytes
from vitkit.messages import plural, short_number
from vitkit.plots.figure import (
    BLUE,
    SCREEN_DPI,
    NotebookFigure,
    drawing_style,
    encode_png,
    fit_to_contents,
)

GREY = "#b0b0b0"
WIDTH = 2.25
"""Inches of the axes; with the names the figure is as wide as a column of a paper with two."""
BAR = 0.19
"""Inches from one bar to the next."""
LEFT, GAP, BOTTOM = 1.2, 0.66, 0.4
"""Inches left of the bars, between two panels and below them."""
TITLE_LEFT = -0.5
"""Left end of titles, as a part of the axes' width: above the names."""
LABEL_ROOM = 1.5
"""Width of the axis, relative to the longest interval: labels stand right of the bars."""
TITLES = {
    "inference": "Inference, batch {batch}",
    "latency": "Inference, batch 1",
    "training": "Training step, batch {batch}",
    "loader": "Loading of JPEGs, one thread",
}


def draw_benchmark(result: BenchmarkResult) -> NotebookFigure:
    """Draw a panel for each task: images per second, vitkit's bars in blue, the fastest on top.

    Thin lines are 95 % intervals. Beside each bar stand its images per second, and how many times
    as fast it is as the base.

    Args:
        result: with one task or more that has rows.
    """
    tasks = [task for task in result.tasks if task.rows]
    heights = [BAR * (len(task.rows) + 0.5) for task in tasks]
    height = sum(heights) + GAP * len(tasks) + BOTTOM
    with drawing_style(result.model):
        figure = NotebookFigure(figsize=(WIDTH + LEFT, height), dpi=SCREEN_DPI)
        top = height
        for number, (task, inches) in enumerate(zip(tasks, heights, strict=True)):
            top -= GAP if number else 0.3
            place = (LEFT / (WIDTH + LEFT), (top - inches) / height)
            size = (WIDTH / (WIDTH + LEFT), inches / height)
            axes = figure.add_axes((*place, *size))
            _draw_task(axes, task)
            top -= inches
        first = figure.axes[0]
        first.set_title(_title(result, tasks[0]), loc="left", x=TITLE_LEFT, parse_math=False)
        fit_to_contents(figure)
    return figure


def save_plot(result: BenchmarkResult, path: Path, writer: str) -> None:
    """Write the figure as a PNG file.

    Args:
        result: with one task or more that has rows.
        path: of the file; folders are made.
        writer: the program, in the file's text `Software`.

    Raises:
        OutputError: the file cannot be written.
    """
    write_bytes(path, encode_png(draw_benchmark(result), writer))


def _title(result: BenchmarkResult, task: TaskResult) -> str:
    settings = result.settings
    threads = plural(settings["threads"], "thread")
    about = f"{Path(result.model).name}, {settings['precision']}, {threads}"
    return f"{about}\n{_task_title(task)}"


def _task_title(task: TaskResult) -> str:
    return TITLES[task.task].format(batch=task.batch_size)


def _draw_task(axes: Axes, task: TaskResult) -> None:
    rows = sorted(task.rows, key=lambda row: row.images_per_second.value)
    speeds = [row.images_per_second for row in rows]
    values = np.array([speed.value for speed in speeds])
    low = values - np.array([speed.low for speed in speeds])
    high = np.array([speed.high for speed in speeds]) - values
    colours = []
    for row in rows:
        colours.append(BLUE if row.is_ours else GREY)
    places = np.arange(len(rows))
    line: dict[str, Any] = {"elinewidth": 0.8, "capsize": 1.8, "capthick": 0.8, "ecolor": "black"}
    axes.barh(places, values, height=0.72, color=colours)
    axes.errorbar(values, places, xerr=np.abs([low, high]), fmt="none", **line)
    longest = float(max(values + high))
    for place, row, speed in zip(places, rows, speeds, strict=True):
        text = short_number(speed.value)
        if row is not task.rows[0]:
            text += f" ({task.faster(row).value:.2f}\N{MULTIPLICATION SIGN})"
        axes.text(
            speed.high + longest * 0.02,
            float(place),
            text,
            va="center",
            fontsize=6.5,
            clip_on=False,
        )
    axes.set_yticks(places, [row.contender for row in rows])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, longest * LABEL_ROOM)
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.set_xlabel(f"images/s (\N{MULTIPLICATION SIGN}: relative to {task.rows[0].contender})")
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(_with_commas))
    axes.set_title(_task_title(task), loc="left", x=TITLE_LEFT, parse_math=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(visible=True, axis="x", linewidth=0.4, color="#dddddd")
    axes.set_axisbelow(True)


def _with_commas(value: float, position: int | None = None) -> str:
    return f"{value:,.10g}"
