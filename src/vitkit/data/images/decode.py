"""The one decoder: bytes or a path in, (H, W, 3) uint8 RGB out, and only `ImageError` in between.

Training, checking, prediction and serving all read images here, so that they all see the same
pixels and refuse the same files. An image is decoded whole or not at all.
"""

from __future__ import annotations

import io
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageCms, ImageFile, UnidentifiedImageError

from vitkit.data.images.file_types import FORMATS, HEAD_SIZE, describe, identify
from vitkit.data.images.integrity import (
    Stream,
    check_jpeg_scans,
    check_png_chunks,
    check_png_rows,
    check_tiff_coverage,
    ends_early,
)
from vitkit.data.images.pillow_errors import PILLOW_ERRORS, PillowKeptQuiet
from vitkit.data.images.tiff import BITS, PHOTOMETRIC, WHITE_IS_ZERO, orientation, pixel_layout
from vitkit.errors import ImageError

RGBPixels = UInt8[np.ndarray, "H W 3"]

FileProperty = Literal["CMYK", "16 bits", "1 bit", "alpha", "frames", "turned"]
"""What of a file does not come through as it is stored."""
ODDITIES: tuple[FileProperty, ...] = get_args(FileProperty)

BACKGROUND = "white"
"""What shows through transparent pixels."""

CONVERTED_AT_ONCE = 1 << 22
"""Pixels; a conversion holds several copies of what it converts."""

READABLE = "grey, RGB, RGBA, CMYK or palette of 8 or 16 bits"
WEBP_SHARE = 2
"""A WebP may have this part of the pixels of others: Pillow decodes it by way of two canvases and a
copy of RGBA."""

# EXIF orientation -> what makes the image upright (EXIF 2.3, tag 0x0112).
UPRIGHT = {
    2: lambda p: p[:, ::-1],
    3: lambda p: p[::-1, ::-1],
    4: lambda p: p[::-1],
    5: lambda p: p.swapaxes(0, 1),
    6: lambda p: p[::-1].swapaxes(0, 1),
    7: lambda p: p[::-1, ::-1].swapaxes(0, 1),
    8: lambda p: p[:, ::-1].swapaxes(0, 1),
}


def decode(
    source: bytes | str | os.PathLike[str],
    *,
    name: str | None = None,
    max_pixels: int = 50_000_000,
    max_aspect: float = 200.0,
) -> RGBPixels:
    """Decode one image: JPEG, PNG, WEBP, BMP, GIF or TIFF, told by content, not by name.

    Upright by its EXIF orientation; the first frame of several. Transparency is laid on white;
    grey is repeated; 16 bits become 8 by their high byte; CMYK goes through the embedded ICC
    profile where that can be used. ICC profiles of RGB and grey images are not applied.

    Args:
        source: the file's bytes, or its path.
        name: what to call the image in a message; the path where absent.
        max_pixels: largest width x height, read from the header before any pixel is decoded; of
            a WebP half as many. Pillow's own limit, about 179 million, holds besides.
        max_aspect: largest ratio of the longer to the shorter side.

    Returns:
        (H, W, 3) uint8 RGB, [0, 255], contiguous.

    Raises:
        ImageError: with `.reason`: "missing", "not a file", "empty", "not an image", "format",
            "truncated", "damaged", "too large", "too long" or "mode" (float and 32-bit pixels).
    """
    return examine(source, name=name, max_pixels=max_pixels, max_aspect=max_aspect)[0]


def examine(
    source: bytes | str | os.PathLike[str],
    *,
    name: str | None = None,
    max_pixels: int = 50_000_000,
    max_aspect: float = 200.0,
    admit: Callable[[int], object] = lambda pixels: None,
) -> tuple[RGBPixels, frozenset[FileProperty]]:
    """What `decode` gives and raises, and what had to be done to the file's pixels for it.

    Args:
        source: as in `decode`.
        name: as in `decode`.
        max_pixels: as in `decode`.
        max_aspect: as in `decode`.
        admit: is told how many pixels there are before they are decoded, and may wait.

    Returns:
        The pixels, and of `ODDITIES`: "CMYK" inks turned to colours; "16 bits" a sample (or 12) cut
        to 8; "1 bit" a pixel; an "alpha" channel or transparent colour laid on white; several
        "frames", of which the first is read; "turned" upright by EXIF.
    """
    if name is None:
        name = "image" if isinstance(source, bytes) else os.fspath(source)
    name = escape(name)
    with _opened(source, name) as handle:
        format = None
        try:
            format = identify(head := handle.read(HEAD_SIZE))
            if format is None:
                raise ImageError(name, *describe(head))
            with PillowKeptQuiet():
                return _decode(handle, format, name, max_pixels, max_aspect, admit)
        except Image.DecompressionBombError as error:
            raise ImageError(name, "too large", _one_line(error)) from error
        except PILLOW_ERRORS as error:
            cut = format is not None and _is_cut_short(handle, format, error)
            unknown = format == "TIFF" and isinstance(error, UnidentifiedImageError) and not cut
            if unknown and (layout := pixel_layout(handle)):
                detail = f"expected {READABLE}, got {layout}"
                raise ImageError(name, "mode", detail) from error
            detail = f"{format or 'a file'} that cannot be read: {_one_line(error)}"
            raise ImageError(name, "truncated" if cut else "damaged", detail) from error


def as_rgb(image: Image.Image | np.ndarray, name: str = "image") -> RGBPixels:
    """An already decoded image as (H, W, 3) uint8 RGB, converted as `decode` does.

    Args:
        image: a PIL image of any mode, or uint8 (H, W), (H, W, 1) or (H, W, 3) RGB, [0, 255].
            Of a PNG with a transparent colour give what `Image.open` gave, not loaded yet: loaded,
            it no longer tells whether it had 2, 4 or 16 bits.
        name: what to call the image in a message.

    Raises:
        ImageError: "mode" for another array or for float and 32-bit pixels; what `decode` raises
            where a PIL image that was opened and not yet read cannot be.
    """
    name = escape(name)
    if isinstance(image, np.ndarray):
        return _array_as_rgb(image, name)
    try:
        with PillowKeptQuiet():
            if isinstance(image, ImageFile.ImageFile) and image.format == "PNG":
                _scale_key_colour(image)
            image.load()
            return _upright_pixels(image, name)
    except PILLOW_ERRORS as error:
        cut = "truncat" in str(error).lower()
        raise ImageError(name, "truncated" if cut else "damaged", _one_line(error)) from error


def escape(name: str | os.PathLike[str]) -> str:
    """A file name fit for one line of a message: line breaks and broken bytes are escaped."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii")
        for c in os.fspath(name)
    )


def _opened(source: bytes | str | os.PathLike[str], name: str) -> Stream:
    """The bytes as a stream. A path is opened only when it is a file: a FIFO would hang."""
    if isinstance(source, bytes):
        if not source:
            raise ImageError(name, "empty", "expected an image, got 0 bytes")
        return io.BytesIO(source)
    try:
        found = os.stat(source)
        if not stat.S_ISREG(found.st_mode):
            raise ImageError(name, "not a file", f"expected a file, found {_kind(found.st_mode)}")
        if found.st_size == 0:
            raise ImageError(name, "empty", "expected an image, got a file of 0 bytes")
        return Path(source).open("rb")
    except FileNotFoundError:
        raise ImageError(name, "missing", "no such file") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ImageError(name, "missing", f"cannot be opened: {reason}") from error


def _kind(mode: int) -> str:
    kinds = (
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a character device"),
        (stat.S_ISBLK, "a block device"),
    )
    return next((what for is_kind, what in kinds if is_kind(mode)), "something else")


def _decode(
    handle: Stream,
    format: str,
    name: str,
    max_pixels: int,
    max_aspect: float,
    admit: Callable[[int], object],
) -> tuple[RGBPixels, frozenset[FileProperty]]:
    with Image.open(handle, formats=FORMATS) as image:
        most = max_pixels // WEBP_SHARE if format == "WEBP" else max_pixels
        _check_limits(image.size, name, most, max_aspect)
        if ImageFile.LOAD_TRUNCATED_IMAGES and ends_early(handle, format):
            # Somebody told Pillow to fill what is missing with grey; that does not hold here.
            raise ImageError(name, "truncated", f"{format} without its end")
        place = handle.tell()
        if format == "JPEG":
            check_jpeg_scans(handle, name)
        if format == "PNG":
            check_png_chunks(handle, name)
            _scale_key_colour(image)
        if format == "TIFF":
            check_tiff_coverage(image, name)
        handle.seek(place)
        stored = str([tile.args for tile in image.tile[:1]])  # loading empties it
        turned = format == "TIFF" and orientation(image) in UPRIGHT  # loading forgets it
        admit(image.width * image.height)
        image.load()
        if format == "PNG":
            check_png_rows(handle, image, name)
        pixels = _upright_pixels(image, name)
        return pixels, frozenset(_oddities(image, stored, turned))


def _oddities(image: ImageFile.ImageFile, stored: str, turned: bool) -> Iterator[FileProperty]:
    """Of a loaded image.

    Args:
        image: the image.
        stored: the layout of its samples in the file.
        turned: whether it was turned upright while it was loaded.
    """
    if image.mode == "CMYK":
        yield "CMYK"
    if ";16" in stored or image.mode.startswith("I;16"):
        yield "16 bits"
    if image.mode == "1":
        yield "1 bit"
    if image.has_transparency_data:
        yield "alpha"
    if turned or _orientation(image) in UPRIGHT:
        yield "turned"
    try:
        if getattr(image, "is_animated", False):
            yield "frames"
    except PILLOW_ERRORS:
        pass  # what follows the first frame is damaged, and is not read


def _is_cut_short(handle: Stream, format: str, error: BaseException) -> bool:
    """Whether a file that cannot be decoded is one whose end is missing."""
    if "truncat" in str(error).lower():
        return True
    try:
        return ends_early(handle, format)
    except OSError:  # the disk fails, which is what `error` says already
        return False


def _check_limits(size: tuple[int, int], name: str, max_pixels: int, max_aspect: float) -> None:
    width, height = size
    if min(size) < 1:
        raise ImageError(name, "damaged", f"expected at least 1 x 1 pixels, got {height} x {width}")
    if width * height > max_pixels:
        raise ImageError(
            name, "too large", f"{height} x {width} pixels, at most {max_pixels:,} are decoded"
        )
    if max(size) > max_aspect * min(size):
        raise ImageError(
            name, "too long", f"{height} x {width} pixels, sides may differ {max_aspect:g} times"
        )


def _scale_key_colour(image: ImageFile.ImageFile) -> None:
    """Bring a PNG's transparent colour to the 8 bits of the pixels: Pillow leaves it as stored."""
    if not image.tile:  # loaded already
        return
    key, raw_mode = image.info.get("transparency"), image.tile[0].args
    if raw_mode in ("L;2", "L;4"):
        if isinstance(key, int):
            image.info["transparency"] = key * (85 if raw_mode == "L;2" else 17)
    elif raw_mode == "RGB;16B" and isinstance(key, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in key)


def _upright_pixels(image: Image.Image, name: str) -> RGBPixels:
    pixels = _rgb_pixels(image, name)
    turn = UPRIGHT.get(_orientation(image))
    return np.ascontiguousarray(turn(pixels)) if turn else pixels


def _orientation(image: Image.Image) -> int:
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except PILLOW_ERRORS:
        return 1  # corrupt EXIF says nothing about how the image was held
    return orientation if isinstance(orientation, int) else 1


def _rgb_pixels(image: Image.Image, name: str) -> RGBPixels:
    """The pixels of a loaded image of any mode, not yet turned."""
    if image.mode.startswith("I;16"):
        return _grey_16_bits(image)
    if image.mode in ("I", "F"):
        kind = "float" if image.mode == "F" else "32-bit"
        raise ImageError(name, "mode", f"expected 8 or 16 bits per sample, got {kind} pixels")
    pixels = np.empty((image.height, image.width, 3), np.uint8)
    rows = max(1, CONVERTED_AT_ONCE // image.width)
    for top in range(0, image.height, rows):
        bottom = min(top + rows, image.height)
        whole = bottom - top == image.height
        strip = image if whole else image.crop((0, top, image.width, bottom))
        pixels[top:bottom] = np.asarray(_to_rgb(strip))
    return pixels


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "CMYK":
        return _cmyk_to_rgb(image)
    if image.has_transparency_data:
        if image.mode in ("La", "RGBa"):  # colours stored multiplied by their alpha
            image = image.convert("LA" if image.mode == "La" else "RGBA")
        image = image.convert("RGBA")
        ground = Image.new("RGBA", image.size, BACKGROUND)
        image = Image.alpha_composite(ground, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _grey_16_bits(image: Image.Image) -> RGBPixels:
    """The high byte, as Pillow does for 16-bit RGB; 12-bit TIFFs are brought to 8 bits likewise."""
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
            converted = None  # not a profile, or not one of inks
        if converted is not None:
            return converted
    return image.convert("RGB")


def _array_as_rgb(image: np.ndarray, name: str) -> RGBPixels:
    pixels = image[:, :, None] if image.ndim == 2 else image
    wrong = image.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3)
    if wrong or min(pixels.shape) < 1:
        raise ImageError(
            name,
            "mode",
            "expected an array (H, W), (H, W, 1) or (H, W, 3) uint8, "
            f"got {image.shape} {image.dtype}",
        )
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def _one_line(error: BaseException) -> str:
    # Pillow names the stream by its address, which helps nobody.
    text = re.sub(r" ?<_io\..*?>$", "", " ".join(str(error).split()))
    return escape(text) or type(error).__name__
