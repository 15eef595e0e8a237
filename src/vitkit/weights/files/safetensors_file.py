"""safetensors files, read and written: names and shapes from the header, tensors by their bytes."""

from __future__ import annotations

import io
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.io.strict_json import parse_json
from vitkit.weights.files.source import Header, Source
from vitkit.weights.files.zip_checks import MAX_TENSORS, READ_ERRORS

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
        readers[name] = bytes_reader(file, start, entry["dtype"], shapes[name])
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


def bytes_reader(
    file: io.BufferedReader, start: int, dtype: str, shape: tuple[int, ...]
) -> Callable[[], Tensor]:
    """Return the function that reads one tensor from a file's plain bytes, little-endian.

    Plain reading, no memory map: a file that is overwritten or cut off while a model of it lives
    would change the model or end the process.

    Args:
        file: open for reading.
        start: offset of the tensor's first byte in it.
        dtype: as safetensors names it.
        shape: shape of the tensor.

    Returns:
        A function that raises `ValueError` for a file that has become shorter, or for a dtype that
        torch does not have.
    """

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
