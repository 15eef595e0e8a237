"""Files of weights, opened by their headers; each tensor is read when it is asked for.

The one entry to files of weights. safetensors and `.npz` cannot run code; a pickle is opened only
where the user trusts it, and then by torch's restricted reader alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

import numpy as np
import safetensors.torch
import torch
from numpy.lib import format as npy
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitkit import errors, messages
from vitkit.io import untrusted
from vitkit.io.atomic import FileWriter
from vitkit.weights.pickles import PICKLE_ENDINGS, read_pickle

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""
DTYPE_NAMES = ("float32", "float16", "bfloat16", "float64")
WEIGHT_DTYPES = [getattr(torch, name) for name in DTYPE_NAMES]
"""The dtypes of tensors that count as weights."""
IMPOSTORS = {
    b"version https://git-lfs": "a Git LFS pointer, not the file itself; run `git lfs pull`",
    b"<!doctype": "a web page saved as weights; download the file itself",
    b"<html": "a web page saved as weights; download the file itself",
}
"""First bytes of files often saved instead of weights -> message."""
WEIGHTS_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.npz",
    "weights/best.safetensors",
)
"""Names of a folder's weights, in the order in which transformers looks for them."""
LONGEST_EMPTY = 65_536
"""Longest side of an empty tensor, which takes no bytes, so that any side can be declared."""


@dataclass(frozen=True)
class Header:
    """The description of a file of weights: everything but the numbers.

    Attributes:
        path: the file, or the folder.
        shapes: tensor name -> shape.
        dtypes: tensor name -> dtype as the file names it, such as `F32` or `<f4`.
        metadata: the safetensors header's own text entries.
        documents: the JSON files beside it: `config`, `preprocessor`.
        notes: containers and prefixes that were removed, one line each.
        stated: the model as a training checkpoint describes it, with the keys of timm's
            `config.json`.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    documents: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stated: Mapping[str, Any] = field(default_factory=dict)


class ComputedTensor(NamedTuple):
    """A tensor that is read, or computed from others of its file, when it is asked for.

    Attributes:
        shape: shape of the tensor.
        dtype: as the file names it.
        read: returns it, in memory of its own.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


class Source(Mapping[str, Tensor]):
    """The tensors of an open file by name, each read when it is asked for; a context manager.

    Each tensor has memory of its own: later changes of the file do not reach it.

    Args:
        header: header of the file; shapes and dtypes are those of `tensors`.
        tensors: tensor name -> the tensor.
        files: the open files, closed with the source.
    """

    def __init__(
        self, header: Header, tensors: Mapping[str, ComputedTensor], files: ExitStack
    ) -> None:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        self.header = replace(header, shapes=shapes, dtypes=dtypes)
        self.tensors = tensors
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor that holds weights.

        Raises:
            CheckpointError: the tensor is damaged, holds no floating-point numbers, or holds
                numbers that are not finite.
        """
        # Errors of any container become one line with the file and the tensor.
        try:
            tensor = self.tensors[name].read()
            problem = unusable_numbers(tensor)
        except untrusted.READ_ERRORS as error:
            problem = f"cannot be read: {error}"
        untrusted.refuse(self.header.path, {f"{name}: {problem}": problem})
        return tensor

    def __contains__(self, name: object) -> bool:
        # Mapping's own version would read the tensor to find out.
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def renamed(self, names: Mapping[str, str], *notes: str) -> Source:
        """Return the same tensors under other names.

        Args:
            names: old name -> new name; tensors that are not in it are left out.
            *notes: added to the header's.
        """
        return self.replaced({new: self.tensors[old] for old, new in names.items()}, *notes)

    def replaced(self, tensors: Mapping[str, ComputedTensor], *notes: str) -> Source:
        """Return other tensors of the same file, with lines added to the header's notes."""
        header = replace(self.header, notes=(*self.header.notes, *notes))
        return Source(header, tensors, self._files)

    def renamed_by(
        self, rename: Callable[[str], str], *notes: str, clash: str | None = None
    ) -> Source:
        """Return the same tensors with each name changed by a function.

        Args:
            rename: old name -> new name.
            *notes: added to the header's.
            clash: message of the error for two tensors that would get one name.

        Raises:
            CheckpointError: such a clash, if there is a message for it.
        """
        names = {name: rename(name) for name in self}
        if clash is not None and len(set(names.values())) < len(names):
            raise errors.CheckpointError(clash)
        return self.renamed(names, *notes)


def unusable_numbers(tensor: Tensor) -> str:
    """Describe why a model cannot compute with a tensor, or return an empty text."""
    if tensor.is_meta:
        return "on the meta device, without values"
    if tensor.dtype not in WEIGHT_DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        return f"{kind} is not a dtype of weights; expected {', '.join(DTYPE_NAMES)}"
    # A sum never loses a NaN or an infinity, so the slow test runs only where one is likely.
    if torch.isfinite(tensor.sum(dtype=torch.float32)):
        return ""
    count = int((~torch.isfinite(tensor.float())).sum())
    if not count:
        return ""
    return (
        f"{count} of {tensor.numel()} numbers are NaN or infinite in float32; use a checkpoint "
        "from before training diverged"
    )


# Digests of tensors.


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return a SHA-256 for each group of tensors: `blocks.3`, `patch_embed`, `head`, `cls_token`.

    Each digest covers name, dtype, shape and bytes of the group's tensors, in the order of their
    names. So damage is located, and parts of two models are compared by their headers alone.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(tensors):
        parts = name.split(".")
        groups.setdefault(".".join(parts[: 2 if parts[0] == "blocks" else 1]), []).append(name)
    with ThreadPoolExecutor(2) as threads:  # hashing releases the interpreter lock
        digests = threads.map(partial(_group_digest, tensors), groups.values())
        return dict(zip(groups, digests, strict=True))


def _group_digest(tensors: Mapping[str, Tensor], names: Sequence[str]) -> str:
    sha256 = hashlib.sha256()
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        # shape and dtype too: equal bytes may be other numbers
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.flatten().view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def weights_fingerprint(tensors: Mapping[str, Tensor], without: Sequence[str] = ()) -> str:
    """Return one SHA-256 of a model's tensors, in 64 hex digits.

    Args:
        tensors: name -> tensor, as in a state dict.
        without: groups to leave out, such as `head`.
    """
    digests = tensor_digests(tensors)
    for group in without:
        digests.pop(group, None)
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


# Opening a file or a folder.


def open_source(path: Path, *, trust_pickle: bool = False) -> Source:
    """Open a file of weights, or a folder as hubs lay them out.

    Args:
        path: `.safetensors` (also by its index of shards), `.npz`, a pickle, or a folder with one.
        trust_pickle: read `.pth`, `.pt`, `.bin` at all; torch's `weights_only` reader does it.

    Raises:
        CheckpointError: no such file, another kind of file, damaged, or a pickle without trust.
    """
    if os.path.isdir(path):  # never raises, as `Path.is_dir` does for too long a name
        path = _weights_of(path)
    _check_file(path)
    # Read only when a format asks for one: a broken document that no format needs is no error.
    documents = untrusted.Documents(path.parent)
    if path.name.endswith(".index.json"):
        return _open_shards(path, documents, trust_pickle)
    return _open_file(path, documents, trust_pickle)


def _weights_of(folder: Path) -> Path:
    """Return the file of weights in a folder."""
    for name in WEIGHTS_FILES:
        if (folder / name).is_file():
            return folder / name
    reason = "is not a run or checkpoint folder (no model.safetensors or weights/best.safetensors)"
    remedy = "name one, or a file of weights"
    last = folder / "weights" / "last.safetensors"
    if last.is_file():  # a run that was stopped in its first epoch
        reason = "has no weights/best.safetensors, as no epoch of this run is complete"
        remedy = f"name {last}"
    raise errors.CheckpointError(f"{folder} {reason}; {remedy}")


def _check_file(path: Path) -> None:
    """Refuse a file that cannot be a checkpoint, before anything parses it."""
    problem = ""
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        problem = "not a file"
    else:
        try:
            with path.open("rb") as file:
                # Enough for the prefixes in `IMPOSTORS`, such as that of a Git LFS pointer.
                start = file.read(64)
            if not start:
                problem = "the file is empty (0 bytes)"
            for magic, message in IMPOSTORS.items():
                if start.lower().startswith(magic):
                    problem = message
        except (FileNotFoundError, NotADirectoryError):
            problem = f"no such file; {messages.nearest_parent(path)}"
        except OSError as error:
            problem = f"cannot be opened: {error.strerror}"
    untrusted.refuse(path, {problem: problem})


def _open_file(path: Path, documents: Mapping[str, dict[str, Any]], trust: bool) -> Source:
    """Open one file that is complete in itself."""
    header = Header(path, documents=documents)
    endings = (".safetensors", ".npz", *PICKLE_ENDINGS)
    ending = f"ends in {path.suffix or 'nothing'}; expected {', '.join(endings)}"
    untrusted.refuse(path, {ending: not path.name.endswith(endings)})
    # By the ending: trying readers one after the other would run the pickle reader on anything.
    if path.name.endswith(PICKLE_ENDINGS):
        source = _open_pickle(header, trust)
    elif path.suffix == ".safetensors":
        source = _open_safetensors(header)
    else:
        source = _open_npz(header)
    empty = [side for shape in source.header.shapes.values() if 0 in shape for side in shape]
    count, longest = len(source), max(empty, default=0)
    problems = {
        f"{count} tensors are too many; at most {untrusted.MAX_TENSORS} are read": count
        > untrusted.MAX_TENSORS,
        f"an empty tensor has a side of {longest}; at most {LONGEST_EMPTY} is read": (
            longest > LONGEST_EMPTY
        ),
    }
    with ExitStack() as files:
        files.enter_context(source)
        untrusted.refuse(path, problems)
        files.pop_all()
    return source


def _open_shards(path: Path, documents: Mapping[str, dict[str, Any]], trust: bool) -> Source:
    """Open all files of a sharded checkpoint by its index, `{"weight_map": {tensor: file}}`."""
    weight_map = untrusted.read_json(path).get("weight_map")
    no_map = not isinstance(weight_map, dict) or not weight_map
    untrusted.refuse(path, {"expected a `weight_map` from tensor names to files": no_map})
    tensors: dict[str, ComputedTensor] = {}
    shards: dict[str, Source] = {}
    with ExitStack() as files:
        for tensor, value in (weight_map or {}).items():
            name = str(value)
            # The index is untrusted: it may only name files of weights in its own folder.
            is_weights = name.endswith((".safetensors", *PICKLE_ENDINGS))
            outside = f"the shard {name!r} is not a weights file, or lies outside of the folder"
            untrusted.refuse(path, {outside: not is_weights or Path(name).name != name})
            # Each file is opened once, however many tensors the index finds in it.
            if name not in shards:
                _check_file(path.parent / name)
                shard = _open_file(path.parent / name, {}, trust)
                shards[name] = files.enter_context(shard)
            untrusted.refuse(path, {f"{tensor} is not in {name}": tensor not in shards[name]})
            tensors[tensor] = shards[name].tensors[tensor]
        return Source(Header(path, documents=documents), tensors, files.pop_all())


def _open_pickle(header: Header, trust: bool) -> Source:
    content, notes, stated = read_pickle(header.path, trust)
    tensors: dict[str, ComputedTensor] = {}
    for name, tensor in content.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        # cloned: torch maps the file, which may change later
        tensors[name] = ComputedTensor(tuple(tensor.shape), dtype, tensor.clone)
    return Source(replace(header, notes=notes, stated=stated), tensors, ExitStack())


# safetensors files.

LONGEST_HEADER = 25_000_000
"""Bytes of a safetensors header; the library allows 100 MB, parsed into ten times as much."""
ENTRY_BYTES = 200
"""Bytes that a tensor's entry in a header takes beside its name, at most."""
DTYPES: Mapping[str, Any] = safetensors.torch._TYPES
"""The dtypes of safetensors that torch has; only floating-point ones are weights."""


def _open_safetensors(header: Header) -> Source:
    path = header.path
    tensors: dict[str, ComputedTensor] = {}
    try:
        with ExitStack() as files:
            # Opened once for everything: a run may replace the file at any moment.
            file = files.enter_context(path.open("rb"))
            length = int.from_bytes(file.read(8), "little")
            too_long = (
                f"not a safetensors file that vitkit reads: its header has {length} bytes, and at "
                f"most {LONGEST_HEADER} are read"
            )
            untrusted.refuse(path, {too_long: length > LONGEST_HEADER})
            with safe_open(path, framework="pt"):
                pass  # the library checks the whole header as it opens the file
            entries = untrusted.parse_json(file.read(length))
            metadata = entries.pop("__metadata__", None) or {}
            for name, entry in entries.items():
                dtype, shape = entry["dtype"], tuple(entry["shape"])
                # Offsets count from the end of the header, which follows 8 bytes with its length.
                start = 8 + length + entry["data_offsets"][0]
                read = partial(_read_bytes, file, start, dtype, shape)
                tensors[name] = ComputedTensor(shape, dtype, read)
            return Source(replace(header, metadata=metadata), tensors, files.pop_all())
    except untrusted.READ_ERRORS as error:
        raise errors.CheckpointError(
            f"{path}: not a complete safetensors file: {error}; download or save it again"
        ) from None


def _read_bytes(file: io.BufferedReader, start: int, dtype: str, shape: tuple[int, ...]) -> Tensor:
    """Read a tensor from a file's plain bytes, little-endian.

    The library would map the file: if it is cut off meanwhile, the system ends the process.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{dtype} is not a dtype of weights; save them as float32")
    # Read straight into the memory of the tensor: no second copy of its bytes.
    tensor = torch.empty(math.prod(shape), dtype=DTYPES[dtype], device="cpu")
    file.seek(start)
    count = file.readinto(tensor.view(torch.uint8).numpy().data)
    if count != tensor.nbytes:
        raise ValueError(f"{count} of {tensor.nbytes} bytes are there; the file is truncated")
    return tensor.view(shape)


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
    too_long = (
        f"{length / 1e6:.1f} MB of metadata, and at most {LONGEST_HEADER / 1e6:g} MB can be "
        "written; keep them in a file of their own"
    )
    untrusted.refuse(path, {too_long: length > LONGEST_HEADER})

    def write(temporary: Path) -> None:
        # The library makes files of mode 600; the umask's mode is restored afterwards.
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            safetensors.torch.save_file(stored, temporary, header)
        except SafetensorError as error:
            # The library hides the system's error (disk full, ...) in its text.
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else 0, str(error)) from error
        temporary.chmod(mode)

    return FileWriter(sum(tensor.nbytes for tensor in stored.values()), write)


# numpy's `.npz` archives: shapes from the headers, each array read when it is asked for.


def _open_npz(header: Header) -> Source:
    path = header.path
    tensors: dict[str, ComputedTensor] = {}
    try:
        with ExitStack() as files:
            archive = files.enter_context(zipfile.ZipFile(path))
            for entry in untrusted.checked_entries(path, archive):
                name = entry.filename.removesuffix(".npy")
                with archive.open(entry) as file:
                    shape, dtype = _array_header(f"{path}: {name}", file, entry.file_size)
                tensors[name] = ComputedTensor(shape, dtype, partial(_read_array, archive, entry))
            return Source(header, tensors, files.pop_all())
    except untrusted.READ_ERRORS as error:
        raise errors.CheckpointError(
            f"{path}: not a complete .npz file: {error}; download or save it again"
        ) from None


def _array_header(
    name: str, file: io.BufferedIOBase | IO[bytes], size: int
) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of an array, checked against the bytes that its entry declares."""
    with warnings.catch_warnings():
        # numpy warns when it repairs headers of Python 2; no weights have such headers.
        warnings.simplefilter("error")
        is_first = npy.read_magic(file) == (1, 0)
        read = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
        shape, _, dtype = read(file)
    sides = tuple(map(int, shape))
    is_number = not dtype.hasobject and dtype.names is None and dtype.itemsize > 0
    fits = min(sides, default=0) >= 0 and math.prod(sides) * dtype.itemsize <= size
    problem = f"declares {dtype} of shape {sides[:8]} in {size} bytes, and is no array of numbers"
    untrusted.refuse(name, {problem: not (is_number and fits)})
    return sides, dtype.str


def _read_array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Tensor:
    """Return an array in the machine's byte order."""
    with archive.open(entry) as file:
        array = npy.read_array(file, allow_pickle=False)
    # bfloat16 has no name in numpy: Flax writes it as two bytes without a meaning.
    if array.dtype == np.dtype("V2"):
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    # Files of big-endian machines exist, and torch has no other byte order than the native one.
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.ascontiguousarray(native).reshape(array.shape))
