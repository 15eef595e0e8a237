"""Figures of a run: learning curves, grids of images, the confusion matrix."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Float64, Int64, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from vitkit.data.augmentation.pipeline import BatchTransform, ModelInputs
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.loading.loader import Batch, EvaluationBatches
from vitkit.errors import DataError, Interrupted, OutputError
from vitkit.io.atomic import output_error, write_bytes
from vitkit.messages import nearest_parent, percent
from vitkit.plots.html import html_image, html_table
from vitkit.spec import Preprocess
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

        return draw_curves(self.columns, self.best_epoch)

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
        # the last line may be incomplete while a run writes it
        reader = csv.DictReader(text[: text.rfind("\n") + 1].splitlines())
        header, rows = reader.fieldnames or COLUMNS, [*reader]
    except FileNotFoundError:
        return []
    except (OSError, csv.Error) as error:  # csv: such as a cell of more than 131,072 characters
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


# Grids of images with captions, such as example predictions.

SHOWN = 8
"""Validation images in the grid, in two rows."""
SIDE = 112
"""Longer side of an image in the grid, in pixels."""
CAPTION, MARGIN, LETTERS = 30, 6, 18
"""Height of a caption of two lines and width of a margin in pixels, and letters of a line."""
RIGHT, WRONG = "#1a7f37", "#c4281c"


def example_predictions(
    model: nn.Module,
    dataset: Dataset,
    preprocess: Preprocess,
    device: torch.device,
) -> UInt8[np.ndarray, "H W 3"]:
    """Draw a fixed set of validation images with their classes and the predicted classes.

    Args:
        model: in eval mode, on `device`; images (B, C, h, w) -> logits (B, K).
        dataset: dataset with a `val` split.
        preprocess: the evaluation transform.
        device: device of the model.

    Returns:
        The grid (H, W, 3), RGB.
    """
    split = dataset.splits["val"]
    # Evenly spaced over the split; fewer in a smaller split.
    indices = np.unique(np.linspace(0, len(split) - 1, SHOWN).astype(int))
    batch = EvaluationBatches(split.subset(indices), preprocess, batch_size=SHOWN)[0]
    with torch.inference_mode():
        logits = model(batch.images(preprocess, device))
    probabilities, predicted = logits.float().softmax(1).max(1)
    captions = []
    for label, guess, probability in zip(
        batch.labels, predicted.cpu(), probabilities.cpu(), strict=True
    ):
        colour = RIGHT if guess == label else WRONG
        prediction = Line(dataset.classes[int(guess)], percent(float(probability)), colour)
        captions.append([Line(dataset.classes[int(label)]), prediction])
    return grid(batch.pixels.numpy(), captions, across=(len(captions) + 1) // 2)


class Line(NamedTuple):
    """A line of a caption: a class name, which is shortened, and its share."""

    name: str
    share: str = ""
    colour: str = "black"


def grid(
    pixels: UInt8[np.ndarray, "N h w C"], captions: Sequence[Sequence[Line]], across: int
) -> UInt8[np.ndarray, "H W 3"]:
    """Draw images in rows of `across`, each above at most two lines of text; RGB."""
    rows = -(-len(pixels) // across)  # rounded up
    cell_width, cell_height = SIDE + MARGIN, SIDE + CAPTION + MARGIN
    size = (across * cell_width + MARGIN, rows * cell_height + MARGIN)
    sheet = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for number, (raw_image, lines) in enumerate(zip(pixels, captions, strict=True)):
        left = MARGIN + number % across * cell_width
        top = MARGIN + number // across * cell_height
        # PIL expects grey images without an axis of channels.
        image = Image.fromarray(raw_image[..., 0] if raw_image.shape[-1] == 1 else raw_image)
        scale = SIDE / max(image.size)
        width = max(1, round(image.size[0] * scale))
        height = max(1, round(image.size[1] * scale))
        # Nearest neighbour: the pixels of small images stay visible.
        resized = image.resize((width, height), Image.Resampling.NEAREST)
        sheet.paste(resized, (left + (SIDE - width) // 2, top + (SIDE - height) // 2))
        for row, line in enumerate(lines):
            text = f"{line.share} {line.name}".lstrip()
            position = (left, top + SIDE + 1 + row * (CAPTION // 2))
            pen.text(position, _short(text, LETTERS), fill=line.colour, font=font)
    return np.asarray(sheet)


def _short(name: str, most: int) -> str:
    if len(name) <= most:
        return name
    return f"{name[: most - 1]}…"


# A grid of augmented training images with their labels.

MOST_SHOWN, ACROSS = 32, 8
"""Images in the grid, and in a row of it."""
GREY = "#6e7781"


def save_augmented_grid(
    path: Path, transform: BatchTransform, batch: Batch, classes: tuple[str, ...]
) -> None:
    """Write a grid of the images of a batch, augmented as in the first step.

    Raises:
        OutputError: the file cannot be written.
    """
    # Augmentation is a function of seed, epoch and index: the first step gets the same images.
    fed = transform(batch, step=0)
    captions = fed_labels(fed, batch, classes)[:MOST_SHOWN]
    sheet = grid(fed_pixels(fed, transform.preprocess, MOST_SHOWN), captions, ACROSS)
    try:
        Image.fromarray(sheet).save(path)
    except OSError as error:
        raise output_error(path, error) from error


def fed_pixels(
    fed: ModelInputs, preprocess: Preprocess, count: int
) -> UInt8[np.ndarray, "N H W C"]:
    """Return the first inputs of a model as images (N, H, W, C), RGB or grey, at most `count`."""
    mean = np.array(preprocess.mean)[:, None, None]
    std = np.array(preprocess.std)[:, None, None]
    images = fed.images[:count].cpu().numpy() * std + mean
    return np.rint(images.clip(0, 1) * 255).astype(np.uint8).transpose(0, 2, 3, 1)


def fed_labels(fed: ModelInputs, batch: Batch, classes: tuple[str, ...]) -> list[list[Line]]:
    """Return the label of each input of a model; of two mixed classes both and their weights."""
    labels = [classes[int(label)] for label in batch.labels]
    if fed.mixture is None:
        return [[Line(label)] for label in labels]
    weight = fed.mixture.weight
    captions = []
    # Image i is mixed with image B - 1 - i.
    for label, partner in zip(labels, labels[::-1], strict=True):
        if label == partner:
            captions.append([Line(label)])
            continue
        first = Line(label, percent(weight))
        captions.append([first, Line(partner, percent(1 - weight), GREY)])
    return captions


# Figures in the folder of a run: a figure that cannot be drawn is a line in the log, no error.

SPLIT_TITLES = {"val": "validation split", "test": "test split"}
SCREEN_REDUCTION = 3
"""Pixels of a PNG file in a row for each pixel on the screen."""


def write_figure(
    path: Path, draw: Callable[[], NotebookFigure], log: Callable[[str], object]
) -> bytes | None:
    """Draw a figure and write it as a PNG file, and as an SVG file beside it.

    Args:
        path: the PNG file.
        draw: returns the figure; it imports matplotlib, so it is called once, here.
        log: receives a line where the figure cannot be drawn or written.

    Returns:
        The PNG file's content, or None where there is none.

    Raises:
        Interrupted: a signal came.
    """
    try:
        figure = draw()
        from vitkit.plots.figure import encode_png, encode_svg

        content = encode_png(figure)
        files = {path: content, path.with_suffix(".svg"): encode_svg(figure)}
        for file, written in files.items():
            write_bytes(file, written)
    except Interrupted:  # signals are not drawing errors
        raise
    except Exception as error:  # noqa: BLE001 - a figure must never fail a run
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        log(f"warning: {path.name} is not written: {reason}; the results are complete without it")
        return None
    return content


def write_curves(folder: RunFolder, log: Callable[[str], object]) -> None:
    """Write the learning curves of a run, as `write_figure` does."""
    write_figure(folder.curves, lambda: LearningCurves.read(folder.root).plot(), log)


def write_confusion(
    folder: RunFolder,
    split: str,
    counts: Int64[np.ndarray, "K K"],
    classes: Sequence[str],
    log: Callable[[str], object],
) -> UInt8[np.ndarray, "H W 3"] | None:
    """Write the confusion matrix of a split, as `write_figure` does.

    Args:
        folder: folder of the run.
        split: `val` or `test`, for the title.
        counts: images of class i predicted as class j, at [i, j].
        classes: the K names.
        log: as for `write_figure`.

    Returns:
        The figure in a size for the screen; None where it cannot be drawn.
    """

    def draw() -> NotebookFigure:
        # imported here: a run needs matplotlib only at its end
        from vitkit.plots.confusion import draw_confusion

        return draw_confusion(counts, classes, SPLIT_TITLES[split])

    content = write_figure(folder.confusion, draw, log)
    if content is None:
        return None
    return np.asarray(Image.open(BytesIO(content)).convert("RGB").reduce(SCREEN_REDUCTION))
