"""The decoder: true pixels or an `ImageError`, never a half picture and never another exception."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import stat
import struct
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from vitkit.data.images import as_rgb, decode
from vitkit.errors import ImageError

NOISE = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
PHOTO = Image.fromarray(
    np.clip(
        np.add.outer(np.arange(37) * 3, np.arange(53) * 2)[:, :, None] * [1.0, 0.7, 0.4]
        + np.random.default_rng(1).integers(0, 20, (37, 53, 3)),
        0,
        255,
    ).astype(np.uint8)
)


def encode(picture: Image.Image, format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, format, **options)
    return stream.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    return (
        struct.pack(">I", len(content))
        + kind
        + content
        + struct.pack(">I", zlib.crc32(kind + content))
    )


def png(
    width: int,
    height: int,
    depth: int,
    colour: int,
    rows: list[bytes],
    before: bytes = b"",
    interlace: int = 0,
) -> bytes:
    """A PNG made by hand, from unfiltered rows."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlace)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + before + chunk(b"IDAT", pixels)
    ) + chunk(b"IEND", b"")


def tiff(entries: dict[int, tuple[int, list[int]]], pixels: bytes, order: str = "<") -> bytes:
    """A TIFF of one strip made by hand: tag -> (type 3 or 4, values)."""
    entries = dict(sorted({**entries, 273: (4, [0]), 279: (4, [len(pixels)])}.items()))
    start = 8 + 2 + 12 * len(entries) + 4
    extra, body = b"", struct.pack(order + "H", len(entries))
    offsets = start + sum(
        len(v) * (2 if t == 3 else 4) for t, v in entries.values() if len(v) * (2, 4)[t - 3] > 4
    )
    for tag, (kind, values) in entries.items():
        values = [offsets] if tag == 273 else values
        content = struct.pack(f"{order}{len(values)}{'HI'[kind - 3]}", *values)
        if len(content) > 4:
            place = struct.pack(order + "I", start + len(extra))
            extra += content
        else:
            place = content.ljust(4, b"\0")
        body += struct.pack(order + "HHI", tag, kind, len(values)) + place
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "I", 8)
    return head + body + b"\0\0\0\0" + extra + pixels


def grey_tiff(values: np.ndarray, bits: int, photometric: int = 1, order: str = "<") -> bytes:
    height, width = values.shape
    entries = {
        256: (4, [width]), 257: (4, [height]), 258: (3, [bits]), 259: (3, [1]),
        262: (3, [photometric]), 277: (3, [1]), 278: (4, [height]),
    }  # fmt: skip
    return tiff(entries, values.astype(order + "u2").tobytes(), order)


def reason_of(source: bytes | str | Path, **options: object) -> str:
    with pytest.raises(ImageError) as caught:
        decode(source, **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    return caught.value.reason


# --- True pixels -------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "WEBP"])
def test_lossless_formats_give_the_pixels_that_were_stored(format: str) -> None:
    options = {"lossless": True} if format == "WEBP" else {}
    pixels = decode(encode(Image.fromarray(NOISE), format, **options))
    assert pixels.dtype == np.uint8
    assert pixels.flags.c_contiguous
    assert pixels.flags.writeable
    np.testing.assert_array_equal(pixels, NOISE)


def test_bytes_str_and_path_are_the_same_picture(tmp_path: Path) -> None:
    content = encode(PHOTO, "JPEG")
    path = tmp_path / "p.jpg"
    path.write_bytes(content)
    expected = decode(content)
    np.testing.assert_array_equal(decode(path), expected)
    np.testing.assert_array_equal(decode(str(path)), expected)


def test_content_decides_and_not_the_name(tmp_path: Path) -> None:
    path = tmp_path / "really_a_png.jpg"
    path.write_bytes(encode(Image.fromarray(NOISE), "PNG"))
    np.testing.assert_array_equal(decode(path), NOISE)


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


def test_a_sideways_jpeg_is_turned_clockwise() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = decode(encode(PHOTO, "JPEG"))
    np.testing.assert_array_equal(decode(encode(PHOTO, "JPEG", exif=exif)), np.rot90(stored, -1))


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"x" * 9])
def test_corrupt_exif_is_ignored(exif: bytes) -> None:
    expected = decode(encode(PHOTO, "JPEG"))
    np.testing.assert_array_equal(decode(encode(PHOTO, "JPEG", exif=exif)), expected)


def test_grey_is_repeated() -> None:
    grey = NOISE[:, :, 0]
    pixels = decode(encode(Image.fromarray(grey), "PNG"))
    np.testing.assert_array_equal(pixels, np.repeat(grey[:, :, None], 3, axis=2))


def test_one_bit_is_black_and_white() -> None:
    bits = NOISE[:, :, 0] > 127
    pixels = decode(encode(Image.fromarray(bits), "PNG"))
    np.testing.assert_array_equal(pixels, np.repeat(bits[:, :, None] * np.uint8(255), 3, axis=2))


RAMP = np.arange(65536).reshape(256, 256)


@pytest.mark.parametrize(
    "content",
    [
        png(256, 256, 16, 0, [row.astype(">u2").tobytes() for row in RAMP]),
        grey_tiff(RAMP, 16),
        grey_tiff(RAMP, 16, order=">"),
        encode(Image.fromarray(RAMP.astype(np.uint16)), "TIFF", compression="tiff_lzw"),
    ],
    ids=["png", "tiff-little", "tiff-big", "tiff-lzw"],
)
def test_16_bit_grey_is_scaled_and_not_clipped(content: bytes) -> None:
    pixels = decode(content)
    assert len(np.unique(pixels)) == 256
    assert pixels[0, 0].tolist() == [0, 0, 0]
    assert pixels[-1, -1].tolist() == [255, 255, 255]
    np.testing.assert_allclose(pixels[:, :, 0], RAMP / 257, atol=1)
    eight_bits = np.arange(256) * 257  # how 8-bit values are written with 16
    np.testing.assert_array_equal(pixels[:, :, 0].ravel()[eight_bits], np.arange(256))


def test_16_bit_colour_is_scaled_and_not_clipped() -> None:
    stored = np.stack([RAMP, RAMP[::-1], RAMP.T], axis=2)
    from_png = decode(png(256, 256, 16, 2, [row.astype(">u2").tobytes() for row in stored]))
    entries = {
        256: (4, [256]), 257: (4, [256]), 258: (3, [16, 16, 16]), 259: (3, [1]),
        262: (3, [2]), 277: (3, [3]), 278: (4, [256]),
    }  # fmt: skip
    from_tiff = decode(tiff(entries, stored.astype("<u2").tobytes()))
    for pixels in (from_png, from_tiff):
        np.testing.assert_allclose(pixels, stored / 257, atol=1)
        assert all(len(np.unique(pixels[:, :, c])) == 256 for c in range(3))
        assert pixels[-1, -1, 0] == 255


def test_16_bit_grey_and_16_bit_colour_agree() -> None:
    grey = decode(png(256, 256, 16, 0, [row.astype(">u2").tobytes() for row in RAMP]))
    colour = np.repeat(RAMP[:, :, None], 3, axis=2)
    rows = [row.astype(">u2").tobytes() for row in colour]
    np.testing.assert_array_equal(decode(png(256, 256, 16, 2, rows)), grey)


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


def test_grey_with_alpha_is_laid_on_white() -> None:
    alpha = np.arange(37 * 53).reshape(37, 53).astype(np.uint8)
    picture = Image.fromarray(np.dstack([NOISE[:, :, 0], alpha]), "LA")
    expected = NOISE[:, :, 0] * (alpha / 255) + 255 * (1 - alpha / 255)
    pixels = decode(encode(picture, "PNG"))
    np.testing.assert_allclose(pixels[:, :, 1], expected, atol=1)


PALETTE = bytes([10, 20, 30, 200, 100, 50, 0, 0, 0])


@pytest.mark.parametrize(
    ("transparency", "expected"),
    [
        (b"", [[10, 20, 30], [200, 100, 50], [0, 0, 0]]),
        (b"\xff\x00", [[10, 20, 30], [255, 255, 255], [0, 0, 0]]),
        (b"\x80\xff\x00", [[132, 137, 142], [200, 100, 50], [255, 255, 255]]),
    ],
    ids=["opaque", "one-transparent", "alphas"],
)
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
        (
            16, 2, struct.pack(">9H", *[2560] * 3, *[512] * 3, *[40000] * 3),
            struct.pack(">3H", 40000, 40000, 40000), [10, 2, 255],
        ),
    ],
)  # fmt: skip
def test_transparent_colours_of_every_depth(
    depth: int, colour: int, row: bytes, key: bytes, expected: list[int]
) -> None:
    pixels = decode(png(3, 1, depth, colour, [row], chunk(b"tRNS", key)))
    assert pixels[0, :, 0].tolist() == expected


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "RGBa", "La"])
def test_pil_pictures_with_alpha_are_laid_on_white(mode: str) -> None:
    picture = Image.new("LA" if mode == "La" else "RGBA", (4, 3), 0).convert(mode)
    if mode == "PA":  # a palette picture whose alpha, all 0, is a channel of its own
        picture = Image.frombytes("PA", (4, 3), bytes([7, 0]) * 12)
    pixels = as_rgb(picture, "p")
    np.testing.assert_array_equal(pixels, np.full((3, 4, 3), 255, np.uint8))


def test_cmyk_without_a_profile_is_converted_plainly() -> None:
    inks = Image.new("CMYK", (16, 16), (255, 0, 0, 0))
    pixels = decode(encode(inks, "JPEG", quality=100))
    np.testing.assert_allclose(pixels, np.full((16, 16, 3), [0, 255, 255]), atol=3)


def ink_profile() -> bytes:
    """A CMYK profile (ICC.1, lut8): no ink is white, black ink is black, the others middle grey."""
    white, grey, black = bytes([255, 128, 128]), bytes([128, 128, 128]), bytes([0, 128, 128])
    table_of_colours = white + black + (grey + black) * 7
    table = b"mft1" + bytes(4) + bytes([4, 3, 2, 0])
    table += struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 65536)
    table += bytes(range(256)) * 4 + table_of_colours + bytes(range(256)) * 3
    table += bytes(-len(table) % 4)
    size = 128 + 4 + 12 + len(table)
    header = struct.pack(">I4s4s4s4s4s", size, bytes(4), b"\x02\x10\0\0", b"prtr", b"CMYK", b"Lab ")
    header += struct.pack(">6H", 2020, 1, 1, 0, 0, 0) + b"acsp" + bytes(28)
    header += struct.pack(">3i", 63190, 65536, 54061)
    header = header.ljust(128, b"\0")
    return header + struct.pack(">I4sII", 1, b"A2B0", 144, len(table)) + table


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
    # Adam7 passes of a 2 x 2 grey picture: (0, 0), then (1, 0), then row 1.
    assert decode(png(2, 2, 8, 0, [b"\x01", b"\x02", b"\x03\x04"], interlace=1))[
        ..., 0
    ].tolist() == [
        [1, 2],
        [3, 4],
    ]


@pytest.mark.parametrize("size", [(1, 1), (1, 150), (150, 1)])
def test_tiny_and_long_pictures_within_the_limits(size: tuple[int, int]) -> None:
    assert decode(encode(Image.new("RGB", size[::-1]), "PNG")).shape == (*size, 3)


# --- Refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason", "said"),
    [
        (b"", "empty", "0 bytes"),
        (b"just some words\n", "not a picture", "text"),
        (b"<!DOCTYPE html><html><body>404", "not a picture", "an HTML page"),
        (b"\n <HTML>\xe9", "not a picture", "an HTML page"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "not a picture", "git lfs pull"),
        (bytes(64), "not a picture", "zeros"),
        (b"PK\x03\x04zip", "not a picture", "ZIP"),
        (b"\x93NUMPY\x01\x00", "not a picture", "starts with"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "format", "SVG"),
        (b"<?xml version='1.0'?>\n<svg/>", "format", "SVG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "format", "EPS"),
        (b"8BPS\0\1", "format", "PSD"),
        (b"%PDF-1.7\n", "format", "PDF"),
        (b"SIMPLE  =                    T", "format", "FITS"),
        (b"DDS |\0\0\0", "format", "DDS"),
        (b"icns\0\0\1\0", "format", "ICNS"),
        (b"\0\0\1\0\1\0", "format", "ICO"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "format", "HEIC"),
        (b"\0\0\0\x18ftypavif\0\0\0\0", "format", "AVIF"),
        (b"P6\n1 1\n255\n\0\0\0", "format", "Netpbm"),
    ],
)
def test_what_is_not_one_of_the_six_formats(
    tmp_path: Path, content: bytes, reason: str, said: str
) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    for source in (content, path):
        with pytest.raises(ImageError) as caught:
            decode(source)
        assert caught.value.reason == reason
        assert said in caught.value.detail
        assert "\n" not in str(caught.value)


def test_a_format_pillow_knows_and_we_do_not_is_refused() -> None:
    for format in ("PPM", "ICO", "TGA", "PCX", "EPS", "PDF", "JPEG2000"):
        assert reason_of(encode(PHOTO, format)) in ("format", "not a picture")


@pytest.mark.parametrize(
    "content",
    [
        encode(Image.fromarray(NOISE[:, :, 0].astype(np.float32)), "TIFF"),
        encode(Image.fromarray(NOISE[:, :, 0].astype(np.int32)), "TIFF"),
    ],
    ids=["float", "int32"],
)
def test_float_and_32_bit_pixels_are_refused(content: bytes) -> None:
    assert reason_of(content) == "mode"
    with pytest.raises(ImageError) as caught:
        as_rgb(Image.open(io.BytesIO(content)), "p")
    assert caught.value.reason == "mode"


def test_paths_that_are_no_files_are_told_without_opening_them(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.jpg"
    os.mkfifo(fifo)
    found: list[str] = []
    worker = threading.Thread(target=lambda: found.append(reason_of(fifo)), daemon=True)
    worker.start()
    worker.join(5)
    assert found == ["not a file"]
    assert reason_of(tmp_path) == "not a file"
    assert reason_of("/dev/zero") == "not a file"


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "broken.jpg").symlink_to(tmp_path / "gone.jpg")
    (tmp_path / "self.jpg").symlink_to(tmp_path / "self.jpg")
    (tmp_path / "empty.jpg").touch()
    assert reason_of(tmp_path / "no.jpg") == "missing"
    assert reason_of(tmp_path / "broken.jpg") == "missing"
    assert reason_of(tmp_path / "self.jpg") == "missing"
    assert reason_of(tmp_path / ("x" * 300)) == "missing"
    assert reason_of("null\0byte.jpg") == "missing"
    assert reason_of(tmp_path / "empty.jpg") == "empty"


def test_the_limits_come_from_the_header_before_any_pixel() -> None:
    huge = png(20_000, 20_000, 8, 2, [b""])
    start = time.perf_counter()
    assert reason_of(huge) == "too large"
    assert time.perf_counter() - start < 0.5
    assert reason_of(png(8000, 7000, 8, 2, [b""])) == "too large"
    assert reason_of(png(8000, 7000, 8, 2, [b""]), max_pixels=100_000_000) == "truncated"
    assert reason_of(png(20_000, 1, 8, 0, [b""])) == "too long"
    assert reason_of(png(1, 20_000, 8, 0, [b""])) == "too long"
    assert reason_of(png(30, 1, 8, 0, [b""]), max_aspect=29.0) == "too long"
    assert decode(png(30, 1, 8, 0, [bytes(30)]), max_aspect=30.0, max_pixels=30).shape == (1, 30, 3)
    assert reason_of(png(30, 1, 8, 0, [bytes(30)]), max_pixels=29) == "too large"


def test_a_picture_beyond_pillows_warning_is_refused_without_one() -> None:
    assert reason_of(png(10_000, 10_000, 8, 2, [b""])) == "too large"


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0)])
def test_a_picture_without_pixels_is_refused(width: int, height: int) -> None:
    assert reason_of(png(width, height, 8, 2, [b""])) in ("damaged", "truncated")


def test_a_wrong_checksum_is_damage_wherever_it_is() -> None:
    content = encode(Image.fromarray(NOISE), "PNG", compress_level=0)
    for place in (20, 100, len(content) // 2, len(content) - 20):
        broken = bytearray(content)
        broken[place] ^= 1
        assert reason_of(bytes(broken)) == "damaged"


def test_a_wrong_checksum_over_good_pixels_is_damage() -> None:
    content = bytearray(png(4, 4, 8, 0, [bytes(range(1, 5))] * 4))
    content[-13] ^= 1  # the last byte of IDAT's checksum, before the 12 of IEND
    assert reason_of(bytes(content)) == "damaged"


def test_pixel_data_that_end_early_but_properly_are_truncation_and_not_black() -> None:
    row = NOISE[0].tobytes()
    assert decode(png(53, 2, 8, 2, [row, row])).all(axis=2).any()
    assert reason_of(png(53, 40, 8, 2, [row] * 20)) == "truncated"
    assert reason_of(png(53, 40, 8, 2, [row] * 39)) == "truncated"
    assert reason_of(png(2, 2, 8, 0, [b"\x01", b"\x02"], interlace=1)) == "truncated"


def test_a_tiff_whose_strips_leave_rows_out_is_damaged() -> None:
    content = grey_tiff(np.full((64, 8), 7), 16)
    with Image.open(io.BytesIO(content)) as picture:
        rows = picture.tag_v2[278]
    assert rows == 64
    entries = {
        256: (4, [8]), 257: (4, [64]), 258: (3, [8]), 259: (3, [1]),
        262: (3, [1]), 277: (3, [1]), 278: (4, [16]),
    }  # fmt: skip
    assert reason_of(tiff(entries, bytes([9]) * 16 * 8)) == "damaged"


def test_compression_bombs_in_metadata_are_refused() -> None:
    bomb = zlib.compress(bytes(200_000_000))
    text = chunk(b"zTXt", b"Comment\0\0" + bomb)
    profile = chunk(b"iCCP", b"icc\0\0" + bomb)
    for before in (text, profile):
        assert reason_of(png(4, 4, 8, 0, [bytes(4)] * 4, before)) == "damaged"


VARIANTS = {
    "JPEG": encode(PHOTO, "JPEG"),
    "progressive JPEG": encode(PHOTO, "JPEG", progressive=True),
    "PNG": encode(PHOTO, "PNG"),
    "WEBP": encode(PHOTO, "WEBP"),
    "lossless WEBP": encode(PHOTO, "WEBP", lossless=True),
    "GIF": encode(PHOTO, "GIF"),
    "BMP": encode(PHOTO, "BMP"),
    "TIFF": encode(PHOTO, "TIFF"),
    "packed TIFF": encode(PHOTO, "TIFF", compression="packbits"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_truncated_file_is_refused_or_all_there(variant: str) -> None:
    content = VARIANTS[variant]
    whole = decode(content)
    lengths = {
        *np.linspace(1, len(content) - 1, 40).astype(int),
        *range(len(content) - 8, len(content)),
    }
    refused = 0
    for length in sorted(lengths):
        reason = None
        try:
            pixels = decode(content[:length])
        except ImageError as error:
            refused += 1
            reason = error.reason
        else:
            np.testing.assert_array_equal(pixels, whole)
        allowed = (None, "truncated") if length >= 16 else ("truncated", "not a picture", "format")
        assert reason in allowed
    assert refused >= 38


def test_pillow_told_to_fill_what_is_missing_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for variant, content in VARIANTS.items():
        decode(content)
        if "TIFF" not in variant or "packed" in variant:
            assert reason_of(content[: len(content) * 2 // 3]) == "truncated"


SMALL = Image.fromarray(NOISE[:12, :10])
SEEDS = [
    encode(SMALL, "JPEG"),
    encode(SMALL, "JPEG", progressive=True, exif=Image.Exif().tobytes()),
    encode(SMALL, "PNG"),
    encode(SMALL.convert("P"), "PNG", transparency=3),
    encode(SMALL, "WEBP"),
    encode(SMALL, "GIF", save_all=True, append_images=[SMALL]),
    encode(SMALL, "BMP"),
    encode(SMALL.convert("P"), "BMP"),
    encode(SMALL, "TIFF"),
    encode(SMALL.convert("CMYK"), "TIFF"),
    grey_tiff(np.arange(120).reshape(12, 10) * 500, 16),
]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    seed=st.sampled_from(SEEDS),
    flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=12),
    cut=st.one_of(st.none(), st.floats(0, 1)),
)
def test_flipped_bytes_give_a_picture_or_an_image_error(
    seed: bytes, flips: list[tuple[float, int]], cut: float | None
) -> None:
    content = bytearray(seed)
    for place, mask in flips:
        content[int(place * len(content))] ^= mask
    if cut is not None:
        del content[int(cut * len(content)) :]
    message = ""
    try:
        pixels = decode(bytes(content), max_pixels=1_000_000)
    except ImageError as error:
        message = str(error)
    else:
        assert pixels.dtype == np.uint8
        assert pixels.shape[2] == 3
    assert "\n" not in message


# --- Arrays and PIL pictures -------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 4), (5, 4, 1)])
def test_grey_arrays_are_repeated(shape: tuple[int, ...]) -> None:
    grey = np.arange(20, dtype=np.uint8).reshape(shape)
    pixels = as_rgb(grey, "a")
    assert pixels.shape == (5, 4, 3)
    assert pixels.flags.c_contiguous
    np.testing.assert_array_equal(pixels, np.repeat(grey.reshape(5, 4, 1), 3, axis=2))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((4, 4, 3), np.float32),
        np.zeros((4, 4, 3), np.int64),
        np.zeros((3, 4, 4), np.uint8),
        np.zeros((4, 4, 4), np.uint8),
        np.zeros((2, 4, 4, 3), np.uint8),
        np.zeros((0, 4, 3), np.uint8),
        np.zeros(4, np.uint8),
    ],
)
def test_other_arrays_are_refused_with_what_was_expected_and_found(array: np.ndarray) -> None:
    with pytest.raises(ImageError, match=r"expected an array \(H, W\)") as caught:
        as_rgb(array, "my picture")
    assert caught.value.reason == "mode"
    assert str(array.shape) in str(caught.value)
    assert str(array.dtype) in str(caught.value)
    assert str(caught.value).startswith("my picture: ")


def test_pil_pictures_are_converted_as_files_are() -> None:
    for content in [*VARIANTS.values(), encode(PHOTO.convert("CMYK"), "JPEG"), grey_tiff(RAMP, 16)]:
        np.testing.assert_array_equal(as_rgb(Image.open(io.BytesIO(content))), decode(content))


def test_a_pil_picture_that_cannot_be_read_is_an_image_error() -> None:
    with pytest.raises(ImageError) as caught:
        as_rgb(Image.open(io.BytesIO(VARIANTS["JPEG"][:900])), "p")
    assert caught.value.reason == "truncated"


# --- Manners -----------------------------------------------------------------------------------


def test_the_name_is_in_the_message_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "two\nlines\udcff.jpg"
    path.write_bytes(b"words")
    with pytest.raises(ImageError) as caught:
        decode(path)
    assert "two\\nlines\\udcff.jpg: not a picture: " in str(caught.value)
    with pytest.raises(ImageError, match=r"^picture 7: not a picture"):
        decode(b"words", name="picture 7")


def test_the_error_crosses_processes() -> None:
    with pytest.raises(ImageError) as caught:
        decode(b"words", name="a.jpg")
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.name, again.reason, str(again)) == (
        "a.jpg",
        "not a picture",
        str(caught.value),
    )


def test_warnings_of_others_pass_and_the_filters_come_back() -> None:
    before = list(warnings.filters)
    noisy = grey_tiff(np.zeros((4, 4)), 16)
    noisy = noisy.replace(struct.pack("<HHI", 278, 4, 1), struct.pack("<HHI", 278, 4, 2))

    def work() -> None:
        for _ in range(30):
            with contextlib.suppress(ImageError):
                decode(noisy)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert warnings.filters == before


def test_files_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "a.gif"
    path.write_bytes(encode(PHOTO, "GIF", save_all=True, append_images=[PHOTO]))
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        decode(path)
        with pytest.raises(ImageError):
            decode(path, max_pixels=1)
    assert len(os.listdir("/proc/self/fd")) == opened
    assert stat.S_ISREG(path.stat().st_mode)
