"""IDX files, the format of MNIST and similar datasets, gzipped or not.

An IDX file is two zero bytes, a type byte (8: uint8), the number of dimensions, each dimension as a
big-endian uint32, then the values in C order. The declared size is checked against the size of the
file before memory is taken.
"""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from vitkit.errors import DataError
from vitkit.messages import nearest_parent

GZIP_MAGIC = b"\x1f\x8b"
UINT8 = 8
TYPE_NAMES = {9: "int8", 11: "int16", 12: "int32", 13: "float32", 14: "float64"}
MOST_DIMENSIONS = 255
IDX_BLOCK = 1 << 20
# Deflate cannot shrink by more (RFC 1951: 258 bytes from 2 bits).
MOST_INFLATION = 1032


def read_idx(path: str | os.PathLike[str]) -> UInt8[np.ndarray, " ..."]:
    """Return the array of an IDX file, uint8; gzip is recognised by its first bytes.

    Raises:
        DataError: missing, not an IDX file, not uint8, or longer or shorter than it declares.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            size = os.fstat(raw.fileno()).st_size
            if not is_gzip:
                return _read(raw, path, most=size)
            with gzip.GzipFile(fileobj=raw) as stream:
                return _read(stream, path, most=size * MOST_INFLATION)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {nearest_parent(path)}") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as an IDX file: {error}") from error


def write_idx(path: str | os.PathLike[str], array: np.ndarray) -> None:
    """Write `array`, uint8, gzipped where the name ends in .gz; the same array, the same bytes.

    Raises:
        DataError: an array that is not uint8, or has no dimension or more than 255.
    """
    if array.dtype != np.uint8 or not 1 <= array.ndim <= MOST_DIMENSIONS:
        raise DataError(
            f"{path}: expected a uint8 array of 1 to {MOST_DIMENSIONS} dimensions, "
            f"got {array.dtype} of {array.ndim}"
        )
    header = struct.pack(f">HBB{array.ndim}I", 0, UINT8, array.ndim, *array.shape)
    content = header + array.tobytes()
    if str(path).endswith(".gz"):
        # No time in the header, so that files are reproducible; zlib's level 9.
        content = gzip.compress(content, compresslevel=9, mtime=0)
    Path(path).write_bytes(content)


def _read(
    stream: gzip.GzipFile | io.BufferedReader, path: Path, most: int
) -> UInt8[np.ndarray, " ..."]:
    """Read one array from a stream that holds at most `most` bytes."""
    head = stream.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[3] == 0:
        raise DataError(
            f"{path}: not an IDX file: expected 00 00 <type> <dimensions>, "
            f"got {head.hex(' ') or 'an empty file'}"
        )
    # The third byte is the type of the values, the fourth the number of dimensions.
    if head[2] != UINT8:
        known = TYPE_NAMES.get(head[2], "an unknown type")
        raise DataError(f"{path}: expected values of type 8 (uint8), got {head[2]} ({known})")
    sides = stream.read(4 * head[3])
    if len(sides) < 4 * head[3]:
        raise DataError(
            f"{path}: expected {head[3]} dimensions, but the file ends within the header"
        )
    shape = struct.unpack(f">{head[3]}I", sides)
    expected = math.prod(shape)
    available = most - 4 - len(sides)
    declared = f"{path}: declares {' x '.join(map(str, shape))} = {expected:,} values"
    if expected > available:
        raise DataError(f"{declared}, but the file can hold at most {max(available, 0):,}")
    content = bytearray()
    # One byte more than declared is read, to see if there is any.
    while len(content) <= expected and (block := stream.read(min(IDX_BLOCK, expected + 1))):
        content += block
    if len(content) != expected:
        actual = "more" if len(content) > expected else f"{len(content):,}"
        raise DataError(f"{declared}, found {actual}")
    return np.frombuffer(content, np.uint8).reshape(shape)
