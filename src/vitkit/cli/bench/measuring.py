"""Measuring for `vitkit bench`, with a line on what is done now, and printing of the result."""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.errors import SettingError
from vitkit.messages import escape

if TYPE_CHECKING:
    from vitkit.benchmarking.contenders import Lineup
    from vitkit.benchmarking.result import BenchmarkResult
    from vitkit.benchmarking.settings import BenchmarkSettings

WRITER = "vitkit bench"
"""Text in the PNG file of a benchmark."""


def model_fields(spec: dict[str, Any] | None, img_size: int | None) -> dict[str, Any]:
    """Return the fields of the model that flags decide."""
    fields = dict(spec or {})
    if img_size is not None:
        if img_size < 1:
            raise SettingError.about("img_size", img_size, "must be 1 or more")
        fields["image_size"] = img_size
    return fields


def measure_model(
    model: str, fields: dict[str, Any], lineup: Lineup, settings: BenchmarkSettings
) -> BenchmarkResult:
    """Measure a model by its name or its checkpoint."""
    from vitkit.benchmarking.measure import Benchmark
    from vitkit.benchmarking.model_files import open_model

    checkpoint = open_model(model, fields)
    try:
        return Benchmark(model, checkpoint, lineup, settings, _report).run()
    finally:
        _report("")


def print_benchmark(result: BenchmarkResult, plot: Path | None, *, as_json: bool) -> None:
    """Print the result, and write its figure."""
    from vitkit.benchmarking.table import format_tables

    if as_json:
        sys.stdout.write(json_text.dumps(result.to_json(), indent=2) + "\n")
    else:
        sys.stdout.write(format_tables(result))
    if plot is None:
        return
    if not any(task.rows for task in result.tasks):
        sys.stderr.write(f"no plot is written to {escape(plot)}, as nothing was measured\n")
        return
    from vitkit.benchmarking.plot import save_plot

    save_plot(result, plot, WRITER)
    sys.stderr.write(f"wrote {escape(plot)}\n")


def _report(line: str) -> None:
    """Say on a terminal what is done now, as a benchmark takes minutes."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{escape(line)}")
        sys.stderr.flush()
