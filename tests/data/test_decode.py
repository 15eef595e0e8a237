"""The decoder gives true pixels, whatever the format, mode or orientation."""

import io
import struct
from collections.abc import Callable

import numpy as np
import pytest
from image_files import NOISE, PHOTO, RAMP, VARIANTS, chunk, encode, grey_tiff, ink_profile, png
from PIL import Image

from vitkit import ImageError
from vitkit.data.images.decode import as_rgb, decode
from vitkit.data.images.read import read_image


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "WEBP"])
def test_lossless_formats_give_the_pixels_that_were_stored(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    pixels = decode(encode(Image.fromarray(NOISE), format, **options))
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    np.testing.assert_array_equal(pixels, NOISE)


STORED_FOR_ORIENTATION: dict[int, Callable[[Image.Image], Image.Image]] = {
    1: lambda p: p,
    2: lambda p: p.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    3: lambda p: p.transpose(Image.Transpose.ROTATE_180),
    4: lambda p: p.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
    5: lambda p: p.transpose(Image.Transpose.TRANSPOSE),
    6: lambda p: p.transpose(Image.Transpose.ROTATE_90),  # held so that it must turn clockwise
    7: lambda p: p.transpose(Image.Transpose.TRANSVERSE),
    8: lambda p: p.transpose(Image.Transpose.ROTATE_270),
}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["PNG", "TIFF", "WEBP"])
def test_every_exif_orientation_comes_out_upright(orientation: int, format: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = STORED_FOR_ORIENTATION[orientation](Image.fromarray(NOISE))
    options = {"lossless": True} if format == "WEBP" else {}
    content = encode(stored, format, exif=exif, **options)
    pixels = decode(content)
    np.testing.assert_array_equal(pixels, NOISE)
    assert pixels.flags.c_contiguous
    np.testing.assert_array_equal(as_rgb(Image.open(io.BytesIO(content)), "p"), NOISE)


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"x" * 9])
def test_corrupt_exif_is_ignored(exif: bytes) -> None:
    expected = decode(encode(PHOTO, "JPEG"))
    np.testing.assert_array_equal(decode(encode(PHOTO, "JPEG", exif=exif)), expected)


@pytest.mark.parametrize(
    "content",
    [png(256, 256, 16, 0, [row.astype(">u2").tobytes() for row in RAMP]), grey_tiff(RAMP, 16),
     grey_tiff(RAMP, 16, order=">"),
     encode(Image.fromarray(RAMP.astype(np.uint16)), "TIFF", compression="tiff_lzw")],
    ids=["png", "tiff-little", "tiff-big", "tiff-lzw"],
)  # fmt: skip
def test_16_bit_grey_is_scaled_and_not_clipped(content: bytes) -> None:
    pixels = decode(content)
    assert len(np.unique(pixels)) == 256
    assert pixels[0, 0].tolist() == [0, 0, 0]
    assert pixels[-1, -1].tolist() == [255, 255, 255]
    np.testing.assert_allclose(pixels[:, :, 0], RAMP / 257, atol=1)
    eight_bits = np.arange(256) * 257  # how 8-bit values are written with 16
    np.testing.assert_array_equal(pixels[:, :, 0].ravel()[eight_bits], np.arange(256))


def test_16_bit_white_is_zero_is_inverted_as_8_bit_is() -> None:
    pixels = decode(grey_tiff(RAMP, 16, photometric=0))
    assert pixels[0, 0, 0] == 255
    assert pixels[-1, -1, 0] == 0


def test_alpha_is_laid_on_white() -> None:
    alpha = np.arange(37 * 53).reshape(37, 53).astype(np.uint8)
    rgba = np.dstack([NOISE, alpha])
    expected = (NOISE * (alpha[:, :, None] / 255) + 255 * (1 - alpha[:, :, None] / 255)).round()
    for format in ("PNG", "TIFF", "WEBP"):
        options = {"lossless": True, "exact": True} if format == "WEBP" else {}
        pixels = decode(encode(Image.fromarray(rgba), format, **options))
        np.testing.assert_allclose(pixels, expected, atol=1)


PALETTE = bytes([10, 20, 30, 200, 100, 50, 0, 0, 0])


@pytest.mark.parametrize(
    ("transparency", "expected"),
    [(b"", [[10, 20, 30], [200, 100, 50], [0, 0, 0]]),
     (b"\xff\x00", [[10, 20, 30], [255, 255, 255], [0, 0, 0]]),
     (b"\x80\xff\x00", [[132, 137, 142], [200, 100, 50], [255, 255, 255]])],
    ids=["opaque", "one-transparent", "alphas"],
)  # fmt: skip
def test_palettes_and_their_transparency(transparency: bytes, expected: list[list[int]]) -> None:
    before = chunk(b"PLTE", PALETTE) + (chunk(b"tRNS", transparency) if transparency else b"")
    pixels = decode(png(3, 1, 8, 3, [bytes([0, 1, 2])], before))
    np.testing.assert_allclose(pixels[0], expected, atol=1)


@pytest.mark.parametrize(
    ("depth", "colour", "row", "key", "expected"),
    [
        (1, 0, bytes([0b10000000]), struct.pack(">H", 0), [255, 255, 255]),
        (1, 0, bytes([0b01000000]), struct.pack(">H", 1), [0, 255, 0]),
        (2, 0, bytes([0b11010000]), struct.pack(">H", 3), [255, 85, 0]),
        (2, 0, bytes([0b11010000]), struct.pack(">H", 1), [255, 255, 0]),
        (4, 0, bytes([0x29, 0x00]), struct.pack(">H", 9), [34, 255, 0]),
        (8, 0, bytes([9, 7, 5]), struct.pack(">H", 7), [9, 255, 5]),
        (16, 0, struct.pack(">3H", 1000, 1001, 0), struct.pack(">H", 1000), [255, 3, 0]),
        (8, 2, bytes([9, 9, 9, 7, 7, 7, 9, 9, 8]), struct.pack(">3H", 9, 9, 9), [255, 7, 9]),
        (16, 2, struct.pack(">9H", *[2560] * 3, *[512] * 3, *[40000] * 3),
         struct.pack(">3H", 40000, 40000, 40000), [10, 2, 255]),
    ],
)  # fmt: skip
def test_transparent_colours_of_every_depth(depth, colour, row, key, expected):
    pixels = decode(png(3, 1, depth, colour, [row], chunk(b"tRNS", key)))
    assert pixels[0, :, 0].tolist() == expected


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
def test_pil_images_with_alpha_are_laid_on_white(mode: str) -> None:
    image = Image.new("LA" if mode == "La" else "RGBA", (4, 3), 0).convert(mode)
    if mode == "PA":  # a palette image whose alpha, all 0, is a channel of its own
        image = Image.frombytes("PA", (4, 3), bytes([7, 0]) * 12)
    pixels = as_rgb(image, "p")
    np.testing.assert_array_equal(pixels, np.full((3, 4, 3), 255, np.uint8))


def test_cmyk_without_a_profile_is_converted_plainly() -> None:
    inks = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    pixels = decode(encode(inks, "JPEG", quality=100))
    np.testing.assert_allclose(pixels, np.full((16, 16, 3), [0, 255, 255]), atol=3)


def test_cmyk_goes_through_its_profile() -> None:
    inks = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    for format in ("JPEG", "TIFF"):
        pixels = decode(encode(inks, format, icc_profile=ink_profile()))
        # L* 50, where plain conversion would give cyan
        np.testing.assert_allclose(pixels, np.full((16, 16, 3), 119), atol=4)


@pytest.mark.parametrize("profile", [b"not a profile", ink_profile()[:300]])
def test_cmyk_with_a_useless_profile_is_converted_plainly(profile: bytes) -> None:
    inks = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    plain = decode(encode(inks, "JPEG"))
    np.testing.assert_array_equal(decode(encode(inks, "JPEG", icc_profile=profile)), plain)


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_several(format: str) -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255)]
    first, *others = [Image.new("RGB", (8, 6), colour) for colour in colours]
    options = {"lossless": True} if format == "WEBP" else {}
    content = encode(first, format, save_all=True, append_images=others, **options)
    with Image.open(io.BytesIO(content)) as opened:
        assert opened.n_frames == 3
    np.testing.assert_array_equal(decode(content), np.full((6, 8, 3), [255, 0, 0]))


def test_interlaced_and_dark_pngs_are_not_taken_for_truncated() -> None:
    dark = np.zeros((9, 7, 3), np.uint8)
    np.testing.assert_array_equal(decode(encode(Image.fromarray(dark), "PNG")), dark)
    # Adam7 passes of a 2 x 2 grey image: (0, 0), then (1, 0), then row 1.
    assert decode(png(2, 2, 8, 0, [b"\x01", b"\x02", b"\x03\x04"], interlace=1))[
        ..., 0
    ].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 1)])
def test_grey_arrays_are_repeated(shape: tuple[int, ...]) -> None:
    grey = np.arange(20, dtype=np.uint8).reshape(shape)
    pixels = as_rgb(grey, "a")
    assert pixels.shape == (5, 4, 3)
    assert pixels.flags.c_contiguous
    np.testing.assert_array_equal(pixels, np.repeat(grey.reshape(5, 4, 1), 3, axis=2))


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 4, 3), np.float32), np.zeros((4, 4, 3), np.int64),
     np.zeros((3, 4, 4), np.uint8), np.zeros((4, 4, 4), np.uint8),
     np.zeros((2, 4, 4, 3), np.uint8), np.zeros((0, 4, 3), np.uint8), np.zeros(4, np.uint8)],
)  # fmt: skip
def test_other_arrays_are_refused_with_what_was_expected_and_found(array: np.ndarray) -> None:
    with pytest.raises(ImageError, match=r"expected an array \(H, W\)") as caught:
        as_rgb(array, "my image")
    assert caught.value.reason == "mode"
    assert str(array.shape) in str(caught.value)
    assert str(array.dtype) in str(caught.value)
    assert str(caught.value).startswith("my image: ")


def test_pil_images_are_converted_as_files_are() -> None:
    for content in [*VARIANTS.values(), encode(PHOTO.convert("CMYK"), "JPEG"), grey_tiff(RAMP, 16)]:
        np.testing.assert_array_equal(as_rgb(Image.open(io.BytesIO(content))), decode(content))


def test_a_transparent_colour_is_the_same_of_a_pil_image() -> None:
    for depth, colour, row, key in (
        (2, 0, bytes([0b11010000]), struct.pack(">H", 1)),
        (4, 0, bytes([0x29, 0x00]), struct.pack(">H", 9)),
        (16, 2, struct.pack(">9H", *[2560] * 3, *[512] * 3, *[40000] * 3),
         struct.pack(">3H", 40000, 40000, 40000)),
    ):  # fmt: skip
        content = png(3, 1, depth, colour, [row], chunk(b"tRNS", key))
        image = Image.open(io.BytesIO(content))
        for _ in range(2):  # opened, then loaded
            np.testing.assert_array_equal(read_image(image), decode(content))


@pytest.mark.parametrize("size", [(120, 90), (96, 128), (65, 33)])
@pytest.mark.parametrize("planes", ["contig", "separate"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_tiled_tiffs_of_any_size(size: tuple[int, int], planes: str, compression: str) -> None:
    """Tiles at the right edge are narrower in the image than in the file."""
    tifffile = pytest.importorskip("tifffile")
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    stored = pixels if planes == "contig" else pixels.transpose(2, 0, 1)
    stream = io.BytesIO()
    tifffile.imwrite(stream, stored, photometric="rgb", planarconfig=planes, tile=(32, 32),
                     compression=compression)  # fmt: skip
    np.testing.assert_array_equal(decode(stream.getvalue()), pixels)
