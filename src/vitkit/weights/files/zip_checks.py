"""Numbers out of files: zip archives (`.npz`, `torch.save`'s) and the plain bytes of safetensors.

A directory may lie: declare more than the file can hold, name an entry twice, lead to the same
bytes a thousand times. What is refused here is never unpacked.
"""

from __future__ import annotations

import argparse
import io
import math
import re
import stat
import struct
import tarfile
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import SafetensorError
from torch import Tensor

from vitkit.errors import CheckpointError

MOST = 50_000
"""Tensors of a file; the largest published model and its optimiser's state have some 5000."""
INFLATION = 20
"""A compressed array may be this many times larger than its file; real weights hardly shrink."""
DAMAGE = (
    OSError, ValueError, EOFError, RuntimeError, MemoryError, SyntaxError, TypeError, LookupError,
    OverflowError, UserWarning, SafetensorError, zipfile.BadZipFile, zlib.error, struct.error,
    tokenize.TokenError,
)  # fmt: skip
"""What the readers of containers raise for bytes that are not what they seem."""


def entries(path: Path, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """The entries of an archive, if their file can hold them.

    Raises:
        CheckpointError: too many, one twice, links, names that lead elsewhere, encryption, a
            compression that no writer of weights uses, or sizes that the file has no room for.
    """
    found, size = archive.infolist(), path.stat().st_size
    if len(found) > MOST:
        raise CheckpointError(f"{path}: {len(found)} entries are too many; {MOST} are the most")
    seen: set[str] = set()
    for entry in found:
        name = entry.filename
        place = PurePosixPath(name.replace("\\", "/"))
        if name in seen:
            name = name.removesuffix(".npy")
            raise CheckpointError(f"{path}: the array {name!r} is there twice")
        if place.is_absolute() or ".." in place.parts or stat.S_ISLNK(entry.external_attr >> 16):
            raise CheckpointError(f"{path}: its entry {name!r} leads out of the archive")
        if entry.flag_bits & 1:
            raise CheckpointError(f"{path}: {name} is encrypted; unpack it with its password")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise CheckpointError(f"{path}: {name} is compressed by a method other than deflate")
        seen.add(name)
    if (packed := sum(entry.compress_size for entry in found)) > size:
        raise CheckpointError(f"{path}: its entries take {packed} bytes of {size}: they overlap")
    declared = sum(entry.file_size for entry in found)
    if declared > INFLATION * size + 16_000_000:
        raise CheckpointError(
            f"{path}: {size} bytes declare {declared} bytes of arrays; no weights shrink so far"
        )
    return found


def array_header(
    name: str, file: io.BufferedIOBase | IO[bytes], size: int
) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of an array, held against the bytes that its entry declares.

    Raises:
        CheckpointError: objects, fields, or another size than the entry has.
        Exception: one of `DAMAGE`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy mends headers of Python 2; no weights have them
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read(file)
    if dtype.hasobject:
        raise CheckpointError(f"{name} holds Python objects, not numbers")
    if dtype.itemsize == 0 or dtype.names is not None:
        raise CheckpointError(f"{name} holds {dtype}, not numbers")
    sides = tuple(int(side) for side in shape)
    if min(sides, default=0) < 0:
        raise CheckpointError(f"{name} has a negative side: {sides}")
    needed = int(np.prod(sides, dtype=object)) * dtype.itemsize
    if needed > size:
        raise CheckpointError(f"{name} declares {needed} bytes and has {size}")
    return sides, dtype.str


def array_reader(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Callable[[], Tensor]:
    """What reads one array, in the machine's order of bytes."""

    def read() -> Tensor:
        with archive.open(entry) as file:
            array = npy.read_array(file, allow_pickle=False)
        if array.dtype == np.dtype("V2"):  # bfloat16, which numpy has no name for
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        native = array.astype(array.dtype.newbyteorder("="), copy=False)
        return torch.from_numpy(np.ascontiguousarray(native).reshape(array.shape))

    return read


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
"""The dtypes of safetensors that torch has; only floating-point ones are weights."""


def bytes_reader(
    file: io.BufferedReader, start: int, dtype: str, shape: tuple[int, ...]
) -> Callable[[], Tensor]:
    """Make the function that reads one tensor from a file's plain bytes, little-endian.

    Plain reading, no memory map: a file that is overwritten or cut off while a model of it lives
    would change the model or end the process.

    Args:
        file: open for reading.
        start: of the tensor's bytes in it.
        dtype: as safetensors names it.
        shape: of the tensor.

    Returns:
        A function that raises `ValueError` for a file that has become shorter, or for a dtype that
        torch does not have.
    """

    def read() -> Tensor:
        if dtype not in DTYPES:
            raise ValueError(f"{dtype} numbers are no weights; save them as float32")
        tensor = torch.empty(math.prod(shape), dtype=DTYPES[dtype], device="cpu")
        file.seek(start)
        if (found := file.readinto(tensor.view(torch.uint8).numpy().data)) != tensor.nbytes:
            raise ValueError(f"{found} of {tensor.nbytes} bytes are there; the file was cut off")
        return tensor.view(shape)

    return read


def stated_model(content: object) -> dict[str, Any]:
    """What a training checkpoint says of its model, in the words of timm's `config.json`.

    timm's train.py writes the name as `arch`, and its settings as `args`, a Namespace.

    Returns:
        `architecture`, `model_args` and `global_pool` as far as they are there; nothing without a
        name.
    """
    if not isinstance(content, Mapping):
        return {}
    args = content.get("args")
    args = vars(args) if isinstance(args, argparse.Namespace) else args
    args = args if isinstance(args, Mapping) else {}
    names = [name for name in (content.get("arch"), args.get("model"))
             if isinstance(name, str) and re.fullmatch(r"[\w./-]{1,100}", name)]  # fmt: skip
    if not names:
        return {}
    keywords = args.get("model_kwargs")
    said: dict[str, Any] = {"architecture": names[0].rpartition("/")[2].partition(".")[0]}
    said["model_args"] = dict(keywords) if isinstance(keywords, Mapping) else {}
    if isinstance(size := args.get("img_size"), int):
        said["model_args"].setdefault("img_size", size)
    if isinstance(pool := args.get("gp"), str):
        said["global_pool"] = pool
    return said


def pickle_records(path: Path) -> set[int] | None:
    """Sizes of the records of `torch.save`'s archive; None for a bare pickle, as of old.

    Raises:
        CheckpointError: neither, or an archive that torch would unpack, run or write.
    """
    with path.open("rb") as file:
        start = file.read(4)
    if start != b"PK\x03\x04":
        if start[:1] != b"\x80" or tarfile.is_tarfile(path):
            raise CheckpointError(f"{path}: no pickle of torch's, and no archive of torch.save")
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            found = entries(path, archive)
    except DAMAGE as error:
        raise CheckpointError(f"{path}: not a whole archive: {error}") from None
    if any(entry.filename.endswith("/constants.pkl") for entry in found):
        raise CheckpointError(f"{path}: a TorchScript program; save its state_dict() instead")
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in found):
        raise CheckpointError(f"{path}: it is compressed, which torch.save's archives never are")
    return {entry.file_size for entry in found}
