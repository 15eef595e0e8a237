"""Loaders of the contenders: JPEG files to batches that are cropped, flipped and normalised.

Runs in the process of one contender, on one thread; each loader works in that process alone, so
that nothing is prepared while another contender is timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import count as count_from
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from vitkit.benchmarking.contender_process.torchvision_operators import declare_missing_operators
from vitkit.benchmarking.machine import installed_versions
from vitkit.data.augmentation.pipeline import Augmentation
from vitkit.data.loading.loader import TrainingSteps, batches
from vitkit.data.sources.open import open_dataset
from vitkit.engines.choosing.sample_images import sample_images
from vitkit.errors import SettingError
from vitkit.spec import Preprocess

FEWEST_PHOTOGRAPHS = 64
PHOTOGRAPH_SIZE = (375, 500)
"""Height and width in pixels, as most images of ImageNet have."""
CROP_SCALE = 0.08
"""Smallest part of the area that a crop keeps: that of ImageNet recipes."""
CONTRAST = 50.0
"""Standard deviation of a photograph's pixels, in levels of 256."""
LARGEST_STEP = 10**9
LOADERS = ("vitkit", "torchvision", "timm")
"""Names of the loaders; the last two are models of `PEERS`, too."""


class ImageLoader(NamedTuple):
    """A loader that is ready.

    Attributes:
        library: with its version.
        batch: returns the next batch (B, 3, H, W), float32 and normalised.
    """

    library: str
    batch: Callable[[], Tensor]


def write_photographs(folder: Path, batch_size: int) -> None:
    """Write JPEG files of two classes, of the size and detail of photographs.

    Args:
        folder: where they are written, in `train`.
        batch_size: there are enough for two batches.
    """
    for number in range(max(FEWEST_PHOTOGRAPHS, 2 * batch_size)):
        image = sample_images(1, 3, PHOTOGRAPH_SIZE, seed=number)[0]
        levels = (128 + CONTRAST * image).clamp(0, 255).byte()
        place = folder / "train" / ("cat" if number % 2 else "dog") / f"{number:03}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        pixels: np.ndarray = levels.permute(1, 2, 0).contiguous().numpy()
        Image.fromarray(pixels).save(place, quality=90)


def make_image_loader(
    name: str, folder: Path, image_size: tuple[int, int], batch_size: int
) -> ImageLoader:
    """Build a loader of the images in a folder.

    Args:
        name: one of `LOADERS`.
        folder: with the folders of the classes in `train`.
        image_size: height and width of the batches.
        batch_size: images of each.

    Raises:
        SettingError: there is no such loader.
    """
    if name == "vitkit":
        found = _own_batches(folder, image_size, batch_size)
        distribution = "vitkit"
    elif name in LOADERS:
        found = _library_batches(name, folder, image_size, batch_size)
        distribution = name
    else:
        raise SettingError(f"{name} has no loader of images")
    version = installed_versions([distribution]).get(distribution, "")
    return ImageLoader(f"{distribution} {version}".strip(), lambda: next(found))


def _own_batches(folder: Path, image_size: tuple[int, int], batch_size: int) -> Iterator[Tensor]:
    split = open_dataset(folder).splits["train"]
    preprocess = Preprocess(image_size=image_size)
    augmentation = Augmentation(flip=0.5, crop_scale=CROP_SCALE)
    steps = TrainingSteps(split, preprocess, augmentation, batch_size=batch_size, seed=0)
    device = torch.device("cpu")
    for batch in batches(steps, range(LARGEST_STEP)):
        yield batch.images(preprocess, device)


def _library_batches(
    name: str, folder: Path, image_size: tuple[int, int], batch_size: int
) -> Iterator[Tensor]:
    declare_missing_operators()
    datasets: Any = importlib.import_module("torchvision.datasets")
    transform = _timm_transform(image_size) if name == "timm" else _torchvision(image_size)
    dataset = datasets.ImageFolder(str(folder / "train"), transform=transform)
    for epoch in count_from():
        torch.manual_seed(epoch)
        loader = DataLoader(dataset, batch_size, shuffle=True, drop_last=True)
        for images, _ in loader:
            yield images


def _torchvision(image_size: tuple[int, int]) -> Any:
    """Return the transform of torchvision's reference for classification, without a policy."""
    transforms: Any = importlib.import_module("torchvision.transforms")
    mean, std = Preprocess().mean, Preprocess().std
    bicubic = transforms.InterpolationMode.BICUBIC
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(
                image_size, scale=(CROP_SCALE, 1.0), interpolation=bicubic
            ),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(mean, std),
        ]
    )


def _timm_transform(image_size: tuple[int, int]) -> Any:
    data: Any = importlib.import_module("timm.data")
    mean, std = Preprocess().mean, Preprocess().std
    return data.create_transform(
        (3, *image_size),
        is_training=True,
        scale=(CROP_SCALE, 1.0),
        color_jitter=None,
        interpolation="bicubic",
        mean=mean,
        std=std,
    )
