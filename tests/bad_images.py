"""Images that cannot be used, of thirty kinds, each file unlike the others."""

import os
import socket
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from image_files import chunk, encode, grey_tiff, png, tiff
from PIL import Image

Draw = np.random.Generator


def photo(draw: Draw, size: tuple[int, int] = (48, 40)) -> Image.Image:
    """An image with structure, unlike every other one."""
    coarse = draw.integers(0, 256, (6, 6, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC))
    noise = draw.integers(-9, 10, smooth.shape)
    return Image.fromarray(np.clip(smooth + noise, 0, 255).astype(np.uint8))


def cut(format: str, **options: object) -> Callable[[Draw], bytes]:
    """A file that ends somewhere in its second half."""

    def make(draw: Draw) -> bytes:
        content = encode(photo(draw), format, **options)
        return content[: int(len(content) * draw.uniform(0.5, 0.9))]

    return make


def text(start: bytes) -> Callable[[Draw], bytes]:
    """A file that starts so, and goes on as nothing that is read."""
    return lambda draw: start + draw.bytes(int(draw.integers(1, 200)))


def words(start: str) -> Callable[[Draw], bytes]:
    return lambda draw: f"{start} {draw.integers(1 << 60)}\n".encode() * 3


def wrong_checksum(draw: Draw) -> bytes:
    content = bytearray(encode(photo(draw), "PNG"))
    content[int(draw.integers(60, len(content) - 60))] ^= 1 << int(draw.integers(8))
    return bytes(content)


def no_pixels(draw: Draw) -> bytes:
    return png(0, int(draw.integers(1, 99)), 8, 2, [b""])


def too_few_rows(draw: Draw) -> bytes:
    return png(20, int(draw.integers(20, 40)), 8, 2, [draw.bytes(60) for _ in range(12)])


def strips_too_short(draw: Draw) -> bytes:
    entries = {
        256: (4, [8]), 257: (4, [64]), 258: (3, [8]), 259: (3, [1]),
        262: (3, [1]), 277: (3, [1]), 278: (4, [16]),
    }  # fmt: skip
    return tiff(entries, draw.bytes(16 * 8))


def bomb(draw: Draw) -> bytes:
    return png(20_000, int(draw.integers(20_000, 30_000)), 8, 2, [b""])


def ribbon(draw: Draw) -> bytes:
    return png(1, int(draw.integers(10_000, 20_000)), 8, 0, [b""])


def text_bomb(draw: Draw) -> bytes:
    packed = zlib.compress(bytes(80_000_000) + draw.bytes(8))
    return png(4, 4, 8, 0, [bytes(4)] * 4, chunk(b"zTXt", b"Comment\0\0" + packed))


def headless_jpeg(draw: Draw) -> bytes:
    return b"\xff\xd8\xff\xe0" + struct.pack(">H", 16) + b"JFIF\0" + draw.bytes(9)


def cut_large_jpeg(draw: Draw) -> bytes:
    shade = tuple(draw.integers(0, 256, 3).tolist())
    content = encode(Image.new("RGB", (3000, 2000), shade), "JPEG")
    return content[: int(len(content) * 0.9)]


CONTENTS: dict[str, tuple[Callable[[Draw], bytes], set[str]]] = {
    "empty": (lambda draw: b"", {"empty"}),
    "words": (words("just some words"), {"not an image"}),
    "page": (words("<!DOCTYPE html><html><body>404"), {"not an image"}),
    "lfs": (words("version https://git-lfs.github.com/spec/v1\noid sha256:"), {"not an image"}),
    "zeros": (lambda draw: bytes(int(draw.integers(16, 999))), {"not an image"}),
    "noise": (text(b"\xfe\x01"), {"not an image"}),
    "zip": (text(b"PK\x03\x04"), {"not an image"}),
    "svg": (words("<svg xmlns='http://www.w3.org/2000/svg'/>"), {"format"}),
    "eps": (text(b"%!PS-Adobe-3.0 EPSF-3.0\n"), {"format"}),
    "psd": (text(b"8BPS\0\1"), {"format"}),
    "pdf": (text(b"%PDF-1.7\n"), {"format"}),
    "fits": (text(b"SIMPLE  =                    T"), {"format"}),
    "dds": (text(b"DDS |\0\0\0"), {"format"}),
    "icns": (text(b"icns\0\0\1\0"), {"format"}),
    "heic": (text(b"\0\0\0\x18ftypheic\0\0\0\0"), {"format"}),
    "cut-jpeg": (cut("JPEG"), {"truncated"}),
    "cut-png": (cut("PNG"), {"truncated"}),
    "cut-webp": (cut("WEBP"), {"truncated"}),
    "cut-gif": (cut("GIF"), {"truncated"}),
    "cut-tiff": (cut("TIFF"), {"truncated"}),
    "cut-bmp": (cut("BMP"), {"truncated"}),
    "cut-large-jpeg": (cut_large_jpeg, {"truncated"}),
    "headless-jpeg": (headless_jpeg, {"truncated", "damaged"}),
    "checksum": (wrong_checksum, {"damaged", "truncated"}),
    "no-pixels": (no_pixels, {"damaged", "truncated"}),
    "too-few-rows": (too_few_rows, {"truncated"}),
    "short-strips": (strips_too_short, {"damaged"}),
    "bomb": (bomb, {"too large"}),
    "ribbon": (ribbon, {"too long"}),
    "text-bomb": (text_bomb, {"damaged"}),
    "float": (lambda draw: encode(Image.fromarray(draw.random((9, 9), np.float32)), "TIFF"),
              {"mode"}),
    "int32": (
        lambda draw: encode(Image.fromarray(draw.integers(0, 1 << 30, (9, 9), np.int32)), "TIFF"),
        {"mode"},
    ),
}  # fmt: skip
"""Kind -> what makes such a file's bytes, and the reasons that may be given."""


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link_to_nothing(path: Path) -> None:
    path.symlink_to(f"{path.name}.gone")


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the address of a socket is short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


TRAPS: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "fifo": (_fifo, {"not a file"}),
    "socket": (_socket, {"not a file"}),
    "broken-link": (_link_to_nothing, {"missing"}),
    "looping-link": (_link_to_itself, {"missing"}),
}
"""Kind -> what puts it at a path, and the reasons that may be given."""


def good_image(draw: Draw, number: int) -> tuple[str, bytes]:
    """Ending and content of a sound file; every sixth is of another format or mode."""
    image = photo(draw)
    kinds: tuple[tuple[str, Image.Image, str], ...] = (
        ("jpg", image, "JPEG"),
        ("png", image, "PNG"),
        ("webp", image, "WEBP"),
        ("gif", image, "GIF"),
        ("bmp", image.convert("L"), "BMP"),
        ("tiff", image.convert("CMYK"), "TIFF"),
    )
    ending, image, format = kinds[number % len(kinds)]
    if number % 12 == 1:
        image.putalpha(int(draw.integers(256)))
    if number % 50 == 7:
        return "tif", grey_tiff(draw.integers(0, 1 << 16, (9, 9)), 16)
    return ending, encode(image, format)


def make_bad_folder(root: Path, bad: int, good: int, seed: int = 0) -> dict[str, set[str]]:
    """An image folder with `bad` files of each kind among `good` sound ones.

    Returns:
        Name of each bad file -> the reasons that may be given for it.
    """
    draw, expected = np.random.default_rng(seed), {}
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
    folders = [f"{split}/{name}" for split in ("train", "val") for name in ("cat", "dog")]
    for number in range(good):
        ending, content = good_image(draw, number)
        (root / folders[number % 4] / f"{number:04}-good.{ending}").write_bytes(content)
    for number in range(bad):
        folder = folders[number % 4]
        for kind, (make, reasons) in CONTENTS.items():
            name = f"{folder}/{number:04}-{kind}.jpg"
            (root / name).write_bytes(make(draw))
            expected[name] = reasons
        for kind, (place, reasons) in TRAPS.items():
            name = f"{folder}/{number:04}-{kind}.jpg"
            place(root / name)
            expected[name] = reasons
    return expected
