"""Files and services that receive the metrics: metrics.csv, metrics.jsonl, W&B, MLflow.

They get the numbers that TensorBoard gets. Each service is configured by its own environment
variables (WANDB_MODE, MLFLOW_TRACKING_URI and the like). A service that fails during a run does not
end the run.
"""

import csv
import importlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from vitkit.errors import Interrupted, MissingExtraError, OutputError, SettingError
from vitkit.io.atomic import write_bytes
from vitkit.training.config.meaning import TrackerName
from vitkit.training.run_folder import RunFolder


class Tracker:
    """A run in Weights & Biases, or in the current experiment of MLflow.

    Args:
        name: the service.
        run: folder of the run, whose name is the name of the run.
        settings: settings of the run, as JSON values.
        known_as: identity of the run in the service, on resume.

    Attributes:
        identity: identity of the run in the service.
    """

    def __init__(
        self,
        name: TrackerName,
        run: RunFolder,
        settings: Mapping[str, Any],
        known_as: str | None,
    ) -> None:
        self.name = name
        self._service = service = importlib.import_module(name)
        if name == "wandb":
            started = service.init(
                project=os.environ.get("WANDB_PROJECT", "vitkit"),
                name=run.root.name,
                dir=str(run.root),
                config=dict(settings),
                id=known_as,
                resume="allow",
            )
            self.identity = str(started.id)
            return
        started = service.start_run(run_id=known_as, run_name=None if known_as else run.root.name)
        self.identity = str(started.info.run_id)
        if known_as is None:
            service.log_params(dict(settings))

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Record finite values of curves, by the tags of TensorBoard."""
        log = self._service.log if self.name == "wandb" else self._service.log_metrics
        log(dict(values), step=step)

    def close(self, *, failed: bool) -> None:
        """End the run in the service; wait until everything is sent."""
        if self.name == "wandb":
            self._service.finish(exit_code=int(failed))
        else:
            self._service.end_run("FAILED" if failed else "FINISHED")


def check_trackers(names: Iterable[TrackerName]) -> None:
    """Raise `MissingExtraError` for the first service that is not installed."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:  # refused before any file is written
            raise MissingExtraError(
                f"--logger {name}: {name} is not installed; pip install {name}, or leave it out"
            ) from None


def open_trackers(
    names: Iterable[TrackerName], run: RunFolder, settings: Mapping[str, Any]
) -> list[Tracker]:
    """Start the run in each service, or resume it where the service knows it.

    Raises:
        SettingError: a service cannot be reached, or is not configured.
        OutputError: the run folder cannot be written.
    """
    # The identity is stored in the run folder: a resumed run continues the same curves.
    known: dict[str, str] = {}
    if run.trackers.exists():
        known = json.loads(run.trackers.read_bytes())
    opened = list[Tracker]()
    for name in names:
        try:
            opened.append(Tracker(name, run, settings, known.get(name)))
        except Interrupted:  # a signal, not the service
            raise
        except Exception as error:  # whatever a service raises
            raise SettingError(
                f"--logger {name}: cannot start: {error}; solve this problem, or leave out --logger"
            ) from error
    identities = known | {tracker.name: tracker.identity for tracker in opened}
    if identities != known:
        write_bytes(run.trackers, json.dumps(identities).encode())
    return opened


# Metrics of a run in files: `metrics.csv`, one row per epoch, `metrics.jsonl`, `predictions.csv`.
#
# `metrics.jsonl` has one JSON object per line, with a `kind`: `step` for every logged step, `epoch`
# with the columns of metrics.csv, `test` at the end, and `val` for the evaluation of a probe.
# Numbers that are not finite are null. Every line is written at once; a line that a killed process
# or a full disk left incomplete is dropped on resume.

Numbers = Mapping[str, float | int]


def add_line(run: RunFolder, kind: str, values: Numbers) -> None:
    """Append one object to metrics.jsonl. Raises `OSError`.

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
        OSError: it cannot be written.
    """
    # A resumed run keeps the columns of the file.
    header, *_ = _complete_lines(run.metrics) or [""]
    columns = header.split(",") if header else []
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


def read_metrics(run: RunFolder) -> list[dict[str, float]]:
    """Return the complete rows of metrics.csv; text that is no number is NaN."""
    rows = []
    for row in csv.DictReader(_complete_lines(run.metrics)):
        # a row with other columns than the header has None
        if None not in row and None not in row.values():
            rows.append({name: _number(text) for name, text in row.items()})
    return rows


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


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
        OutputError: a file cannot be written, or metrics.csv has no column `step`.
    """
    # The last step that is kept, by kind; `step` for all other kinds.
    last = {"epoch": step - unvalidated, "test": step - (not trains_on)}
    header, *rows = _complete_lines(run.metrics) or [""]
    columns = header.split(",")
    if header and "step" not in columns:
        raise OutputError(
            f"{run.metrics} has no column step, so it is not of this run; move it elsewhere, then "
            "resume"
        )

    def keep_row(row: str) -> bool:
        values = dict(zip(columns, row.split(","), strict=False))
        return len(values) == len(columns) and _number(values["step"]) <= last["epoch"]

    def keep_line(line: str) -> bool:
        kind, at = _kind_and_step(line)
        return at <= last.get(kind, step)

    kept = {
        run.metrics: [header, *filter(keep_row, rows)] if header else [],
        run.lines: [*filter(keep_line, _complete_lines(run.lines))],
    }
    for path, lines in kept.items():
        if path.exists():
            write_bytes(path, "".join(f"{line}\n" for line in lines).encode())


def tested_at(run: RunFolder) -> list[int]:
    """Return the steps after which the test split was evaluated."""
    found = map(_kind_and_step, _complete_lines(run.lines))
    return [int(step) for kind, step in found if kind == "test"]


def _kind_and_step(line: str) -> tuple[str, float]:
    """Return these of a line of metrics.jsonl; no kind and NaN of a damaged one."""
    try:
        values = json.loads(line)
        return str(values["kind"]), float(values["step"])
    except (ValueError, TypeError, KeyError):
        return "", math.nan


def _complete_lines(path: Path) -> list[str]:
    """Return the lines of a file, without a last one that was cut off; none where it is missing."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    return text[: text.rfind("\n") + 1].splitlines()


def _append(path: Path, text: str, *, durable: bool) -> None:
    """Append complete lines to a file in one write; `durable` waits for the disk.

    The row of an epoch must be on the disk before the state in which that epoch is done.
    """
    with path.open("ab") as file:
        file.write(text.encode())
        file.flush()
        if durable:
            os.fsync(file.fileno())
