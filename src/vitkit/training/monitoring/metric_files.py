"""Metrics of a run in files: `metrics.csv`, one row per epoch, `metrics.jsonl`, `predictions.csv`.

`metrics.jsonl` has one JSON object per line, with a `kind`: `step` for every logged step, `epoch`
with the columns of metrics.csv, `test` at the end, and `val` for the evaluation of a probe. Numbers
that are not finite are null. Every line is written at once; a line that a killed process or a full
disk left incomplete is dropped on resume.
"""

from __future__ import annotations

import csv
import json
import math
import os
from collections.abc import Callable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from vitkit.evaluation.prediction_table import predictions_csv
from vitkit.evaluation.result import Evaluation
from vitkit.io.atomic import output_error, write_bytes
from vitkit.training.run_folder import RunFolder

Numbers = Mapping[str, float | int]


def add_line(run: RunFolder, kind: str, values: Numbers) -> None:
    """Append one object to metrics.jsonl. Raises `OutputError`.

    Args:
        run: folder of the run.
        kind: `step`, `epoch`, `val` or `test`.
        values: `step` among them; loss in nats, shares in [0, 1].
    """
    document: dict[str, Any] = {"kind": kind}
    for name, value in values.items():
        document[name] = value if math.isfinite(value) else None  # JSON has no NaN
    line = json.dumps(document, allow_nan=False)
    _append(run.lines, f"{line}\n", durable=kind != "step")


def add_row(run: RunFolder, values: Numbers) -> None:
    """Append one row to metrics.csv, in the order of its header; the first row writes the header.

    Raises:
        OutputError: it cannot be written.
    """
    # A resumed run keeps the columns of the file.
    columns = _columns(run.metrics)
    text = StringIO()
    writer = csv.DictWriter(
        text, columns or list(values), extrasaction="ignore", lineterminator="\n"
    )
    if not columns:
        writer.writeheader()
    cells: dict[str, object] = {}
    for name, value in values.items():
        cells[name] = f"{value:.6g}" if isinstance(value, float) else value
    writer.writerow(cells)
    _append(run.metrics, text.getvalue(), durable=True)


def write_predictions(run: RunFolder, evaluation: Evaluation) -> None:
    """Write predictions.csv, a row for each image. Raises `OutputError`."""
    write_bytes(run.predictions, predictions_csv(evaluation))


def drop_rows_after(
    run: RunFolder, step: int, *, unvalidated: bool = False, trains_on: bool = False
) -> None:
    """Remove rows and lines that a resumed run writes again, and incomplete ones.

    Args:
        run: folder of the run.
        step: step that the run resumes from; later rows are removed.
        unvalidated: the epoch that ends with this step is validated again, so its row is removed,
            too.
        trains_on: there are steps left to train. Then the test scores at `step` are kept: they are
            the result of an earlier end of the run.

    Raises:
        OutputError: a file cannot be written.
    """
    # The last step that is kept, by kind; `step` for all other kinds.
    last = {"epoch": step - unvalidated, "test": step - (not trains_on)}
    columns = _columns(run.metrics)

    def keep_row(row: str) -> bool:
        return row.split(",") == columns or _row_step(columns, row) <= last["epoch"]

    def keep_line(line: str) -> bool:
        kind, line_step, _ = _parse_line(line)
        return line_step <= last.get(kind, step)

    _filter(run.metrics, keep_row)
    _filter(run.lines, keep_line)


def step_line(run: RunFolder, step: int) -> Numbers:
    """Read the values that `add_line` wrote for a step; empty if there is no such line.

    `epoch` and `step` themselves are left out.
    """
    for line in _lines(run):
        kind, line_step, document = _parse_line(line)
        if kind != "step" or line_step != step:
            continue
        values = {}
        for name, value in document.items():
            if name not in ("kind", "epoch", "step"):
                values[name] = math.nan if value is None else value
        return values
    return {}


def tested_at(run: RunFolder) -> list[int]:
    """Return the steps after which the test split was evaluated."""
    steps = []
    for line in _lines(run):
        kind, step, _ = _parse_line(line)
        if kind == "test" and step < math.inf:  # infinity: the line is damaged
            steps.append(int(step))
    return steps


def _lines(run: RunFolder) -> list[str]:
    if not run.lines.exists():
        return []
    return run.lines.read_text(encoding="utf-8", errors="replace").splitlines()


def _filter(path: Path, keep: Callable[[str], bool]) -> None:
    """Rewrite a file with the complete lines to keep, if that changes it."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    complete = ""
    for line in text.splitlines(keepends=True):
        # A line without its end was cut off.
        if line.endswith("\n") and keep(line[:-1]):
            complete += line
    if complete != text:
        write_bytes(path, complete.encode())


def _columns(path: Path) -> list[str]:
    """Return the header of metrics.csv; empty if it is missing or incomplete."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            header = file.readline()
    except FileNotFoundError:
        return []
    if not header.endswith("\n"):
        return []
    return header[:-1].split(",")


def _row_step(columns: list[str], row: str) -> float:
    """Return the step of a row of metrics.csv; infinity for an invalid row."""
    # An incomplete row has fewer cells than the header.
    cells = dict(zip(columns, row.split(","), strict=False))
    if len(cells) < len(columns) or not cells.get("step", "").isdecimal():
        return math.inf
    return float(cells["step"])


def _parse_line(line: str) -> tuple[str, float, dict[str, Any]]:
    """Return kind, step and values of a line of metrics.jsonl; step infinity if it is invalid."""
    try:
        values = json.loads(line)
        step, kind = values["step"], values["kind"]
    except (ValueError, LookupError, TypeError):
        return "", math.inf, {}
    if not isinstance(step, int):  # valid JSON, but not written by vitkit
        return "", math.inf, {}
    return str(kind), float(step), values


def _append(path: Path, text: str, *, durable: bool) -> None:
    """Append complete lines to a file in one write; `durable` waits for the disk.

    The row of an epoch must be on the disk before the state in which that epoch is done.
    """
    try:
        with path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            if durable:
                os.fsync(file.fileno())
    except OSError as error:
        raise output_error(path, error) from error
