"""The decoder gives a whole image or an `ImageError`, and never any other exception."""

import contextlib
import io
import os
import stat
import struct
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import (
    NOISE,
    PHOTO,
    VARIANTS,
    chunk,
    encode,
    grey_tiff,
    jpeg_of_scans,
    png,
    reason_of,
    tiff,
)
from PIL import Image, ImageFile

from vitkit import ImageError
from vitkit.data.images.decode import as_rgb, decode


@pytest.mark.parametrize(
    ("content", "reason", "detail"),
    [(b"", "empty", "0 bytes"), (b"just some words\n", "not an image", "text"),
     (b"<!DOCTYPE html><html><body>404", "not an image", "an HTML page"),
     (b"\n <HTML>\xe9", "not an image", "an HTML page"),
     (b"version https://git-lfs.github.com/spec/v1\noid", "not an image", "git lfs pull"),
     (bytes(64), "not an image", "zeros"), (b"PK\x03\x04zip", "not an image", "ZIP"),
     (b"\x93NUMPY\x01\x00", "not an image", "starts with"),
     (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "format", "SVG"),
     (b"<?xml version='1.0'?>\n<svg/>", "format", "SVG"),
     (b"%!PS-Adobe-3.0 EPSF-3.0\n", "format", "EPS"), (b"8BPS\0\1", "format", "PSD"),
     (b"%PDF-1.7\n", "format", "PDF"), (b"SIMPLE  =                    T", "format", "FITS"),
     (b"DDS |\0\0\0", "format", "DDS"), (b"icns\0\0\1\0", "format", "ICNS"),
     (b"\0\0\1\0\1\0", "format", "ICO"), (b"\0\0\0\x18ftypheic\0\0\0\0", "format", "HEIC"),
     (b"\0\0\0\x18ftypavif\0\0\0\0", "format", "AVIF"),
     (b"P6\n1 1\n255\n\0\0\0", "format", "Netpbm")],
)  # fmt: skip
def test_what_is_not_one_of_the_six_formats(tmp_path, content, reason, detail):
    path = tmp_path / "photo.jpg"
    path.write_bytes(content)
    for source in (content, path):
        with pytest.raises(ImageError) as caught:
            decode(source)
        assert caught.value.reason == reason
        assert detail in caught.value.detail
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [encode(Image.fromarray(NOISE[:, :, 0].astype(np.float32)), "TIFF"),
     encode(Image.fromarray(NOISE[:, :, 0].astype(np.int32)), "TIFF")],
    ids=["float", "int32"],
)  # fmt: skip
def test_float_and_32_bit_pixels_are_refused(content: bytes) -> None:
    assert reason_of(content) == "mode"
    with pytest.raises(ImageError) as caught:
        as_rgb(Image.open(io.BytesIO(content)), "p")
    assert caught.value.reason == "mode"


def test_paths_that_are_no_files_are_reported_without_opening_them(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo.jpg"
    os.mkfifo(fifo)
    reasons: list[str] = []
    worker = threading.Thread(target=lambda: reasons.append(reason_of(fifo)), daemon=True)
    worker.start()
    worker.join(5)
    assert reasons == ["not a file"]
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
    assert reason_of(huge) == "too large"
    assert reason_of(png(8000, 7000, 8, 2, [b""])) == "too large"
    assert reason_of(png(8000, 7000, 8, 2, [b""]), max_pixels=100_000_000) == "truncated"
    assert reason_of(png(20_000, 1, 8, 0, [b""])) == "too long"
    assert reason_of(png(1, 20_000, 8, 0, [b""])) == "too long"
    assert reason_of(png(30, 1, 8, 0, [b""]), max_aspect=29.0) == "too long"
    assert decode(png(30, 1, 8, 0, [bytes(30)]), max_aspect=30.0, max_pixels=30).shape == (1, 30, 3)
    assert reason_of(png(30, 1, 8, 0, [bytes(30)]), max_pixels=29) == "too large"


def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded() -> None:
    assert decode(jpeg_of_scans(PHOTO, 80)).shape == (37, 53, 3)
    bomb = jpeg_of_scans(PHOTO, 1000)
    assert reason_of(bomb) == "too large"
    with pytest.raises(ImageError, match="a JPEG of more than 100 scans"):
        decode(bomb)
    exif = Image.Exif()
    exif[0x010E] = "\xff\xda" * 400  # in a text, not in front of a scan
    commented = encode(PHOTO, "JPEG", progressive=True, comment=b"\xff\xda" * 400, exif=exif)
    assert decode(commented).shape == (37, 53, 3)


def test_a_jpeg_of_many_markers_is_refused_before_they_are_counted() -> None:
    plain = encode(PHOTO, "JPEG", progressive=True)
    for count, refused in ((1000, False), (1 << 20, True)):
        padded = plain[:-2] + b"\xff\xe1\0\2" * count + plain[-2:]  # empty APP1 segments
        if refused:
            with pytest.raises(ImageError, match="too large: a JPEG of more than 20,000 markers"):
                decode(padded)
        else:
            assert np.array_equal(decode(padded), decode(plain))


def test_the_markers_of_a_jpeg_are_counted_before_pillow_reads_them() -> None:
    # no frame follows: Pillow would call it damaged, after reading every marker
    assert reason_of(b"\xff\xd8" + b"\xff\xe1\0\2" * 20_001 + b"\xff\xd9") == "too large"


def test_a_tiff_of_a_tile_far_larger_than_the_image_is_refused() -> None:
    side = 256
    content = zlib.compress(bytes(side * side))
    entries = {
        256: (4, [9]), 257: (4, [8]), 258: (3, [8]), 259: (3, [8]), 262: (3, [1]), 277: (3, [1]),
        322: (4, [side]), 323: (4, [side]), 325: (4, [len(content)]),
    }  # fmt: skip
    tiled = tiff(entries, content).replace(struct.pack("<H", 273), struct.pack("<H", 324))
    assert decode(tiled, max_pixels=side * side).shape == (8, 9, 3)
    with pytest.raises(ImageError, match="too large: tiles of 256 x 256 pixels; at most 65,535"):
        decode(tiled, max_pixels=side * side - 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_tiffs_of_other_samples_are_not_called_damaged(dtype: type) -> None:
    tifffile = pytest.importorskip("tifffile")
    stream = io.BytesIO()
    tifffile.imwrite(stream, np.zeros((8, 9, 5), dtype), photometric="minisblack", planarconfig=1)
    with pytest.raises(ImageError, match="whose pixels are not grey, RGB, RGBA, CMYK") as caught:
        decode(stream.getvalue())
    assert caught.value.reason == "mode"


def test_a_wrong_checksum_is_damage_wherever_it_is() -> None:
    content = encode(Image.fromarray(NOISE), "PNG", compress_level=0)
    for position in (20, 100, len(content) // 2, len(content) - 20):
        broken = bytearray(content)
        broken[position] ^= 1
        assert reason_of(bytes(broken)) == "damaged"


def test_pixel_data_that_end_early_but_properly_are_truncation_and_not_black() -> None:
    row = NOISE[0].tobytes()
    assert decode(png(53, 2, 8, 2, [row, row])).all(axis=2).any()
    assert reason_of(png(53, 40, 8, 2, [row] * 20)) == "truncated"
    assert reason_of(png(53, 40, 8, 2, [row] * 39)) == "truncated"
    assert reason_of(png(2, 2, 8, 0, [b"\x01", b"\x02"], interlace=1)) == "truncated"
    # Adam7 writes row 1 of 3 last: it is missing here, and rows 0 and 2 are not
    assert reason_of(png(1, 3, 8, 0, [b"\x01", b"\x03"], interlace=1)) == "truncated"


def test_a_tiff_whose_strips_leave_rows_out_is_damaged() -> None:
    content = grey_tiff(np.full((64, 8), 7), 16)
    with Image.open(io.BytesIO(content)) as image:
        rows = image.tag_v2[278]
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
        # Pillow reports some cut files as damaged, and TIFFs as of an unknown kind
        allowed = (None, "truncated", "damaged", "mode")
        assert reason in allowed or (length < 16 and reason in ("not an image", "format"))
    assert refused >= 38


def test_pillow_s_switch_to_fill_what_is_missing_changes_nothing(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    for variant, content in VARIANTS.items():
        decode(content)
        if "TIFF" not in variant or "packed" in variant:
            cut = content[: len(content) * 2 // 3]
            assert reason_of(cut) in ("truncated", "damaged", "mode")


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
def test_flipped_bytes_give_an_image_or_an_image_error(seed, flips, cut):
    content = bytearray(seed)
    for position, mask in flips:
        content[int(position * len(content))] ^= mask
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


def test_libtiff_prints_nothing_and_prints_again_afterwards(capfd) -> None:
    content = bytearray(encode(PHOTO, "TIFF", compression="tiff_lzw"))
    content[60:200] = bytes(byte ^ 0xFF for byte in content[60:200])
    assert reason_of(bytes(content)) == "damaged"
    assert capfd.readouterr().err == ""
    with Image.open(io.BytesIO(content)) as image, contextlib.suppress(OSError):
        image.load()
    assert capfd.readouterr().err != ""


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
