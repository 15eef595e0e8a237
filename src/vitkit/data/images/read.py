"""Read an image of any kind: a path, bytes, a PIL image or an array."""

from os import PathLike
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitkit.data.images.decode import as_rgb, decode
from vitkit.errors import DataError, ImageError, SettingError

ImageSource: TypeAlias = str | PathLike[str] | bytes | Image.Image | np.ndarray
"""A path, an encoded file's bytes, a PIL image, or (H, W, 3), (H, W, 1) or (H, W) uint8."""


def read_image(image: ImageSource, name: str = "image") -> UInt8[np.ndarray, "H W 3"]:
    """Read an image as (H, W, 3) uint8 RGB.

    Args:
        image: a path, an encoded file's bytes, a PIL image or an array.
        name: its name in messages; a path names itself.

    Raises:
        ImageError: an image that cannot be used.
        SettingError: not an image, such as a list of images.
    """
    if not isinstance(image, str | PathLike | bytes | Image.Image | np.ndarray):
        raise SettingError(
            f"{name} is a {type(image).__name__}; pass an image: a path, bytes, a PIL image or a "
            "uint8 array"
        )
    # Pixels in memory have no header to check first.
    if isinstance(image, Image.Image | np.ndarray):
        return as_rgb(image, name)
    return decode(image, name=name if isinstance(image, bytes) else None)


# Pixels of images that other code made: PIL images, arrays and tensors, checked by name.


def as_pixels(image: Any, name: str) -> UInt8[np.ndarray, "H W C"]:
    """Return an image as (H, W, 3) RGB or (H, W, 1) grey, uint8 [0, 255].

    Args:
        image: a PIL image, a path or bytes of a file; an array (H, W), (H, W, 1) or (H, W, 3); a
            tensor (H, W), (1, H, W) or (3, H, W). Arrays and tensors are uint8 [0, 255] or float
            [0, 1], which is rounded to 8 bits.
        name: its name in messages.

    Raises:
        DataError: an object of another kind, shape or range.
        ImageError: a file or a PIL image that cannot be used.
    """
    if isinstance(image, str | PathLike | bytes | Image.Image):
        # Messages name the position in the dataset before the path.
        try:
            return read_image(image, name)
        except ImageError as error:
            raise ImageError(name, error.reason, f"{error.name}: {error.detail}") from error
    if not hasattr(image, "shape") or not hasattr(image, "dtype"):
        raise DataError(
            f"{name}: the image is a {type(image).__name__}; expected a PIL image, a path, a uint8 "
            "array or a float tensor"
        )
    pixels, noun, expected = image, "array", "(H, W), (H, W, 1) or (H, W, 3)"
    if not isinstance(image, np.ndarray):
        pixels, noun, expected = as_array(image, name), "tensor", "(H, W), (1, H, W), (3, H, W)"
        if pixels.ndim == 3:  # torch's order is channels first
            pixels = np.moveaxis(pixels, 0, -1)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or 0 in pixels.shape:
        raise DataError(
            f"{name}: the {noun} has the shape {tuple(image.shape)}; expected {expected}"
        )
    return np.ascontiguousarray(as_bytes(pixels, name))


def as_array(tensor: Any, name: str) -> np.ndarray:
    """Return a tensor of torch as an array of the same shape and values.

    Args:
        tensor: on any device, with or without gradients.
        name: its name in messages.

    Raises:
        DataError: an object of another library, or numbers that numpy lacks, such as bfloat16.
    """
    try:
        array: np.ndarray = tensor.detach().cpu().numpy()
    except (AttributeError, TypeError, RuntimeError) as error:
        raise DataError(
            f"{name}: a {type(tensor).__name__} that cannot be read as an array: {error}; expected "
            "a numpy array or a torch tensor"
        ) from None
    return array


def as_bytes(pixels: np.ndarray, name: str) -> UInt8[np.ndarray, "..."]:
    """Return uint8 values as they are, and float values in [0, 1] as whole numbers from 0 to 255.

    Raises:
        DataError: another type of number, or float values out of range; the message has them.
    """
    if pixels.dtype == np.uint8:
        return pixels
    if pixels.dtype.kind != "f":
        raise DataError(
            f"{name}: values of type {pixels.dtype}; expected uint8 from 0 to 255, or float from "
            "0 to 1"
        )
    low, high = float(pixels.min(initial=0.0)), float(pixels.max(initial=0.0))
    # a comparison with NaN is false
    if not (low >= 0.0 and high <= 1.0):
        raise DataError(
            f"{name}: float values from {low:.4g} to {high:.4g}; expected 0 to 1; leave out a "
            "Normalize, as vitkit normalises the images itself"
        )
    return np.rint(pixels * 255.0).astype(np.uint8)
