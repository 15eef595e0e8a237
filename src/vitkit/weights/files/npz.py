"""numpy's `.npz` archives: shapes from the headers, each array read when it is asked for."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.weights.files.source import Header, Source
from vitkit.weights.files.zip_checks import READ_ERRORS, checked_entries


def open_npz(path: Path, documents: Mapping[str, dict[str, Any]]) -> Source:
    """Open a `.npz` file.

    Args:
        path: the file.
        documents: the JSON files beside it.

    Raises:
        CheckpointError: the archive is damaged or lies about its size.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    readers: dict[str, Callable[[], Tensor]] = {}
    try:
        with ExitStack() as files:
            archive = files.enter_context(zipfile.ZipFile(path))
            # Only headers are read here; an array is read when it is asked for.
            for entry in checked_entries(path, archive):
                name = entry.filename.removesuffix(".npy")
                with archive.open(entry) as file:
                    shape, dtype = array_header(f"{path}: {name}", file, entry.file_size)
                shapes[name] = shape
                dtypes[name] = dtype
                readers[name] = array_reader(archive, entry)
            return Source(Header(path, shapes, dtypes, {}, documents), readers, files.pop_all())
    except READ_ERRORS as error:
        raise CheckpointError(
            f"{path}: not a complete .npz file: {error}; download or save it again"
        ) from None


def array_header(
    name: str, file: io.BufferedIOBase | IO[bytes], size: int
) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of an array, checked against the bytes that its entry declares.

    Args:
        name: name of the array, for messages.
        file: at the start of the array.
        size: bytes of the entry.

    Raises:
        CheckpointError: objects, fields, or another size than the entry has.
        Exception: one of `READ_ERRORS`.
    """
    with warnings.catch_warnings():
        # numpy warns when it repairs headers of Python 2; no weights have such headers.
        warnings.simplefilter("error")
        if npy.read_magic(file) == (1, 0):
            shape, _, dtype = npy.read_array_header_1_0(file)
        else:
            shape, _, dtype = npy.read_array_header_2_0(file)
    if dtype.hasobject:
        raise CheckpointError(f"{name} holds Python objects, not numbers")
    if dtype.itemsize == 0 or dtype.names is not None:
        raise CheckpointError(f"{name} holds {dtype}, not numbers")
    sides = tuple(map(int, shape))
    if min(sides, default=0) < 0:
        raise CheckpointError(f"{name} has a negative size: {sides}")
    # dtype=object multiplies Python integers, which do not overflow.
    needed = int(np.prod(sides, dtype=object)) * dtype.itemsize
    if needed > size:
        raise CheckpointError(f"{name} declares {needed} bytes and has {size}")
    return sides, dtype.str


def array_reader(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Callable[[], Tensor]:
    """Return the function that reads one array, in the machine's byte order."""

    def read() -> Tensor:
        with archive.open(entry) as file:
            array = npy.read_array(file, allow_pickle=False)
        # bfloat16 has no name in numpy: Flax writes it as two bytes without a meaning.
        if array.dtype == np.dtype("V2"):
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        # Files of big-endian machines exist, and torch has no other byte order than the native one.
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        return torch.from_numpy(np.ascontiguousarray(native).reshape(array.shape))

    return read
