"""Figures of a run: learning curves, example predictions, a batch, the confusion matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float64, Int64, UInt8
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch import nn

from vitkit import errors, messages, spec
from vitkit.data.augmentation.pipeline import ModelInputs
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.loading.loader import Batch, EvaluationBatches
from vitkit.io.atomic import write_bytes
from vitkit.plots.html import html_image
from vitkit.training.monitoring.trackers import read_metrics
from vitkit.training.run_folder import RunFolder

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure


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
            DataError: no complete epoch, a probe, or a foreign file.
        """
        folder = RunFolder(Path(run))
        if not folder.root.is_dir():
            raise errors.OutputError(
                f"{run}: no such run folder; {messages.nearest_parent(folder.root)}"
            )
        rows = read_metrics(folder)
        if not rows:
            raise errors.DataError(
                f"{run}: no epoch is complete in metrics.csv, so there is no curve; a probe and a "
                "run of less than an epoch have none"
            )
        missing = [name for name in ("epoch", "train_loss", "lr") if name not in rows[0]]
        if missing:
            raise errors.DataError(
                f"{folder.metrics} has no column {missing[0]}, so it is not of a run of vitkit; "
                "name the folder of a run"
            )
        # a later row replaces the row of a killed run
        epochs = {row["epoch"]: row for row in rows if not np.isnan(row["epoch"])}
        columns = {}
        for name in rows[0]:
            columns[name] = np.array([epochs[epoch][name] for epoch in sorted(epochs)])
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
        return html_image(self.plot(), f"curves of {self.run}")


# A grid of example predictions, drawn in each epoch, so without matplotlib, which is slow.

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
    preprocess: spec.Preprocess,
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
    across, cell = (len(indices) + 1) // 2, SIDE + MARGIN
    size = (across * cell + MARGIN, 2 * (cell + CAPTION) + MARGIN)
    sheet = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for number, pixels in enumerate(batch.pixels.numpy()):
        left = MARGIN + number % across * cell
        top = MARGIN + number // across * (cell + CAPTION)
        # PIL expects grey images without an axis of channels.
        image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        # Nearest neighbour: the pixels of small images stay visible.
        image = ImageOps.pad(image.convert("RGB"), (SIDE, SIDE), Image.Resampling.NEAREST, "white")
        sheet.paste(image, (left, top))
        label, guess = int(batch.labels[number]), int(predicted[number])
        prediction = f"{messages.percent(float(probabilities[number]))} {dataset.classes[guess]}"
        colour = RIGHT if guess == label else WRONG
        lines = ((dataset.classes[label], "black"), (prediction, colour))
        for row, (text, fill) in enumerate(lines):
            position = (left, top + SIDE + 1 + row * (CAPTION // 2))
            pen.text(position, text[:LETTERS], fill=fill, font=font)
    return np.asarray(sheet)


# The first training batch as the model gets it.


def batch_figure(
    fed: ModelInputs,
    batch: Batch,
    dataset: Dataset,
    preprocess: spec.Preprocess,
    most: int,
    parts: int,
) -> NotebookFigure:
    """Draw the first images of a batch with its labels; the title has the model's values.

    Args:
        fed: what the model gets: the images augmented, mixed and normalised.
        batch: what it was made from.
        dataset: the data.
        preprocess: the evaluation transform.
        most: images to draw, at most.
        parts: micro-batches of the whole batch, of which this is the first.
    """
    # imported here: matplotlib takes half a second
    from vitkit.plots.figure import grid_of_images

    mean = np.array(preprocess.mean)[:, None, None]
    std = np.array(preprocess.std)[:, None, None]
    images = fed.images[:most].cpu().numpy() * std + mean
    pixels = np.rint(images.clip(0, 1) * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    labels = [dataset.classes[int(label)] for label in batch.labels]
    captions = []
    # image i is mixed with image B - 1 - i
    for label, partner in zip(labels, reversed(labels), strict=True):
        if fed.mixture is None or label == partner:
            captions.append([label])
        else:
            weight = fed.mixture.weight
            captions.append(
                [
                    f"{label} ({messages.percent(weight)})",
                    f"{partner} ({messages.percent(1 - weight)})",
                ]
            )
    count, channels, height, width = fed.images.shape
    of_parts = "" if parts == 1 else f", part 1 of {parts}"
    shown, values = messages.plural(count, "image"), fed.images
    if len(pixels) < count:
        shown = f"{len(pixels):,} of {shown}"
    title = (
        f"{dataset.name}: first training batch{of_parts}, {shown}\n"
        f"{channels} x {height} x {width}, values {values.min():.2f} to {values.max():.2f}, mean "
        f"{values.mean():.2f}, standard deviation {values.std(correction=0):.2f}"
    )
    return grid_of_images([*pixels], captions[:most], title)


# Figures in the folder of a run: a figure that cannot be drawn is a line in the log, no error.

SPLIT_TITLES = {"val": "validation split", "test": "test split"}


def write_figure(
    path: Path, draw: Callable[[], NotebookFigure], log: Callable[[str], object]
) -> None:
    """Draw a figure and write it as a PNG file, and as an SVG file beside it.

    Args:
        path: the PNG file.
        draw: returns the figure; it imports matplotlib, so it is called once, here.
        log: receives a line where the figure cannot be drawn or written.

    Raises:
        Interrupted: a signal came.
    """
    try:
        figure = draw()
        from vitkit.plots.figure import encode_png, encode_svg

        write_bytes(path, encode_png(figure))
        write_bytes(path.with_suffix(".svg"), encode_svg(figure))
    except errors.Interrupted:  # signals are not drawing errors
        raise
    except Exception as error:  # noqa: BLE001 - a figure must never fail a run
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        log(f"warning: {path.name} is not written: {reason}; the results are complete without it")


def write_curves(folder: RunFolder, log: Callable[[str], object]) -> None:
    """Write the learning curves of a run, as `write_figure` does."""
    write_figure(folder.curves, lambda: LearningCurves.read(folder.root).plot(), log)


def write_confusion(
    folder: RunFolder,
    split: str,
    counts: Int64[np.ndarray, "K K"],
    classes: Sequence[str],
    log: Callable[[str], object],
) -> None:
    """Write the confusion matrix of a split, as `write_figure` does.

    Args:
        folder: folder of the run.
        split: `val` or `test`, for the title.
        counts: images of class i predicted as class j, at [i, j].
        classes: the K names.
        log: as for `write_figure`.
    """

    def draw() -> NotebookFigure:
        # imported here: a run needs matplotlib only at its end
        from vitkit.plots.confusion import draw_confusion

        return draw_confusion(counts, classes, SPLIT_TITLES[split])

    write_figure(folder.confusion, draw, log)
