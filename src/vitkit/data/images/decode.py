"""The one decoder: bytes or a path in, (H, W, 3) uint8 RGB out; it raises only `ImageError`.

Training, checking, prediction and serving all read images here, so that they all see the same
pixels and refuse the same files. An image is decoded whole or not at all.
"""

import functools
import importlib
import io
import math
import os
import re
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageCms, ImageFile, UnidentifiedImageError

from vitkit.data.images import integrity
from vitkit.errors import ImageError, ImageReason
from vitkit.messages import escape

# The pixels of a decoded image of any mode as (H, W, 3) uint8 RGB.

RGBPixels = UInt8[np.ndarray, "H W 3"]

BACKGROUND = "white"
"""The colour that shows through transparent pixels."""
BITS, PHOTOMETRIC, WHITE_IS_ZERO = 258, 262, 0
"""Tags of a TIFF (TIFF 6.0, Sec. 8), and a value of the second."""


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
    return np.array(_to_rgb(image))


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "CMYK":
        return _cmyk_to_rgb(image)
    if image.has_transparency_data:
        if image.mode in ("La", "RGBa"):  # colours stored multiplied by their alpha
            image = image.convert("LA" if image.mode == "La" else "RGBA")
        image = image.convert("RGBA")
        background = Image.new("RGBA", image.size, BACKGROUND)
        image = Image.alpha_composite(background, image)
    if image.mode == "RGB":
        return image
    return image.convert("RGB")


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
        except integrity.PILLOW_ERRORS:
            converted = None  # not an ICC profile, or not for CMYK
        if converted is not None:
            return converted
    return image.convert("RGB")


ChooseFactor = Callable[[tuple[int, int]], int]
"""Called with the full size (H, W) of an upright image; returns 1, 2, 4 or 8, the factor by which
it may be decoded smaller."""
READ_AT_ONCE = 64 << 20
"""Bytes of a file that is read into memory before it is decoded; Pillow would read it in pieces."""
MAX_PIXELS = 50_000_000
MAX_ASPECT = 200.0


class Decoded(NamedTuple):
    """A decoded image.

    Attributes:
        pixels: (H, W, 3) uint8 RGB, [0, 255], contiguous; decoded smaller by `factor`, the sides
            are ceil(H / factor) and ceil(W / factor).
        size: the full size (H, W).
        factor: what `reduction` returned; None where it was not called.
    """

    pixels: RGBPixels
    size: tuple[int, int]
    factor: int | None


def decode(
    source: bytes | str | os.PathLike[str],
    *,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
    max_aspect: float = MAX_ASPECT,
) -> RGBPixels:
    """Decode one image: JPEG, PNG, WEBP, BMP, GIF or TIFF, recognised by its content.

    It is turned upright by its EXIF orientation; of several frames the first is read. Transparency
    is laid on white; grey is repeated; 16 bits become 8 by their high byte; CMYK goes through the
    embedded ICC profile where that can be used. ICC profiles of RGB and grey images are not
    applied.

    Args:
        source: the file's bytes, or its path.
        name: the image's name for messages; the path where absent.
        max_pixels: largest width x height, read from the header before any pixel is decoded. A
            tile of a TIFF may have no more, either. Pillow's own limit, about 179 million, holds
            besides.
        max_aspect: largest ratio of the longer to the shorter side.

    Returns:
        (H, W, 3) uint8 RGB, [0, 255], contiguous.

    Raises:
        ImageError: with `.reason`: "missing", "not a file", "empty", "not an image", "format",
            "truncated", "damaged", "too large", "too long" or "mode" (float and 32-bit pixels).
    """
    return decode_file(source, name=name, max_pixels=max_pixels, max_aspect=max_aspect).pixels


def decode_file(
    source: bytes | str | os.PathLike[str],
    *,
    name: str | None = None,
    max_pixels: int = MAX_PIXELS,
    max_aspect: float = MAX_ASPECT,
    reduction: ChooseFactor | None = None,
) -> Decoded:
    """Decode one image as `decode` does, a JPEG smaller where the caller allows it.

    Args:
        source: as in `decode`.
        name: as in `decode`.
        max_pixels: as in `decode`.
        max_aspect: as in `decode`.
        reduction: called for a JPEG of at least 64 x 64 pixels that is about to be decoded.

    Raises:
        ImageError: as `decode`.
    """
    if name is None:
        name = "image" if isinstance(source, bytes) else os.fspath(source)
    name = escape(name)
    with _open_image_file(source, name) as handle:
        format = None
        try:
            head = handle.read(integrity.HEAD_SIZE)
            size = handle.seek(0, os.SEEK_END)
            handle.seek(0)
            if not size:
                raise ImageError(name, "empty", "expected an image, got 0 bytes")
            format = integrity.identify(head)
            # Pillow gets files of the six formats only.
            if format is None:
                raise ImageError(name, *integrity.describe(head))
            # the size in the RIFF header; Pillow would call the file damaged
            if format == "WEBP" and size < int.from_bytes(head[4:8], "little") + 8:
                raise ImageError(name, "truncated", "the WEBP file ends too early")
            with integrity.PillowKeptQuiet():
                return _decode(handle, format, name, max_pixels, max_aspect, reduction)
        except Image.DecompressionBombError as error:
            raise ImageError(name, "too large", _one_line(error)) from error
        except integrity.PILLOW_ERRORS as error:
            raise _refusal(format, name, error) from error


def _open_image_file(source: bytes | str | os.PathLike[str], name: str) -> integrity.Stream:
    """Open the bytes as a stream. A path is opened only when it is a file: a FIFO would hang."""
    if isinstance(source, bytes):
        return io.BytesIO(source)
    try:
        status = os.stat(source)
        if not stat.S_ISREG(status.st_mode):
            detail = "expected a file, found a folder, a device or a pipe"
            raise ImageError(name, "not a file", detail)
        if status.st_size > READ_AT_ONCE:
            return Path(source).open("rb")
        return io.BytesIO(Path(source).read_bytes())
    except FileNotFoundError:
        raise ImageError(name, "missing", "no such file") from None
    # A path with a zero byte, or one too long, is a ValueError or an OSError.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ImageError(name, "missing", f"cannot be opened: {reason}") from error


def _refusal(format: str | None, name: str, error: BaseException) -> ImageError:
    """Return the error for a file that Pillow cannot decode."""
    if _is_cut(error):
        return ImageError(name, "truncated", f"the {format} file ends too early")
    if format == "TIFF" and isinstance(error, UnidentifiedImageError):
        detail = (
            "a TIFF that ends too early, or whose pixels are not grey, RGB, RGBA, CMYK or palette "
            "of 8 or 16 bits"
        )
        return ImageError(name, "mode", detail)
    detail = f"{format or 'a file'} that cannot be read: {_one_line(error)}"
    return ImageError(name, "damaged", detail)


def _is_cut(error: BaseException) -> bool:
    """True where Pillow found the end of the file too early: in the pixels, or before them."""
    return re.search("truncat|cannot load this image", str(error), re.IGNORECASE) is not None


def as_rgb(image: Image.Image | np.ndarray, name: str = "image") -> RGBPixels:
    """Return an already decoded image as (H, W, 3) uint8 RGB, converted as `decode` does.

    Args:
        image: a PIL image of any mode, or uint8 (H, W), (H, W, 1) or (H, W, 3) RGB, [0, 255].
            Of a PNG with a transparent colour pass the image that `Image.open` returned, not loaded
            yet: once loaded, it no longer has the number of bits it was stored with.
        name: the image's name for messages.

    Raises:
        ImageError: "mode" for another array or for float and 32-bit pixels; "damaged" for a PIL
            image without pixels; as `decode` for one that was opened and not yet loaded.
    """
    name = escape(name)
    if isinstance(image, np.ndarray):
        pixels = image[:, :, None] if image.ndim == 2 else image
        is_image = image.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] in (1, 3)
        if not is_image or not image.size:
            expected = "expected an array (H, W), (H, W, 1) or (H, W, 3) uint8"
            raise ImageError(name, "mode", f"{expected}, got {image.shape} {image.dtype}")
        return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))
    _check_limits(image.size, name)
    try:
        with integrity.PillowKeptQuiet():
            if isinstance(image, ImageFile.ImageFile) and image.format == "PNG":
                scale_key_colour(image)
            image.load()
            return _turned_upright(rgb_pixels(image, name), image)
    except integrity.PILLOW_ERRORS as error:
        words = _one_line(error)
        raise ImageError(name, "truncated" if _is_cut(error) else "damaged", words) from error


def _decode(
    handle: integrity.Stream,
    format: str,
    name: str,
    max_pixels: int,
    max_aspect: float,
    reduction: ChooseFactor | None,
) -> Decoded:
    # First: Pillow would go through all the markers of the header, however many.
    frame = integrity.check_jpeg_scans(handle, name) if format == "JPEG" else 0
    with Image.open(handle, formats=integrity.IMAGE_FORMATS) as image:
        # Only the header has been read so far: a huge image is refused before it takes memory.
        _check_limits(image.size, name, max_pixels, max_aspect)
        position = handle.tell()  # Pillow continues to read from here
        if format == "PNG":
            integrity.check_png(handle, name)
            scale_key_colour(image)
        if format == "TIFF":
            integrity.check_tiff(image, name, max_pixels)
        handle.seek(position)
        if format == "JPEG":
            pixels, size, factor = _decode_jpeg(handle, image, frame, name, reduction)
        else:
            image.load()
            pixels, size, factor = rgb_pixels(image, name), (image.height, image.width), None
        if format == "PNG":
            integrity.check_png_rows(handle, image, name)
        return Decoded(_turned_upright(pixels, image), size, factor)


def _decode_jpeg(
    handle: integrity.Stream,
    image: ImageFile.ImageFile,
    frame: int,
    name: str,
    reduction: ChooseFactor | None,
) -> tuple[RGBPixels, tuple[int, int], int | None]:
    """Return the pixels of a JPEG as they are stored, its full size once upright, the factor."""
    size = (image.height, image.width)
    if _exif_orientation(image) in SIDEWAYS:
        size = size[::-1]
    factor = None
    if reduction is not None and min(size) >= SMALLEST_REDUCED:
        factor = reduction(size)
    pixels = fast_pixels(handle, image, frame, factor or 1)
    if pixels is None:
        _set_reduction(image, factor or 1)
        image.load()
        pixels = rgb_pixels(image, name)
    return pixels, size, factor


def _check_limits(
    size: tuple[int, int], name: str, max_pixels: int = sys.maxsize, max_aspect: float = math.inf
) -> None:
    width, height = size
    reason: ImageReason = "damaged"
    limit = "expected at least 1 x 1"
    if width * height > max_pixels:
        reason, limit = "too large", f"at most {max_pixels:,} are decoded"
    elif max(size) > max_aspect * min(size) > 0:
        reason, limit = "too long", f"one side may be at most {max_aspect:g} times the other"
    elif min(size) > 0:
        return
    raise ImageError(name, reason, f"{height} x {width} pixels; {limit}")


def _one_line(error: BaseException) -> str:
    # Pillow names the stream by its address in memory, which is useless in a message.
    text = re.sub(r" ?<_io\..*?>$", "", " ".join(str(error).split()))
    return escape(text) or type(error).__name__


# The pixels of a JPEG: by `simplejpeg` where it is installed, the same bits as by Pillow.
#
# Both decode with libjpeg-turbo; `simplejpeg` copies the pixels once less and has fewer calls. It
# is an optional package (extra `fast`). No result depends on it: it is used only if it gives
# Pillow's pixels of some test images (`agrees_with_pillow`), and a file that it finds damaged is
# left to Pillow, which decides as ever whether the file can be used.
#
# A JPEG can be decoded at 1/2, 1/4 or 1/8 of its size: libjpeg then makes fewer pixels of each
# block of 8 x 8 coefficients, about their mean, and saves most of the time but that of the entropy
# coding.

REDUCTIONS = (8, 4, 2)
"""The factors by which a JPEG can be decoded smaller, the largest first."""
SMALLEST_REDUCED = 64
"""Pixels of the shorter side of an image that may be decoded smaller."""
DECODED_ALIKE = frozenset({0xC0, 0xC1, 0xC2})
"""Frames that every libjpeg decodes: baseline, extended sequential and progressive Huffman coding
(ITU-T T.81, Table B.1); some are built without arithmetic coding."""

Decoder = Callable[..., Any]
"""`simplejpeg.decode_jpeg`."""


def reduced_size(size: tuple[int, int], reduction: int) -> tuple[int, int]:
    """Return the size (H, W) of an image of `size` that is decoded smaller by a factor."""
    return -(-size[0] // reduction), -(-size[1] // reduction)


def _set_reduction(image: ImageFile.ImageFile, reduction: int) -> None:
    """Let Pillow decode a JPEG that is not loaded yet smaller by 2, 4 or 8; 1 changes nothing."""
    if reduction == 1:
        return
    # Pillow takes the largest factor that leaves the image at least this large.
    image.draft(None, (image.width // reduction, image.height // reduction))


def fast_pixels(
    handle: integrity.Stream, image: Image.Image, frame: int, reduction: int
) -> RGBPixels | None:
    """Return the pixels of an opened JPEG as stored, or None where Pillow has to decode it.

    Args:
        handle: the file.
        image: the opened image, not loaded yet, of its full size.
        frame: the kind of its frame, the second byte of the marker (`check_jpeg_scans`).
        reduction: 1, 2, 4 or 8.
    """
    if image.mode not in ("RGB", "L") or frame not in DECODED_ALIKE:
        return None
    decoder = fast_decoder()
    if decoder is None or not isinstance(handle, io.BytesIO):
        return None
    return _decoded(decoder, handle.getvalue(), (image.height, image.width), reduction)


@functools.cache
def fast_decoder() -> Decoder | None:
    """Return `simplejpeg.decode_jpeg`; None where it is missing or gives other pixels than Pillow.

    It is looked for once in a process.
    """
    try:
        decoder: Decoder = importlib.import_module("simplejpeg").decode_jpeg
    except (ImportError, AttributeError, ValueError):  # missing, or built for another numpy
        return None
    if agrees_with_pillow(decoder):
        return decoder
    return None


def agrees_with_pillow(decoder: Decoder) -> bool:
    """Return True if a decoder gives Pillow's pixels of small JPEGs of each kind and reduction.

    The two have a libjpeg of their own each, and these may be of different versions.
    """
    rows, columns = np.mgrid[0:75, 0:91]
    waves = [np.sin(rows * columns / 90), np.cos(rows / 3), np.sin(columns / 7 - rows / 11)]
    pattern = Image.fromarray((127.5 + 127 * np.stack(waves, axis=-1)).astype(np.uint8))
    kinds = [(pattern, 0, False), (pattern, 1, False), (pattern, 2, True)]
    for drawn, subsampling, progressive in [*kinds, (pattern.convert("L"), 0, False)]:
        stream = io.BytesIO()
        drawn.save(stream, "JPEG", quality=85, subsampling=subsampling, progressive=progressive)
        for reduction in (1, *REDUCTIONS):
            with Image.open(stream, formats=("JPEG",)) as image:
                size = (image.height, image.width)
                _set_reduction(image, reduction)
                expected = np.asarray(image.convert("RGB"))
            pixels = _decoded(decoder, stream.getvalue(), size, reduction)
            if pixels is None or not np.array_equal(pixels, expected):
                return False
    return True


def _decoded(
    decoder: Decoder, content: bytes, size: tuple[int, int], reduction: int
) -> RGBPixels | None:
    """Return the pixels of a file; None where it is damaged or of another size than expected."""
    height, width = reduced_size(size, reduction)
    smallest = {} if reduction == 1 else {"min_height": height, "min_width": width}
    try:
        # Strict: what libjpeg only warns of, such as missing pixels, is an error.
        pixels = decoder(content, "RGB", strict=True, **smallest)
    except (ValueError, RuntimeError, MemoryError):
        return None
    # Another size: the header has several, and the two decoders take different ones.
    if pixels.shape == (height, width, 3):
        return pixels
    return None


# EXIF orientation: read from a file, and applied to its pixels.

ORIENTATION = int(ExifTags.Base.Orientation)
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

SIDEWAYS = frozenset({5, 6, 7, 8})
"""Orientations that exchange height and width."""


def _turned_upright(
    pixels: UInt8[np.ndarray, "H W 3"], image: Image.Image
) -> UInt8[np.ndarray, "H2 W2 3"]:
    """Return the pixels of an image, turned or mirrored by its EXIF orientation; contiguous."""
    turn = UPRIGHT.get(_exif_orientation(image))
    if turn:
        return np.ascontiguousarray(turn(pixels))
    return pixels


def _exif_orientation(image: Image.Image) -> int:
    """Return the orientation in an image's EXIF data, 1 to 8; 1 where there is none."""
    try:
        orientation = image.getexif().get(ORIENTATION, 1)
    except integrity.PILLOW_ERRORS:
        return 1  # corrupt EXIF data: the orientation is unknown
    if isinstance(orientation, int):
        return orientation
    return 1
