"""JPEGs decoded by simplejpeg have Pillow's pixels, and what Pillow refuses is refused."""

import random
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import skimage.data
from image_files import encode
from PIL import ExifTags, Image

from vitkit import ImageError
from vitkit.data.images import decode as jpeg
from vitkit.data.images.decode import decode, decode_file

simplejpeg = pytest.importorskip("simplejpeg")
PHOTOGRAPH = Image.fromarray(skimage.data.astronaut()[:203, :301])
GREY = PHOTOGRAPH.convert("L")


def exif(orientation: int) -> Image.Exif:
    data = Image.Exif()
    data[ExifTags.Base.Orientation] = orientation
    return data


KINDS = {
    "4:4:4": encode(PHOTOGRAPH, "JPEG", subsampling=0),
    "4:2:2": encode(PHOTOGRAPH, "JPEG", subsampling=1),
    "4:2:0": encode(PHOTOGRAPH, "JPEG", subsampling=2),
    "progressive": encode(PHOTOGRAPH, "JPEG", progressive=True),
    "progressive 4:4:4": encode(PHOTOGRAPH, "JPEG", progressive=True, subsampling=0),
    "quality 1": encode(PHOTOGRAPH, "JPEG", quality=1),
    "quality 100": encode(PHOTOGRAPH, "JPEG", quality=100, optimize=True),
    "restart rows": encode(PHOTOGRAPH, "JPEG", restart_marker_rows=1),
    "restart blocks": encode(PHOTOGRAPH, "JPEG", progressive=True, restart_marker_blocks=3),
    "stored as RGB": encode(PHOTOGRAPH, "JPEG", keep_rgb=True),
    "grey": encode(GREY, "JPEG"),
    "grey progressive": encode(GREY, "JPEG", progressive=True, quality=30),
    "one row": encode(PHOTOGRAPH.crop((0, 0, 150, 1)), "JPEG"),
    "one pixel": encode(PHOTOGRAPH.crop((0, 0, 1, 1)), "JPEG"),
    "odd": encode(PHOTOGRAPH.crop((0, 0, 65, 67)), "JPEG"),
    "profile": encode(PHOTOGRAPH, "JPEG", icc_profile=b"x" * 100_000),
    "bytes after the end": encode(PHOTOGRAPH, "JPEG") + b"\xff\xd8 and more" * 9,
    "two frames": encode(PHOTOGRAPH, "MPO", save_all=True, append_images=[GREY.convert("RGB")]),
    **{f"turned {n}": encode(PHOTOGRAPH, "JPEG", exif=exif(n)) for n in range(2, 9)},
}


@pytest.fixture
def with_and_without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[object, object]]:
    """What a function gives with simplejpeg, and without it."""
    decoder = jpeg.fast_decoder()
    assert decoder is not None

    def both(function: Callable[[], object]) -> tuple[object, object]:
        results = []
        for present in (decoder, None):
            monkeypatch.setattr(jpeg, "fast_decoder", lambda present=present: present)
            try:
                results.append(function())
            except ImageError as error:
                results.append((error.reason, error.detail))
        return tuple(results)

    return both


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each JPEG that is decoded, whether simplejpeg did it."""
    used = []
    fast_pixels = jpeg.fast_pixels

    def watched(*arguments: object) -> object:
        pixels = fast_pixels(*arguments)
        used.append(pixels is not None)
        return pixels

    monkeypatch.setattr("vitkit.data.images.decode.fast_pixels", watched)
    return used


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_jpeg_has_the_same_pixels(kind, with_and_without, fast):
    ours, pillows = with_and_without(lambda: decode_file(KINDS[kind]))
    assert fast == [True, False]
    np.testing.assert_array_equal(ours.pixels, pillows.pixels)
    assert ours.pixels.flags["C_CONTIGUOUS"]
    assert ours[1:] == pillows[1:]


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("kind", ["4:2:0", "4:4:4", "progressive", "grey", "odd", "turned 6"])
def test_a_jpeg_decoded_smaller_has_the_same_pixels(kind, factor, with_and_without, fast):
    sizes = []

    def read() -> tuple[np.ndarray, tuple[int, int], int | None]:
        return decode_file(KINDS[kind], reduction=lambda size: sizes.append(size) or factor)[:3]

    (ours, size, used), (pillows, *_) = with_and_without(read)
    assert fast == [True, False]
    whole = decode(KINDS[kind])
    assert sizes == [whole.shape[:2]] * 2
    assert (size, used) == (whole.shape[:2], factor)
    assert ours.shape == (*jpeg.reduced_size(size, factor), 3)
    np.testing.assert_array_equal(ours, pillows)
    # each pixel is about the mean of those that it stands for
    height, width = (side // factor * factor for side in whole.shape[:2])
    blocks = whole[:height, :width].reshape(height // factor, factor, width // factor, factor, 3)
    means = blocks.mean(axis=(1, 3))
    inner = ours[: means.shape[0], : means.shape[1]]
    if not kind.startswith("turned"):
        assert np.abs(inner - means).mean() < 4


def test_other_files_are_never_decoded_smaller():
    def never(size: tuple[int, int]) -> int:
        raise AssertionError(size)

    for content in (encode(PHOTOGRAPH, "PNG"), encode(PHOTOGRAPH.crop((0, 0, 63, 90)), "JPEG")):
        pixels, size, factor = decode_file(content, reduction=never)
        assert factor is None
        assert pixels.shape == decode(content).shape == (*size, 3)


def damaged(seed: int) -> Iterator[bytes]:
    """JPEGs cut short, closed again, flipped, spliced, with bytes lost or added."""
    draw = random.Random(seed)
    contents = [KINDS[name] for name in ("odd", "grey", "progressive", "restart rows", "4:2:2")]
    for number in range(120):
        content = bytearray(contents[number % len(contents)])
        start = content.find(b"\xff\xda") + 12
        place = draw.randrange(start, len(content) - 2)
        other = draw.randrange(start, len(content))
        match number % 8:
            case 0:
                del content[place:]
            case 1:
                content[place:] = b"\xff\xd9"
            case 2:
                content[place] ^= 1 << draw.randrange(8)
            case 3:
                del content[place : place + 9]
            case 4:
                content[place:place] = draw.randbytes(20)
            case 5:
                content[draw.randrange(3, start)] ^= 1 << draw.randrange(8)
            case 6:
                content[place:] = content[other:]
            case 7:
                del content[-2:]
        yield bytes(content)


def test_damaged_files_have_the_same_fate(with_and_without):
    fates = set()
    for content in damaged(0):
        ours, pillows = with_and_without(lambda content=content: decode(content))
        assert type(ours) is type(pillows)
        if isinstance(ours, tuple):
            assert ours == pillows
        else:
            np.testing.assert_array_equal(ours, pillows)
        fates.add(type(ours))
    assert fates == {tuple, np.ndarray}


def test_a_decoder_with_other_pixels_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def brighter(*arguments: object, **settings: object) -> np.ndarray:
        pixels = simplejpeg.decode_jpeg(*arguments, **settings)
        pixels[-1, -1, -1] ^= 1
        return pixels

    assert jpeg.agrees_with_pillow(simplejpeg.decode_jpeg)
    assert not jpeg.agrees_with_pillow(brighter)
    for module in (types.SimpleNamespace(decode_jpeg=brighter), types.SimpleNamespace(), None):
        monkeypatch.setitem(sys.modules, "simplejpeg", module)
        assert jpeg.fast_decoder.__wrapped__() is None


def test_huge_files_are_not_read_into_memory(monkeypatch, tmp_path: Path, fast) -> None:
    path = tmp_path / "image.jpg"
    path.write_bytes(KINDS["4:2:0"])
    expected = decode(path)
    monkeypatch.setattr(jpeg, "READ_AT_ONCE", 1000)
    np.testing.assert_array_equal(decode(path), expected)
    assert fast == [True, False]
