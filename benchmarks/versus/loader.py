"""Loaders: JPEG files to batches that are cropped, flipped and normalised, on one thread.

Each works in its own process alone, so that nothing is prepared while another one is timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from itertools import count as count_from
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from versus.child import Ready, Request
from versus.machine import declare_missing_operators, named
from vitkit.data.augmentation.pipeline import Augmentation
from vitkit.data.loading.loader import TrainingSteps, batches
from vitkit.data.sources.open import open_dataset
from vitkit.engines.trials import sample_images
from vitkit.spec import Preprocess

FEWEST_PHOTOGRAPHS = 64
PHOTOGRAPH_SIZE = (375, 500)
"""Height and width in pixels, as most images of ImageNet have."""
CROP_SCALE = 0.08
"""Smallest part of the area that a crop keeps: that of ImageNet recipes."""
CONTRAST = 50.0
"""Standard deviation of a photograph's pixels, in levels of 256."""


def write_photographs(folder: Path, batch_size: int) -> None:
    """Write JPEG files of two classes, of the size and detail of photographs, for two batches."""
    for number in range(max(FEWEST_PHOTOGRAPHS, 2 * batch_size)):
        image = sample_images(1, 3, PHOTOGRAPH_SIZE, seed=number)[0]
        levels = (128 + CONTRAST * image).clamp(0, 255).byte()
        place = folder / "train" / ("cat" if number % 2 else "dog") / f"{number:03}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels: np.ndarray = levels.permute(1, 2, 0).contiguous().numpy()
        Image.fromarray(pixels).save(place, quality=90)


def build(request: Request) -> Ready:
    """Build a library's loader of the images in a folder."""
    folder, size = Path(request["folder"]), tuple(request["image_size"])
    if request["source"] == "vitkit":
        found = _own_batches(folder, size, request["batch_size"])
    else:
        found = _library_batches(request["source"], folder, size, request["batch_size"])
    next(found)
    return Ready(named(request["source"]), lambda count: lambda number: next(found))


def _own_batches(folder: Path, size: tuple[int, int], batch_size: int) -> Iterator[Tensor]:
    split = open_dataset(folder).splits["train"]
    preprocess = Preprocess(image_size=size)
    augmentation = Augmentation(flip=0.5, crop_scale=CROP_SCALE)
    steps = TrainingSteps(split, preprocess, augmentation, batch_size=batch_size, seed=0)
    device = torch.device("cpu")
    for batch in batches(steps, range(10**9)):
        yield batch.images(preprocess, device)


def _library_batches(
    name: str, folder: Path, size: tuple[int, int], batch_size: int
) -> Iterator[Tensor]:
    declare_missing_operators()
    datasets: Any = importlib.import_module("torchvision.datasets")
    scale, mean, std = (CROP_SCALE, 1.0), Preprocess().mean, Preprocess().std
    if name == "timm":
        data: Any = importlib.import_module("timm.data")
        transform = data.create_transform(
            (3, *size), is_training=True, scale=scale, color_jitter=None, interpolation="bicubic",
            mean=mean, std=std,
        )  # fmt: skip
    else:  # torchvision's reference for classification, without a policy
        of: Any = importlib.import_module("torchvision.transforms")
        crop = of.RandomResizedCrop(size, scale=scale, interpolation=of.InterpolationMode.BICUBIC)
        changes = [crop, of.RandomHorizontalFlip(), of.ToTensor(), of.Normalize(mean, std)]
        transform = of.Compose(changes)
    dataset = datasets.ImageFolder(str(folder / "train"), transform=transform)
    for epoch in count_from():
        torch.manual_seed(epoch)
        for images, _ in DataLoader(dataset, batch_size, shuffle=True, drop_last=True):
            yield images
