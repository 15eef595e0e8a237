"""Random crops, flips and shifts of uint8 images: functions of (seed, epoch, index, view).

Crops and flips are made per image, shifts per batch; each image has its own random numbers. The
same arguments give the same pixels in any process, in any order.
"""

import math

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from pydantic import Field
from torch.nn.functional import interpolate

from vitkit import errors, randomness, spec
from vitkit.data.images.decode import REDUCTIONS, reduced_size
from vitkit.data.images.preprocess import fit, in_channels, squash
from vitkit.frozen import frozen

PixelBatch = UInt8[np.ndarray, "B H W C"]

CROP_RATIOS = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10


@frozen(raises=errors.SettingError)
class Augmentation:
    """Settings of the random changes to training images; those of pixels are made here.

    The defaults change nothing.

    Attributes:
        flip: chance of a horizontal flip, [0, 1].
        shift: largest shift in pixels, up, down, left and right; edges are repeated.
        crop_scale: smallest part of the area that a random crop keeps, (0, 1]; 1 means no crop.
        aa: a policy by name, as `policies.policy` reads it.
        color_jitter: largest change of brightness, contrast and saturation, as a factor.
        reprob: chance that a box of the image is erased, [0, 1].
        resizer: the library that resizes a random crop; without crops an image is resized as in
            evaluation, by Pillow.
        scaled_jpeg: whether a JPEG is decoded smaller where its random crop is not enlarged.

    Raises:
        SettingError: a value out of range.
    """

    flip: float = Field(0.0, ge=0.0, le=1.0)
    shift: int = Field(0, ge=0)
    crop_scale: float = Field(1.0, gt=0.0, le=1.0)
    aa: str | None = None
    color_jitter: float = Field(0.0, ge=0.0, le=1.0)
    reprob: float = Field(0.0, ge=0.0, le=1.0)
    resizer: spec.Resizer = "torch"
    scaled_jpeg: bool = False

    def reduction(
        self,
        size: tuple[int, int],
        preprocess: spec.Preprocess,
        seed: int,
        augmentation_key: int,
        index: int,
    ) -> int:
        """Return the factor by which a JPEG may be decoded smaller for its crop: 1, 2, 4 or 8.

        Args:
            size: (H, W) of the upright image.
            preprocess: size (h, w) of the resized crop.
            seed: seed of the run.
            augmentation_key: epoch and view, `randomness.augmentation_key`.
            index: the image's index in the split.
        """
        if not self.scaled_jpeg or self.crop_scale == 1.0:
            return 1
        height, width = preprocess.image_size
        # A crop has at most the image's size: most small images need no draw.
        if size[0] < 2 * height or size[1] < 2 * width:
            return 1
        box = crop_box(size, self.crop_scale, seed, augmentation_key, index)
        return largest_reduction(size, box, preprocess.image_size)

    def resize(
        self,
        image: UInt8[np.ndarray, "H W channels"],
        preprocess: spec.Preprocess,
        seed: int,
        augmentation_key: int,
        index: int,
        size: tuple[int, int] | None = None,
    ) -> UInt8[np.ndarray, "h w C"]:
        """Resize one image: by a random crop, or as in evaluation where crops are off.

        Args:
            image: (H, W, 3) or (H, W, 1) uint8.
            preprocess: size (h, w) and channels C.
            seed: seed of the run.
            augmentation_key: epoch and view, `randomness.augmentation_key`.
            index: the image's index in the split.
            size: the image's full size (H, W), where it was decoded smaller.
        """
        # Evaluation keeps the aspect ratio, an Inception crop of the whole image would not.
        if self.crop_scale == 1.0:
            return fit(image, preprocess)
        decoded = (image.shape[0], image.shape[1])
        size = size or decoded
        box = crop_box(size, self.crop_scale, seed, augmentation_key, index)
        return resized_crop(image, reduced_box(box, size, decoded), preprocess, self.resizer)

    def flip_and_shift(
        self,
        pixels: PixelBatch,
        seed: int,
        augmentation_keys: int | Int64[np.ndarray, "B"],
        indices: Int64[np.ndarray, "B"],
    ) -> PixelBatch:
        """Flip, in place, and shift a batch, each image by its own random numbers.

        Args:
            pixels: (B, H, W, C) uint8, contiguous.
            seed: seed of the run.
            augmentation_keys: epoch and view of each image (B,), or of all.
            indices: the images' indices in the split (B,).

        Returns:
            (B, H, W, C).
        """
        if self.flip > 0:
            flipped = (
                randomness.uniform(seed, augmentation_keys, indices, randomness.Draw.FLIP)
                < self.flip
            )
            for row in np.flatnonzero(flipped):
                # numpy moves the bytes of a reversed view one by one
                pixels[row] = torch.from_numpy(pixels[row]).flip(1).numpy()
        if self.shift == 0:
            return pixels
        return _shift_batch(pixels, self.shift, seed, augmentation_keys, indices)


def crop_box(
    size: tuple[int, int], scale: float, seed: int, augmentation_key: int, index: int
) -> tuple[int, int, int, int]:
    """Draw an Inception crop of an image: (left, top, right, bottom) in pixels.

    Area uniform in [scale, 1] of the image's, log of the aspect ratio uniform between 3/4 and
    4/3, ten attempts ("Going Deeper with Convolutions", arXiv 1409.4842, Sec. 6). Where none fits,
    as mostly in long images, the largest box in the middle whose ratio is allowed, as torchvision
    and timm take it.

    Args:
        size: (H, W) of the image.
        scale: smallest part of the area, (0, 1].
        seed: seed of the run.
        augmentation_key: epoch and view, `randomness.augmentation_key`.
        index: the image's index in the split.
    """
    height, width = size
    low = math.log(CROP_RATIOS[0])
    high = math.log(CROP_RATIOS[1])
    drawn = randomness.integer_hash(seed, augmentation_key, index, randomness.Draw.CROP)
    hashes = [randomness.integer_hash(number, after=drawn) for number in range(4)]
    for attempt in range(CROP_ATTEMPTS):
        part, place, across, down = (
            randomness.as_uniform(randomness.integer_hash(attempt, after=h)) for h in hashes
        )
        area = (scale + (1 - scale) * part) * height * width
        # numpy's exp, not math's: a last bit that differs may round to another box
        ratio = float(np.exp(low + (high - low) * place))
        crop_width = round(math.sqrt(area * ratio))
        crop_height = round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(across * (width - crop_width + 1))
            top = int(down * (height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
    return _middle(size)


def _middle(size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the largest centre crop of an image (H, W) with an allowed aspect ratio."""
    height, width = size
    low, high = CROP_RATIOS
    box_width = min(width, max(1, round(height * high)))
    box_height = min(height, max(1, round(width / low)))
    left = (width - box_width) // 2
    top = (height - box_height) // 2
    return left, top, left + box_width, top + box_height


def _shift_batch(
    pixels: PixelBatch,
    largest: int,
    seed: int,
    augmentation_keys: int | Int64[np.ndarray, "B"],
    indices: Int64[np.ndarray, "B"],
) -> PixelBatch:
    """Shift each image of a batch by a random number of pixels; its edges are repeated."""
    draws = randomness.uniform(
        seed, augmentation_keys, indices[None, :], randomness.Draw.SHIFT, np.arange(2)[:, None]
    )
    # Every whole number from -largest to largest is equally likely.
    down, across = (draws * (2 * largest + 1)).astype(np.int64) - largest
    return _shift(np.ascontiguousarray(pixels), down, across)


def _shift(
    pixels: PixelBatch, down: Int64[np.ndarray, "B"], across: Int64[np.ndarray, "B"]
) -> PixelBatch:
    """Shift each image by its offsets in pixels, down and across; its edges are repeated."""
    batch, height, width, channels = pixels.shape
    # Vertically, the batch is one tall image: every row is copied from its clipped source row.
    rows = np.clip(down[:, None] + np.arange(height), 0, height - 1)
    rows += np.arange(batch)[:, None] * height
    moved = pixels.reshape(batch * height, width * channels).take(rows.ravel(), axis=0)
    moved = moved.reshape(pixels.shape)
    shifted = np.empty_like(pixels)
    # Images of one offset at once: whole rows are copied then, not single pixels.
    for offset in np.unique(across).tolist():
        same = np.flatnonzero(across == offset)
        shifted[same] = _shift_across(moved[same], min(max(offset, 1 - width), width - 1))
    return shifted


def _shift_across(pixels: PixelBatch, offset: int) -> PixelBatch:
    """Shift all images by the same number of pixels across, less than their width."""
    width = pixels.shape[2]
    start = max(0, -offset)
    end = width - max(0, offset)
    shifted = np.empty_like(pixels)
    shifted[:, :, start:end] = pixels[:, :, start + offset : end + offset]
    shifted[:, :, :start] = pixels[:, :, :1]
    shifted[:, :, end:] = pixels[:, :, -1:]
    return shifted


# A random crop resized to the model's size: by Pillow as in evaluation, or by torch, faster.
#
# torch resizes uint8 pixels in their own order, with the same filters and antialiasing as Pillow
# and coefficients of fewer bits: nearly all values are the same or differ by 1, a few at hard edges
# by up to 11. A JPEG that is much larger than the crop needs may have been decoded smaller, and the
# box shrinks with it.

Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels."""


def resized_crop(
    image: UInt8[np.ndarray, "H W channels"],
    box: Box,
    preprocess: spec.Preprocess,
    resizer: spec.Resizer,
) -> UInt8[np.ndarray, "h w C"]:
    """Resize a part of an image to the model's size, each side by its own factor.

    Args:
        image: (H, W, 3) RGB or (H, W, 1) grey, uint8.
        box: the part.
        preprocess: size (h, w), channels C and filter; `fit` is ignored.
        resizer: the library. torch has no antialiased `nearest`, which is Pillow's always.

    Raises:
        ShapeError: an image of another shape or dtype.
    """
    left, top, right, bottom = box
    crop = image[top:bottom, left:right]
    if resizer == "pillow" or preprocess.interpolation == "nearest":
        return squash(crop, preprocess)
    # A copy of whole rows: torch's fast path takes pixels without gaps.
    pixels = torch.from_numpy(np.array(in_channels(crop, preprocess.channels), order="C"))
    if pixels.shape[:2] != preprocess.image_size:
        # `unsqueeze` gives strides in which torch recognises channels that come last.
        batch = pixels.unsqueeze(0).permute(0, 3, 1, 2)
        batch = interpolate(
            batch, preprocess.image_size, mode=preprocess.interpolation, antialias=True
        )
        pixels = batch.permute(0, 2, 3, 1)[0]
    return pixels.numpy()


def largest_reduction(size: tuple[int, int], box: Box, output: tuple[int, int]) -> int:
    """Return the largest factor by which an image may be decoded smaller for a crop.

    Args:
        size: (H, W) of the image.
        box: the crop, in pixels of the image.
        output: (h, w) that the crop is resized to; it is never enlarged because of the factor.

    Returns:
        1, 2, 4 or 8.
    """
    for factor in REDUCTIONS:
        left, top, right, bottom = reduced_box(box, size, reduced_size(size, factor))
        if bottom - top >= output[0] and right - left >= output[1]:
            return factor
    return 1


def reduced_box(box: Box, size: tuple[int, int], reduced: tuple[int, int]) -> Box:
    """Return a box of an image in the pixels of the same image at another size.

    Args:
        box: in pixels of the image.
        size: (H, W) of the image.
        reduced: (H, W) of the smaller one; each edge moves to the nearest edge of its pixels.
    """
    if size == reduced:
        return box
    down = reduced[0] / size[0]
    across = reduced[1] / size[1]
    left, top, right, bottom = box
    return round(left * across), round(top * down), round(right * across), round(bottom * down)
