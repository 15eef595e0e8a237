"""A grid of augmented training images with their labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitkit.data.augmentation.model_inputs import ModelInputs
from vitkit.data.augmentation.pipeline import BatchTransform
from vitkit.data.loading.batch import Batch
from vitkit.io.atomic import output_error
from vitkit.messages import percent
from vitkit.spec import Preprocess
from vitkit.training.monitoring.image_grids import Line, grid

SHOWN, ACROSS = 32, 8
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
    sheet = augmented_grid(transform(batch, step=0), batch, transform.preprocess, classes)
    try:
        Image.fromarray(sheet).save(path)
    except OSError as error:
        raise output_error(path, error) from error


def augmented_grid(
    fed: ModelInputs, batch: Batch, preprocess: Preprocess, classes: tuple[str, ...]
) -> UInt8[np.ndarray, "H W 3"]:
    """Draw the inputs of a model above their labels, with the weights of mixed images.

    Args:
        fed: inputs of the model.
        batch: batch that they were made of, for the labels.
        preprocess: mean and std, which are undone.
        classes: class names.

    Returns:
        The grid (H, W, 3), RGB.
    """
    captions = fed_labels(fed, batch, classes)[:SHOWN]
    return grid(fed_pixels(fed, preprocess, SHOWN), captions, ACROSS)


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
