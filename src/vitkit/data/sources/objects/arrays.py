"""Images and labels in two arrays, or paths and labels in pairs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.data.datasets.dataset import ArraySplit, FileSplit, array_digests
from vitkit.data.datasets.file_digests import file_digests
from vitkit.data.images.pixels import as_array, as_bytes
from vitkit.data.sources.objects.items import Label, as_label
from vitkit.data.sources.objects.object_part import ObjectPart
from vitkit.errors import DataError


def is_arrays(data: object) -> bool:
    """Return True for (images, labels), the images an array or a tensor of all of them."""
    return isinstance(data, tuple) and len(data) == 2 and len(getattr(data[0], "shape", ())) > 0


def read_arrays(images: Any, labels: Any, origin: str) -> ObjectPart:
    """Return the images of an array; arrays that are uint8 already are not copied.

    Args:
        images: an array (N, H, W), (N, H, W, 1) or (N, H, W, 3), or a tensor (N, H, W) or
            (N, C, H, W); uint8 [0, 255], or float [0, 1], which is rounded to 8 bits.
        labels: N class numbers or class names: an array, a tensor or a list.
        origin: its name, for messages.

    Raises:
        DataError: arrays of other shapes, types or lengths.
    """
    pixels, expected = images, "(N, H, W), (N, H, W, 1) or (N, H, W, 3)"
    if not isinstance(images, np.ndarray):
        pixels, expected = as_array(images, origin), "(N, H, W), (N, 1, H, W) or (N, 3, H, W)"
        if pixels.ndim == 4:
            pixels = np.moveaxis(pixels, 1, -1)
    if pixels.dtype == object:
        raise DataError(
            f"{origin}: an array of objects; for images of several sizes pass a list of (image, "
            "label) instead"
        )
    if pixels.ndim == 3:
        pixels = pixels[..., None]
    if pixels.ndim != 4 or pixels.shape[-1] not in (1, 3):
        raise DataError(f"{origin}: images of the shape {tuple(images.shape)}; expected {expected}")
    if not pixels.size:
        raise DataError(f"{origin} is empty: images of the shape {tuple(images.shape)}")
    values = as_labels(labels, origin)
    if len(values) != len(pixels):
        raise DataError(
            f"{origin}: {len(pixels):,} images and {len(values):,} labels; expected equally many"
        )
    notes: tuple[str, ...] = ()
    if pixels.dtype != np.uint8:
        notes = (f"{origin}: float images in [0, 1] are rounded to 8 bits",)
        pixels = as_bytes(pixels, origin)
    pixels = np.ascontiguousarray(pixels)
    digests = np.frombuffer(b"".join(array_digests(pixels)), np.uint8).reshape(-1, 32)
    split = ArraySplit(pixels, np.zeros(len(pixels), np.int64), origin)
    return ObjectPart("arrays", split, values, digests, notes=notes)


def as_labels(labels: Any, origin: str) -> list[Label]:
    """Return the labels of N images as class numbers or names.

    Args:
        labels: an array, a tensor or a list (N,).
        origin: the name of the images in messages.

    Raises:
        DataError: something else than one label for each image; the message has its index.
    """
    if hasattr(labels, "detach"):
        labels = as_array(labels, origin)
    try:
        shape = np.shape(labels)
    except ValueError as error:  # a list of lists of several lengths
        raise DataError(
            f"{origin}: the labels are not a list of one value per image: {error}"
        ) from None
    if len(shape) != 1:
        raise DataError(
            f"{origin}: labels of the shape {shape}; expected (N,), one class number per image; "
            "for one-hot labels pass the argmax"
        )
    return [as_label(label, f"{origin}[{index}]") for index, label in enumerate(labels)]


def is_pairs(data: object) -> bool:
    """Return True for a list of (path, label)."""
    if not isinstance(data, list | tuple) or not data:
        return False
    first = data[0]
    return (
        isinstance(first, list | tuple)
        and len(first) == 2
        and isinstance(first[0], str | os.PathLike)
    )


def read_pairs(pairs: Sequence[Any], origin: str) -> ObjectPart:
    """Return the images of a list of (path, label); the files are read when they are needed.

    Raises:
        DataError: an entry that is no such pair; the message has its index.
    """
    paths: list[str] = []
    labels: list[Label] = []
    for index, pair in enumerate(pairs):
        name = f"{origin}[{index}]"
        is_pair = isinstance(pair, list | tuple) and len(pair) == 2
        if not is_pair or not isinstance(pair[0], str | os.PathLike):
            raise DataError(f"{name} is {pair!r:.80}; expected (path, label)")
        paths.append(os.path.abspath(os.path.expanduser(pair[0])))
        labels.append(as_label(pair[1], name))
    try:
        # names in messages are relative to the folder that all files are in
        root = Path(os.path.commonpath([os.path.dirname(path) for path in paths]))
    except ValueError:  # files on several drives
        root = Path(os.path.abspath(os.sep))
    split = FileSplit(paths, np.zeros(len(paths), np.int64), root)
    return ObjectPart("pairs", split, labels, np.asarray(file_digests(paths)))
