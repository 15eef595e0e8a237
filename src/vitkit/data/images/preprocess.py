"""The one evaluation transform: size, centre crop, normalisation by mean and standard deviation.

Training, evaluation and prediction all use it. Grey or colour, then size, then centre crop on uint8
pixels (Pillow, `fit`); normalisation on the tensor's own device (torch, `normalise`). The crop's
arithmetic is timm's, so that its checkpoints see the same pixels.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from vitkit.data.images.read import ImageSource, read_image
from vitkit.errors import SettingError, ShapeError
from vitkit.spec import Preprocess as Preprocess

RESAMPLING = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}


def fit(
    image: UInt8[np.ndarray, "H W channels"], preprocess: Preprocess
) -> UInt8[np.ndarray, "h w C"]:
    """Fit a decoded image to the model's size and channels, still uint8 [0, 255].

    Args:
        image: (H, W, 3) RGB or (H, W, 1) grey, uint8.
        preprocess: size (h, w), channels C, filter, and whether to squash, to crop, or both.

    Returns:
        (h, w, C) uint8; the image itself where there is nothing to do.

    Raises:
        ShapeError: an image of another shape or dtype.
    """
    if preprocess.fit == "squash":
        return squash(image, preprocess)
    # Channels first: for a grey model one channel is resized instead of three.
    image = in_channels(image, preprocess.channels)
    scaled = _scaled_size(image.shape[:2], preprocess)
    image = _resize(image, scaled, preprocess)
    height, width = preprocess.image_size
    top, left = _centre(scaled, preprocess.image_size)
    return image[top : top + height, left : left + width]


def squash(
    image: UInt8[np.ndarray, "H W channels"], preprocess: Preprocess
) -> UInt8[np.ndarray, "h w C"]:
    """Resize an image to the model's size, each side by its own factor.

    Args:
        image: (H, W, 3) RGB or (H, W, 1) grey, uint8.
        preprocess: size (h, w), channels C and filter; `fit` is ignored.

    Raises:
        ShapeError: an image of another shape or dtype.
    """
    image = in_channels(image, preprocess.channels)
    return _resize(image, preprocess.image_size, preprocess)


def normalise(pixels: UInt8[Tensor, "B H W C"], preprocess: Preprocess) -> Float[Tensor, "B C H W"]:
    """Return (pixels / 255 - mean) / std per channel: float32, on the device of `pixels`.

    Args:
        pixels: (B, H, W, C) uint8 [0, 255], as `fit` gives them.
        preprocess: its mean and std, on the scale [0, 1].

    Raises:
        ShapeError: another number of channels or another dtype.
    """
    return standardise_in_place(to_unit(pixels, preprocess), preprocess)


def to_unit(pixels: UInt8[Tensor, "B H W C"], preprocess: Preprocess) -> Float[Tensor, "B C H W"]:
    """Return pixels / 255, on the scale [0, 1]: the first half of `normalise`.

    Raises:
        ShapeError: another number of channels or another dtype.
    """
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[-1] != preprocess.channels:
        raise ShapeError(
            f"expected pixels (B, H, W, {preprocess.channels}) uint8, "
            f"got {tuple(pixels.shape)} {pixels.dtype}"
        )
    # A copy in (B, C, H, W) order, which may be changed in place.
    images = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
    return images.div_(_per_channel((255.0,), images))


def standardise_in_place(
    images: Float[Tensor, "B C H W"], preprocess: Preprocess
) -> Float[Tensor, "B C H W"]:
    """Compute (images - mean) / std per channel, in place: the second half of `normalise`."""
    mean = _per_channel(preprocess.mean, images)
    std = _per_channel(preprocess.std, images)
    return images.sub_(mean).div_(std)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Float[Tensor, "_ 1 1"]:
    """Return numbers as a tensor (C, 1, 1) on the device of `like`.

    Some devices multiply by the reciprocal of a plain number instead of dividing, and the last bit
    would then depend on the device.
    """
    return torch.tensor(values, dtype=torch.float32, device=like.device).view(-1, 1, 1)


def preprocess_images(
    images: Sequence[UInt8[np.ndarray, "_ _ _"]], preprocess: Preprocess
) -> Float[Tensor, "B C h w"]:
    """Fit and normalise decoded images of any sizes.

    Args:
        images: (H, W, 3) or (H, W, 1) uint8, at least one.
        preprocess: size (h, w), channels C, mean and std.

    Returns:
        (B, C, h, w) float32.

    Raises:
        ShapeError: no image at all, or one of another shape or dtype.
    """
    if not images:
        raise ShapeError("expected at least one image, got none")
    pixels = np.stack([fit(image, preprocess) for image in images])
    return normalise(torch.from_numpy(pixels), preprocess)


def viewport(size: tuple[int, int], preprocess: Preprocess) -> tuple[float, float, float, float]:
    """Return the part of an image that the model sees, for laying heat maps on the original.

    Args:
        size: (H, W) of the original image, in pixels.
        preprocess: with `fit="squash"` the model sees all of it.

    Returns:
        (top, left, height, width) in pixels of the original image, fractions included.
    """
    if preprocess.fit == "squash":
        return 0.0, 0.0, float(size[0]), float(size[1])
    scaled = _scaled_size(size, preprocess)
    top, left = _centre(scaled, preprocess.image_size)
    down = size[0] / scaled[0]
    across = size[1] / scaled[1]
    height, width = preprocess.image_size
    # From pixels of the resized image back to pixels of the original.
    return top * down, left * across, height * down, width * across


def _scaled_size(size: tuple[int, ...], preprocess: Preprocess) -> tuple[int, int]:
    """Return (H, W) of the resized image of which the crop is the centre."""
    height, width = size
    crop_height, crop_width = preprocess.image_size
    # timm rounds down: an image of 224 with a ratio of 0.9 is cut from one of 248.
    tall = math.floor(crop_height / preprocess.crop_ratio)
    wide = math.floor(crop_width / preprocess.crop_ratio)
    if preprocess.fit == "squash-crop":
        return tall, wide
    if tall != wide:
        # The side that is relatively shorter fits its target; timm rounds here ...
        factor = min(height / tall, width / wide)
        return round(height / factor), round(width / factor)
    # ... and cuts off here.
    if height <= width:
        return tall, int(tall * width / height)
    return int(tall * height / width), tall


def _centre(scaled: tuple[int, int], size: tuple[int, int]) -> tuple[int, int]:
    """Return (top, left) of the centre crop; Python's rounding, halves to even, as in timm."""
    return round((scaled[0] - size[0]) / 2), round((scaled[1] - size[1]) / 2)


def pil_image(pixels: UInt8[np.ndarray, "H W channels"]) -> Image.Image:
    """Return decoded pixels, (H, W, 3) RGB or (H, W, 1) grey, as a PIL image, "RGB" or "L"."""
    if pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    return Image.fromarray(pixels)


def _resize(
    image: UInt8[np.ndarray, "H W C"], size: tuple[int, int], preprocess: Preprocess
) -> UInt8[np.ndarray, "h w C"]:
    if image.shape[:2] == size:
        return image
    # Pillow takes (W, H), and gives grey pixels without an axis of channels.
    resized = pil_image(image).resize(size[::-1], RESAMPLING[preprocess.interpolation])
    return np.array(resized).reshape(*size, -1)


def in_channels(
    image: UInt8[np.ndarray, "H W channels"], channels: int
) -> UInt8[np.ndarray, "H W C"]:
    """Convert colour to grey by Rec. 601 (0.299 R + 0.587 G + 0.114 B), or repeat grey.

    Raises:
        ShapeError: an image of another shape or dtype.
    """
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (1, 3):
        raise ShapeError(
            f"expected an image (H, W, 3) or (H, W, 1) uint8, got {image.shape} {image.dtype}"
        )
    if image.shape[2] == channels:
        return image
    if channels == 3:
        return np.repeat(image, 3, axis=2)
    return np.array(Image.fromarray(image).convert("L"))[:, :, None]


def read_and_preprocess(
    preprocess: Preprocess, image: ImageSource | list[Any] | tuple[Any, ...]
) -> Float[Tensor, "*B C h w"]:
    """Return the input of one image (C, h, w), or of a list of them, as `Preprocess` describes."""
    if not isinstance(image, list | tuple):
        return preprocess_images([read_image(image)], preprocess)[0]
    if not image:
        raise SettingError("expected an image or a list of images, got an empty list")
    # Bytes and arrays have no name of their own: messages name their index.
    pixels = [read_image(source, f"image {number}") for number, source in enumerate(image)]
    return preprocess_images(pixels, preprocess)
