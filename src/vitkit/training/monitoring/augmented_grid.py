"""A grid of training images as the model is given them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitkit.data.loading.batch_transform import BatchTransform, ModelInputs
from vitkit.data.loading.loader import Batch
from vitkit.io.atomic import output_error
from vitkit.spec import Preprocess
from vitkit.training.monitoring.image_grids import Line, grid

SHOWN, ACROSS = 32, 8
"""Images in the grid of what the model is fed, and in a row of it."""
GREY = "#6e7781"


def save_augmented_grid(
    path: Path, transform: BatchTransform, batch: Batch, classes: tuple[str, ...]
) -> None:
    """Write a grid of the images of a batch, as the model is given them in the first step.

    Raises:
        OutputError: the file cannot be written.
    """
    sheet = augmented_grid(transform(batch, step=0), batch, transform.preprocess, classes)
    try:
        Image.fromarray(sheet).save(path)
    except OSError as error:
        raise output_error(path, error) from error


def augmented_grid(
    fed: ModelInputs, batch: Batch, preprocess: Preprocess, classes: tuple[str, ...]
) -> UInt8[np.ndarray, "H W 3"]:
    """Images as they are fed, over their labels and, where two are mixed, the share of each.

    Args:
        fed: what became of the batch.
        batch: whose labels they are.
        preprocess: mean and std, which are undone.
        classes: their names.
    """
    mean, std = (np.array(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    images = fed.images[:SHOWN].cpu().numpy() * std + mean
    pixels = np.rint(images.clip(0, 1) * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    labels = [classes[int(label)] for label in batch.labels]
    if fed.mixture is None:
        return grid(pixels, [[Line(label)] for label in labels[:SHOWN]], ACROSS)
    own = fed.mixture.weight
    captions = [
        [Line(label, f"{own:.0%}"), Line(partner, f"{1 - own:.0%}", GREY)]
        for label, partner in zip(labels[:SHOWN], labels[::-1], strict=False)
    ]
    return grid(pixels, captions, ACROSS)
