"""The numbers of a run in files: `metrics.csv`, a row an epoch, and `metrics.jsonl`.

`metrics.jsonl` has one JSON object a line, by its `kind`: `step` at every logged step, `epoch` with
what metrics.csv has, `test` at the end, and `val` where a probe looks at it once. A number that is
not finite is null. A line is written at once; one that a dying process or disk left half written is
dropped when the run goes on.
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

from vitkit.io.atomic import output_error, write_bytes
from vitkit.training.run_folder import RunFolder

Numbers = Mapping[str, float | int]


def add_line(run: RunFolder, kind: str, values: Numbers) -> None:
    """One object for metrics.jsonl. Raises `OutputError`."""
    kept = {name: value if math.isfinite(value) else None for name, value in values.items()}
    line = json.dumps({"kind": kind} | kept, allow_nan=False)
    _append(run.lines, f"{line}\n", durable=kind != "step")


def add_row(run: RunFolder, values: Numbers) -> None:
    """One row of metrics.csv, by the header that it has; the first row writes it.

    Raises:
        OutputError: it cannot be written.
    """
    columns = _columns(run.metrics)
    text = StringIO()
    writer = csv.DictWriter(
        text, columns or list(values), extrasaction="ignore", lineterminator="\n"
    )
    if not columns:
        writer.writeheader()
    writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in values.items()})
    _append(run.metrics, text.getvalue(), durable=True)


def drop_rows_after(
    run: RunFolder, step: int, *, unvalidated: bool = False, goes_on: bool = False
) -> None:
    """Forget what a resumed run writes again, and what was left half written.

    Args:
        run: the run.
        step: that it goes on from; what lies beyond it is dropped.
        unvalidated: the epoch that ends there is validated again, so its row is dropped, too.
        goes_on: steps are left to train; then the test score at `step` stays, as what an earlier
            end of the run came to.

    Raises:
        OutputError: a file cannot be written.
    """
    last = {"epoch": step - unvalidated, "test": step - (not goes_on)}
    columns = _columns(run.metrics)

    def row_stays(row: str) -> bool:
        return row.split(",") == columns or _row_step(columns, row) <= last["epoch"]

    def line_stays(line: str) -> bool:
        kind, place, _ = _line(line)
        return place <= last.get(kind, step)

    _keep(run.metrics, row_stays)
    _keep(run.lines, line_stays)


def step_line(run: RunFolder, step: int) -> Numbers:
    """What `add_line` wrote of a step; empty where there is no such line."""
    for line in _lines(run):
        kind, place, values = _line(line)
        if (kind, place) == ("step", step):
            known = {name: math.nan if v is None else v for name, v in values.items()}
            return {name: v for name, v in known.items() if name not in ("kind", "epoch", "step")}
    return {}


def tested_at(run: RunFolder) -> list[int]:
    """The steps after which the test split was looked at before."""
    found = [_line(line) for line in _lines(run)]
    return [int(place) for kind, place, _ in found if kind == "test" and place < math.inf]


def _lines(run: RunFolder) -> list[str]:
    if not run.lines.exists():
        return []
    return run.lines.read_text(encoding="utf-8", errors="replace").splitlines()


def _keep(path: Path, wanted: Callable[[str], bool]) -> None:
    """Rewrite a file with the whole lines that are wanted, where that is a change."""
    if not path.exists():
        return
    text = path.read_text(encoding="utf-8", errors="replace")
    kept = "".join(
        line for line in text.splitlines(keepends=True) if line.endswith("\n") and wanted(line[:-1])
    )
    if kept != text:
        write_bytes(path, kept.encode())


def _columns(path: Path) -> list[str]:
    """The header of metrics.csv; none where it is not there, or not whole."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            header = file.readline()
    except FileNotFoundError:
        return []
    return header[:-1].split(",") if header.endswith("\n") else []


def _row_step(columns: list[str], row: str) -> float:
    """The step of a row of metrics.csv; infinite where it is none."""
    cells = dict(zip(columns, row.split(","), strict=False))
    if len(cells) < len(columns) or not cells.get("step", "").isdecimal():
        return math.inf
    return float(cells["step"])


def _line(line: str) -> tuple[str, float, dict[str, Any]]:
    """Kind, step and values of a line of metrics.jsonl; the step is infinite where it is none."""
    try:
        values = json.loads(line)
        step, kind = values["step"], values["kind"]
    except (ValueError, LookupError, TypeError):
        return "", math.inf, {}
    return (str(kind), float(step), values) if isinstance(step, int) else ("", math.inf, {})


def _append(path: Path, text: str, *, durable: bool) -> None:
    """Put whole lines at the end of a file in one write; `durable` waits for the disk.

    The row of an epoch is on the disk before the state that says the epoch is done.
    """
    try:
        with path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            if durable:
                os.fsync(file.fileno())
    except OSError as error:
        raise output_error(path, error) from error
