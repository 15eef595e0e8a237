"""The pixels of a decoded image of any mode as (H, W, 3) uint8 RGB."""

from __future__ import annotations

import io

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageCms, ImageFile

from vitkit.data.images.integrity import PILLOW_ERRORS
from vitkit.errors import ImageError

RGBPixels = UInt8[np.ndarray, "H W 3"]

BACKGROUND = "white"
"""The colour that shows through transparent pixels."""
BITS, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0
"""Tags of a TIFF (TIFF 6.0, Sec. 8), and a value of the second."""
CONVERTED_AT_ONCE = 1 << 22
"""Pixels; a conversion holds several copies of the pixels that it converts."""


def scale_key_colour(image: ImageFile.ImageFile) -> None:
    """Scale a PNG's transparent colour to the 8 bits of the pixels: Pillow leaves it as stored."""
    if not image.tile:  # loaded already
        return
    key = image.info.get("transparency")
    raw_mode = image.tile[0].args
    if raw_mode in ("L;2", "L;4"):
        if isinstance(key, int):
            image.info["transparency"] = key * (85 if raw_mode == "L;2" else 17)
    elif raw_mode == "RGB;16B" and isinstance(key, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in key)


def array_as_rgb(image: np.ndarray, name: str) -> RGBPixels:
    """Return an array (H, W), (H, W, 1) or (H, W, 3) as (H, W, 3), contiguous.

    Raises:
        ImageError: "mode" for another shape or another type than uint8.
    """
    pixels = image[:, :, None] if image.ndim == 2 else image
    is_image = image.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] in (1, 3)
    if not is_image or min(pixels.shape) < 1:
        raise ImageError(
            name,
            "mode",
            "expected an array (H, W), (H, W, 1) or (H, W, 3) uint8, "
            f"got {image.shape} {image.dtype}",
        )
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def rgb_pixels(image: Image.Image, name: str) -> RGBPixels:
    """Return the pixels of a loaded image as stored, before EXIF rotation.

    Args:
        image: image of any mode.
        name: its name for messages.

    Raises:
        ImageError: "mode" for float and 32-bit pixels.
    """
    if image.mode.startswith("I;16"):
        return _grey_16_bits(image)
    if image.mode in ("I", "F"):
        kind = "float" if image.mode == "F" else "32-bit"
        raise ImageError(name, "mode", f"expected 8 or 16 bits per sample, got {kind} pixels")
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    # In strips: a conversion of the whole image would take several times its memory.
    rows = max(1, CONVERTED_AT_ONCE // image.width)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        is_whole = bottom - top == image.height
        strip = image if is_whole else image.crop((0, top, image.width, bottom))
        pixels[top:bottom] = np.asarray(_to_rgb(strip))
    return pixels


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "CMYK":
        return _cmyk_to_rgb(image)
    if image.has_transparency_data:
        if image.mode in ("La", "RGBa"):  # colours stored multiplied by their alpha
            image = image.convert("LA" if image.mode == "La" else "RGBA")
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, BACKGROUND)
        image = Image.alpha_composite(background, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _grey_16_bits(image: Image.Image) -> RGBPixels:
    """Return the high byte, as Pillow does for 16-bit RGB; 12-bit TIFFs become 8 bits likewise."""
    values = np.asarray(image).astype(np.uint16)
    tags = getattr(image, "tag_v2", {})
    bits = tags.get(BITS, (16,))[0]
    grey = (values >> (bits - 8)).astype(np.uint8)
    if tags.get(PHOTOMETRIC) == WHITE_IS_ZERO:  # Pillow inverts these at 8 bits, not at 16
        grey = 255 - grey
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey = np.where(values == key, np.uint8(255), grey)
    return np.repeat(grey[:, :, None], 3, axis=2)


def _cmyk_to_rgb(image: Image.Image) -> Image.Image:
    profile = image.info.get("icc_profile")
    if profile:
        try:
            inks = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            screen = ImageCms.createProfile("sRGB")
            converted = ImageCms.profileToProfile(image, inks, screen, outputMode="RGB")
        except PILLOW_ERRORS:
            converted = None  # not an ICC profile, or not for CMYK
        if converted is not None:
            return converted
    return image.convert("RGB")
