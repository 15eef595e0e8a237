"""Grids of images with captions, such as example predictions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import nn

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.loading.loader import EvaluationBatches
from vitkit.messages import percent
from vitkit.spec import Preprocess

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
