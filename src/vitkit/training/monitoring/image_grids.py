"""What is looked at once an epoch: example predictions as an image, weights as histograms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from vitkit.data.loading.loader import EvaluationBatches
from vitkit.data.sources.open import Dataset
from vitkit.spec import Preprocess

SHOWN = 8
"""Validation images that are shown, in two rows."""
SIDE = 112
"""Their longer side in the grid, in pixels; a caption of two lines is below."""
CAPTION, MARGIN, LETTERS = 30, 6, 18
RIGHT, WRONG = "#1a7f37", "#c4281c"
SAMPLED = 10_000
"""Weights of a parameter that go into its histogram, evenly spaced."""
BINS = 64


def example_predictions(
    model: nn.Module,
    dataset: Dataset,
    preprocess: Preprocess,
    device: torch.device,
) -> UInt8[np.ndarray, "H W 3"]:
    """A grid of validation images, always the same ones, with their classes and the predicted.

    Args:
        model: in eval mode, on `device`; images (B, C, h, w) -> logits (B, K).
        dataset: with a `val` split.
        preprocess: the evaluation transform.
        device: where the model is.
    """
    split = dataset.splits["val"]
    places = np.unique(np.linspace(0, len(split) - 1, SHOWN).astype(int))
    batch = EvaluationBatches(split.subset(places), preprocess, batch_size=SHOWN)[0]
    with torch.inference_mode():
        logits = model(batch.images(preprocess, device))
    probabilities, predicted = (most.cpu() for most in logits.float().softmax(1).max(1))
    captions = []
    for label, guess, probability in zip(batch.labels, predicted, probabilities, strict=True):
        colour = RIGHT if guess == label else WRONG
        said = Line(dataset.classes[int(guess)], f"{probability:.0%}", colour)
        captions.append([Line(dataset.classes[int(label)]), said])
    return grid(batch.pixels.numpy(), captions, across=(len(captions) + 1) // 2)


class Line(NamedTuple):
    """A line below an image: a class, shortened where it is long, and how much of it."""

    name: str
    share: str = ""
    colour: str = "black"


def grid(
    pixels: UInt8[np.ndarray, "N h w C"], captions: Sequence[Sequence[Line]], across: int
) -> UInt8[np.ndarray, "H W 3"]:
    """Images in rows of `across`, each over at most two lines."""
    down = -(-len(pixels) // across)
    cell = (SIDE + MARGIN, SIDE + CAPTION + MARGIN)
    sheet = Image.new("RGB", (across * cell[0] + MARGIN, down * cell[1] + MARGIN), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for number, (raw_image, lines) in enumerate(zip(pixels, captions, strict=True)):
        left = MARGIN + number % across * cell[0]
        top = MARGIN + number // across * cell[1]
        image = Image.fromarray(raw_image[..., 0] if raw_image.shape[-1] == 1 else raw_image)
        scale = SIDE / max(image.size)
        width, height = (max(1, round(side * scale)) for side in image.size)
        place = (left + (SIDE - width) // 2, top + (SIDE - height) // 2)
        sheet.paste(image.resize((width, height), Image.Resampling.NEAREST), place)
        for row, line in enumerate(lines):
            text = f"{line.share} {line.name}".lstrip()
            place = (left, top + SIDE + 1 + row * (CAPTION // 2))
            pen.text(place, _short(text, LETTERS), fill=line.colour, font=font)
    return np.asarray(sheet)


def _short(name: str, most: int) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


@dataclass(frozen=True)
class Histogram:
    """How the weights of one parameter lie.

    Attributes:
        sample: the weights looked at, (S,).
        edges: upper ends of the bins, (BINS,).
        counts: weights in each, (BINS,).
    """

    sample: Float[Tensor, " S"]
    edges: list[float]
    counts: list[float]


def histograms(model: nn.Module) -> Iterator[tuple[str, Histogram]]:
    """Name and histogram of every matrix of a model, from a sample of its weights."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        weights = parameter.detach().flatten()
        sample = weights[:: max(1, weights.numel() // SAMPLED)].float().cpu()
        low, high = float(sample.min()), float(sample.max())
        high = high if high > low else low + 1e-6
        counts = torch.histc(sample, BINS, low, high)
        edges = torch.linspace(low, high, BINS + 1)[1:]
        yield name, Histogram(sample, edges.tolist(), counts.tolist())
