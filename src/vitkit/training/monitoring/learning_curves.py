"""`LearningCurves`: the losses, scores and learning rates of a run, read from its metrics.csv."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64

from vitkit.errors import DataError, OutputError
from vitkit.messages import nearest_parent
from vitkit.plots.html import html_image, html_table
from vitkit.training.run_folder import RunFolder

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure

COLUMNS = ("epoch", "lr", "train_loss")
"""Columns that every metrics.csv has."""
NOTEBOOK_WIDTH = 7.4
"""Inches of the curves in a notebook."""


@dataclass(frozen=True, eq=False)
class LearningCurves:
    """The values of each epoch of a run, as its `metrics.csv` has them.

    A notebook shows them as a figure.

    >>> from pathlib import Path
    >>> run = Path("runs/first")
    >>> if run.exists():  # a folder that `vitkit train` wrote
    ...     LearningCurves.read(run).plot().savefig("curves.pdf")

    Attributes:
        run: the run folder.
        columns: the columns of the file by name (E,), `epoch`, `train_loss`, `val_top1` and `lr`
            among them: losses in nats, scores in [0, 1], times in seconds. An epoch is there once,
            and a value that is missing is NaN.
    """

    run: Path
    columns: Mapping[str, Float64[np.ndarray, " E"]]

    @classmethod
    def read(cls, run: str | Path) -> LearningCurves:
        """Read the curves of a run, which may still be training.

        Args:
            run: a run folder.

        Raises:
            OutputError: no such folder.
            DataError: the run has no complete epoch, or is a probe; or its metrics.csv cannot be
                read, or is that of another program.
        """
        folder = RunFolder(Path(run))
        if not folder.root.is_dir():
            raise OutputError(f"{run}: no such run folder; {nearest_parent(folder.root)}")
        rows = _rows(folder.metrics)
        if not rows:
            raise DataError(
                f"{run}: no epoch is complete in metrics.csv, so there is no curve; a probe and a "
                "run of less than an epoch have none"
            )
        columns = {name: np.array([_number(row[name]) for row in rows]) for name in rows[0]}
        return cls(folder.root, columns)

    @property
    def best_epoch(self) -> int | None:
        """The epoch with the highest validation top-1, of equal ones that with the lowest loss.

        None without validation.
        """
        top1, loss = self.columns.get("val_top1"), self.columns.get("val_loss")
        if top1 is None or loss is None or np.isnan(top1).all():
            return None
        # `lexsort` sorts by its last key first; NaN is worse than any number
        order = np.lexsort((np.nan_to_num(loss, nan=np.inf), -np.nan_to_num(top1, nan=-1)))
        return int(self.columns["epoch"][order[0]])

    def plot(self) -> NotebookFigure:
        """Draw losses, accuracy and learning rate over the epochs, as a matplotlib Figure.

        The best epoch is marked.

        Returns:
            A figure with a panel each for the losses (nats), top-1 (%) and the learning rate; none
            for top-1 without validation.
        """
        # imported here: matplotlib takes half a second
        from vitkit.plots.curves import draw_curves

        columns = self.columns
        return draw_curves(
            columns["epoch"],
            train_loss=columns["train_loss"],
            learning_rate=columns["lr"],
            val_loss=columns.get("val_loss"),
            val_top1=columns.get("val_top1"),
            best_epoch=self.best_epoch,
        )

    def _repr_html_(self) -> str:
        from vitkit.plots.figure import SCREEN_DPI, encode_png

        best = self.best_epoch
        last = len(self.columns["epoch"]) - 1
        rows = [["last epoch", *self._cells(last)]]
        if best is not None:
            number = int(np.flatnonzero(self.columns["epoch"] == best)[0])
            rows.insert(0, ["best epoch", *self._cells(number)])
        names = ["", "epoch", "train_loss", "val_loss", "val_top1", "lr"]
        image = encode_png(self.plot(), dpi=SCREEN_DPI)
        return html_image(image, f"curves of {self.run}", NOTEBOOK_WIDTH) + html_table(names, rows)

    def _cells(self, number: int) -> list[str]:
        cells = [f"{self.columns['epoch'][number]:.0f}"]
        for name in ("train_loss", "val_loss", "val_top1", "lr"):
            column = self.columns.get(name)
            cells.append("" if column is None else f"{column[number]:.4g}")
        return cells


def _rows(path: Path) -> list[dict[str, str]]:
    """Return the complete rows of metrics.csv, one of each epoch, in their order.

    Raises:
        DataError: it cannot be read, or lacks a column.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    # the last line may be incomplete while a run writes it
    complete = text[: text.rfind("\n") + 1]
    reader = csv.DictReader(complete.splitlines())
    try:
        header = reader.fieldnames or COLUMNS
        rows = [*reader]
    except csv.Error as error:  # such as a cell of more than 131,072 characters
        raise DataError(f"{path}: cannot be read: {error}") from error
    missing = [repr(name) for name in COLUMNS if name not in header]
    if missing:
        raise DataError(
            f"{path}: no column {' or '.join(missing)}; expected the metrics.csv of a run of "
            "vitkit train"
        )
    by_epoch = {}
    for row in rows:
        # a row with other columns than the header has None
        if None not in row and None not in row.values() and math.isfinite(_number(row["epoch"])):
            by_epoch[_number(row["epoch"])] = row  # a later row replaces the row of a killed run
    return [by_epoch[epoch] for epoch in sorted(by_epoch)]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
