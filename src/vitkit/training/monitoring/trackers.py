"""Files and services that receive the metrics: metrics.csv, TensorBoard, W&B, MLflow.

They get the numbers that TensorBoard gets. Each service is configured by its own environment
variables (WANDB_MODE, MLFLOW_TRACKING_URI and the like). A service that fails during a run does not
end the run.
"""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8
from torch import nn

from vitkit.errors import MissingExtraError, SettingError
from vitkit.evaluation.result import Evaluation
from vitkit.io.atomic import output_error, write_bytes
from vitkit.training.config.meaning import TrackerName
from vitkit.training.run_folder import RunFolder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Tracker:
    """A run in Weights & Biases, or in the current experiment of MLflow.

    Args:
        name: the service.
        run: folder of the run, whose name is the name of the run.
        settings: settings of the run, as JSON values.
        known_as: identity of the run in the service, on resume.

    Attributes:
        identity: identity of the run in the service.
        failures: the exceptions of a service that fails.
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
        self.failures = _failures(service)
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


def _failures(service: Any) -> tuple[type[Exception], ...]:
    """Return the exceptions of a service that fails: its own, and those of the network."""
    own: type[Exception] = service.Error if service.__name__ == "wandb" else service.MlflowException
    return (OSError, own)


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
        except _failures(importlib.import_module(name)) as error:
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
    write_bytes(run.predictions, evaluation.predictions_csv())


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


# The TensorBoard file of a run: curves, histograms of weights, and images.

TAGS = {
    "images_per_s": "perf/images_per_s",
    "data_wait": "perf/data_wait",
    "memory": "system/memory",
    "cuda_memory": "system/cuda_memory",
    "lr": "lr",
}
"""TensorBoard tags of the columns that do not belong to a split; `val_top1` is `val/top1` there."""
SAMPLED = 10_000
"""Weights of a parameter in its histogram, evenly spaced."""


def tagged(values: Numbers) -> dict[str, float]:
    """Return values by their tags: `val_top1` becomes `val/top1`."""
    # TensorBoard groups by the first part
    return {TAGS.get(name, name.replace("_", "/", 1)): value for name, value in values.items()}


class TensorBoardFile:
    """The file of a run for TensorBoard, where the extra `tensorboard` is installed.

    All methods but `close` raise `OutputError` where the file cannot be written, and do nothing
    before `open`, or without the extra.

    Args:
        run: its folder.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._writer: SummaryWriter | None = None

    def open(self, done: int) -> None:
        """Open the file, once it is certain that the run uses this folder.

        Args:
            done: steps done before, on resume.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        # on resume, TensorBoard ignores what an earlier session drew after this step
        purge_step = done + 1 if done else None
        with self._errors():
            self._writer = SummaryWriter(str(self._run.tensorboard), purge_step=purge_step)

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add a point to the curve of each tag."""
        with self._errors():
            for tag, value in values.items():
                if self._writer is not None:
                    self._writer.add_scalar(tag, value, step)

    def add_histograms(self, model: nn.Module, step: int) -> None:
        """Add a histogram of every matrix of the model, from a sample of its weights."""
        with self._errors():
            for name, parameter in model.named_parameters():
                # biases and norms are too small for a histogram
                if self._writer is not None and parameter.ndim >= 2:
                    weights = parameter.detach().flatten()
                    sample = weights[:: max(1, weights.numel() // SAMPLED)].float()
                    self._writer.add_histogram(f"weights/{name}", sample, step)

    def add_image(self, tag: str, pixels: UInt8[np.ndarray, "H W 3"], step: int) -> None:
        """Add an image, (H, W, 3) uint8 RGB."""
        with self._errors():
            if self._writer is not None:
                self._writer.add_image(tag, pixels, step, dataformats="HWC")

    def flush(self) -> None:
        """Write the values that TensorBoard has buffered."""
        with self._errors():
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        """Write and close the file. Raises `OSError` where that fails."""
        if self._writer is not None:
            self._writer.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise output_error(self._run.tensorboard, error) from error
