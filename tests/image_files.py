"""Image files and folders made by hand, for the tests of data and prediction."""

import io
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitkit import DataError, ImageError, open_dataset
from vitkit.data.images.decode import decode

NOISE = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
PHOTO = Image.fromarray(
    np.clip(
        np.add.outer(np.arange(37) * 3, np.arange(53) * 2)[:, :, None] * [1.0, 0.7, 0.4]
        + np.random.default_rng(1).integers(0, 20, (37, 53, 3)),
        0,
        255,
    ).astype(np.uint8)
)


def encode(image: Image.Image, format: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format, **options)
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


def jpeg_of_scans(image: Image.Image, scans: int) -> bytes:
    """A progressive JPEG that goes over its first AC coefficients `scans` times more than usual."""
    content = encode(image, "JPEG", progressive=True)
    start = content.index(b"\xff\xda", content.index(b"\xff\xda") + 2)  # the second scan
    end = content.index(b"\xff\xc4", start)  # the tables of the third
    return content[:start] + content[start:end] * (scans + 1) + content[end:]


def reason_of(source: bytes | str | Path, **options: object) -> str:
    with pytest.raises(ImageError) as caught:
        decode(source, **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    return caught.value.reason


RAMP = np.arange(65536).reshape(256, 256)


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


def save(path: Path, value: int) -> None:
    """A 4 x 5 image whose every pixel is `value`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (5, 4), (value % 256, value // 256, 7)).save(path, "PNG")


def folder(root: Path, counts: Mapping[str, int]) -> Path:
    """`counts` images in each folder, no two alike."""
    value = 0
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            save(root / name / f"{i}.png", value)
            value += 1
    return root


def contents(dataset: Any) -> dict[str, set[tuple[str, int]]]:
    """Split -> the (class, pixel value) of its images."""
    return {
        name: {
            (
                dataset.classes[split.labels[i]],
                int(split.read(i)[0, 0, 0]) + 256 * int(split.read(i)[0, 0, 1]),
            )
            for i in range(len(split))
        }
        for name, split in dataset.splits.items()
    }


def refusal(data: str | Path, **options: object) -> str:
    with pytest.raises(DataError) as caught:
        open_dataset(data, **options)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()
    assert caught.value.exit_code == 2
    return str(caught.value)
