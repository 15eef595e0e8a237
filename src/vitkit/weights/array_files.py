"""safetensors files and numpy's `.npz` archives: headers first, tensors one by one."""

from __future__ import annotations

import io
import json
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import numpy as np
import safetensors.torch
import torch
from numpy.lib import format as npy
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.io.results import parse_json
from vitkit.weights.tensor_file import Header, Source
from vitkit.weights.zip_checks import MAX_TENSORS, READ_ERRORS, checked_entries

LONGEST_HEADER = 25_000_000
"""Bytes of a safetensors header; the library allows 100 MB, parsed into ten times as much."""
ENTRY_BYTES = 200
"""Bytes that a tensor's entry in a header takes beside its name, at most."""
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
}
"""The dtypes of safetensors that torch has; only floating-point ones are weights."""


def open_safetensors(path: Path, documents: Mapping[str, dict[str, Any]]) -> Source:
    """Open a safetensors file.

    Args:
        path: the file.
        documents: the JSON files beside it.

    Raises:
        CheckpointError: the file is damaged, cut off or too large in its header.
    """
    with ExitStack() as stack:
        # Opened once for everything: a run may replace the file at any moment.
        file = stack.enter_context(path.open("rb"))
        length = _header_length(path, file)
        try:
            entries = parse_json(file.read(length))
            # One entry more than tensors: `__metadata__`.
            if len(entries) > MAX_TENSORS + 1:
                raise ValueError(
                    f"{len(entries)} tensors are too many; at most {MAX_TENSORS} are read"
                )
            with safe_open(path, framework="pt"):
                pass  # the library checks the whole header as it opens the file
        except READ_ERRORS as error:
            raise CheckpointError(
                f"{path}: not a complete safetensors file: {error}; download or save it again"
            ) from None
        files = stack.pop_all()
    metadata = entries.pop("__metadata__", None) or {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    readers: dict[str, Callable[[], Tensor]] = {}
    for name, entry in entries.items():
        shapes[name] = tuple(entry["shape"])
        dtypes[name] = entry["dtype"]
        # Offsets count from the end of the header, which follows 8 bytes with its length.
        start = 8 + length + entry["data_offsets"][0]
        readers[name] = _bytes_reader(file, start, entry["dtype"], shapes[name])
    return Source(Header(path, shapes, dtypes, metadata, documents), readers, files)


def _header_length(path: Path, file: io.BufferedReader) -> int:
    """Read the length of the header in bytes, and seek to where the header begins.

    Raises:
        CheckpointError: the file does not begin with such a length and `{`, or is too short.
    """
    # 8 bytes with the length of the header, little-endian, then the header: a JSON object.
    start = file.read(9)
    size = os.fstat(file.fileno()).st_size
    file.seek(8)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 9 or start[8:] != b"{":
        raise CheckpointError(f"{path}: not a safetensors file; download or save it again")
    if length > LONGEST_HEADER:
        raise CheckpointError(
            f"{path}: not a safetensors file that vitkit reads: its header has {length} bytes, "
            f"and at most {LONGEST_HEADER} are read"
        )
    if length > size - 8:
        raise CheckpointError(
            f"{path}: not a complete safetensors file: a header of {length} bytes in a file of "
            f"{size}; download or save it again"
        )
    return length


def _bytes_reader(
    file: io.BufferedReader, start: int, dtype: str, shape: tuple[int, ...]
) -> Callable[[], Tensor]:
    """Return the function that reads one tensor from a file's plain bytes, little-endian."""

    def read() -> Tensor:
        if dtype not in TORCH_DTYPES:
            raise ValueError(f"{dtype} is not a dtype of weights; save them as float32")
        # Read straight into the memory of the tensor: no second copy of its bytes.
        tensor = torch.empty(math.prod(shape), dtype=TORCH_DTYPES[dtype], device="cpu")
        file.seek(start)
        count = file.readinto(tensor.view(torch.uint8).numpy().data)
        if count != tensor.nbytes:
            raise ValueError(f"{count} of {tensor.nbytes} bytes are there; the file is truncated")
        return tensor.view(shape)

    return read


def safetensors_writer(
    tensors: Mapping[str, Tensor], metadata: Mapping[str, str], path: Path | str = "weights"
) -> FileWriter:
    """Return the writer of a safetensors file.

    Args:
        tensors: by name, on any device.
        metadata: text entries of the header.
        path: the file, for messages.

    Raises:
        CheckpointError: a longer header than `load` reads, because of its metadata.
    """
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    addresses: set[int] = set()
    for name, tensor in stored.items():
        # The library refuses tensors that share memory, such as blocks with the same weights.
        if tensor.data_ptr() in addresses:
            stored[name] = tensor.clone()
        addresses.add(tensor.data_ptr())
    header = {"format": "pt", **metadata}
    length = len(json.dumps(header)) + sum(len(name) + ENTRY_BYTES for name in stored)
    if length > LONGEST_HEADER:
        raise CheckpointError(
            f"{path}: {length / 1e6:.1f} MB of metadata, and at most "
            f"{LONGEST_HEADER / 1e6:g} MB can be written; keep them in a file of their own"
        )

    def write(temporary: Path) -> None:
        # The library makes files of mode 600; the umask's mode is restored afterwards.
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            safetensors.torch.save_file(stored, temporary, header)
        except SafetensorError as error:
            # The library hides the system's error (disk full, ...) in its text.
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
        temporary.chmod(mode)

    return FileWriter(sum(tensor.nbytes for tensor in stored.values()), write)


# numpy's `.npz` archives: shapes from the headers, each array read when it is asked for.


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
                    shape, dtype = _array_header(f"{path}: {name}", file, entry.file_size)
                shapes[name] = shape
                dtypes[name] = dtype
                readers[name] = _array_reader(archive, entry)
            return Source(Header(path, shapes, dtypes, {}, documents), readers, files.pop_all())
    except READ_ERRORS as error:
        raise CheckpointError(
            f"{path}: not a complete .npz file: {error}; download or save it again"
        ) from None


def _array_header(
    name: str, file: io.BufferedIOBase | IO[bytes], size: int
) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of an array, checked against the bytes that its entry declares."""
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


def _array_reader(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Callable[[], Tensor]:
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
