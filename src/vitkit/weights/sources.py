"""Opening a file of weights: what it says without its numbers, and its tensors one by one.

The one place where files of weights are opened. safetensors and `.npz` cannot run code; a pickle is
opened only where the user says that it is trusted, and then by torch's restricted reader alone.
"""

from __future__ import annotations

import argparse
import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitkit.errors import CheckpointError, nearest_parent
from vitkit.weights.hub import fetch, is_address

PICKLES = (".pth", ".pt", ".bin", ".ckpt", ".pkl")
IMPOSTORS = {
    b"version https://git-lfs": "a git-LFS pointer, not the file itself; run `git lfs pull`",
    b"<!doctype": "a web page saved as weights; download the file itself",
    b"<html": "a web page saved as weights; download the file itself",
}
DOCUMENTS = {"config": "config.json", "preprocessor": "preprocessor_config.json"}
"""JSON that lies beside weights, by the name it has in `Header.documents`."""
WHOLE = ("model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json",
         "pytorch_model.bin", "model.npz")  # fmt: skip
"""What a folder's weights may be called, best first."""
INFLATION = 20
"""A compressed array may be this many times larger than its file; real weights hardly shrink."""


@dataclass(frozen=True)
class Header:
    """What a file of weights says without its numbers.

    Attributes:
        path: the file, or the folder.
        shapes: tensor name -> shape.
        dtypes: tensor name -> dtype as the file names it, such as `F32` or `<f4`.
        metadata: the safetensors header's own text entries.
        documents: the JSON files beside it: `config`, `preprocessor`.
        notes: what was unwrapped on the way.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    metadata: dict[str, str] = field(default_factory=dict)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Source(Mapping[str, Tensor]):
    """The tensors of an open file by name, each read when it is asked for; a context manager."""

    def __init__(
        self, header: Header, readers: Mapping[str, Callable[[], Tensor]], files: ExitStack
    ) -> None:
        self.header, self._readers, self._files = header, readers, files

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._readers[name]()
        except (SafetensorError, OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
            raise CheckpointError(f"{self.header.path}: {name}: cannot be read: {error}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def renamed(self, names: Mapping[str, str], *notes: str) -> Source:
        """The same tensors under other names (old -> new); those not named are left out."""
        old = self.header
        header = Header(
            old.path,
            {new: old.shapes[name] for name, new in names.items()},
            {new: old.dtypes[name] for name, new in names.items()},
            old.metadata,
            old.documents,
            (*old.notes, *notes),
        )
        return Source(
            header, {new: self._readers[name] for name, new in names.items()}, self._files
        )


def open_source(path: str | Path, *, trust_pickle: bool = False) -> Source:
    """Open a file of weights, or a folder as hubs lay them out.

    Args:
        path: `.safetensors` (also by its index of shards), `.npz`, a pickle, a folder with one, or
            an address on the Hub.
        trust_pickle: read `.pth`, `.pt`, `.bin` at all; torch's `weights_only` reader does it.

    Raises:
        CheckpointError: no such file, not what it seems, damaged, or a pickle without trust.
    """
    path = fetch(str(path), trust_pickle=trust_pickle) if is_address(path) else Path(path)
    if path.is_dir():
        found = next((path / name for name in WHOLE if (path / name).is_file()), None)
        if found is None:
            raise CheckpointError(
                f"{path}: a folder without weights; expected one of {', '.join(WHOLE)} in it"
            )
        return open_source(found, trust_pickle=trust_pickle)
    check_file(path)
    documents = _documents(path.parent)
    if path.name.endswith(".index.json"):
        return _open_shards(path, documents, trust_pickle)
    if path.suffix in PICKLES:
        return _open_pickle(path, documents, trust_pickle)
    opener = {".safetensors": _open_safetensors, ".npz": _open_npz}.get(path.suffix)
    if opener is None:
        raise CheckpointError(
            f"{path}: the ending {path.suffix or '(none)'} is none of .safetensors, .npz, "
            f"{', '.join(PICKLES)}"
        )
    return opener(path, documents)


def check_file(path: Path) -> None:
    """Say what a file is that cannot be a checkpoint, before anything parses it."""
    try:
        there = path.exists()
    except PermissionError:
        raise CheckpointError(f"{path}: permission denied") from None
    if not there:
        raise CheckpointError(f"{path}: no such file; {nearest_parent(path)}")
    if not path.is_file():
        raise CheckpointError(f"{path}: not a file")
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
    if not start:
        raise CheckpointError(f"{path}: the file is empty (0 bytes)")
    for magic, what in IMPOSTORS.items():
        if start.lower().startswith(magic):
            raise CheckpointError(f"{path}: {what}")


def _documents(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for name, file in DOCUMENTS.items():
        place = folder / file
        if place.is_file():
            found[name] = read_json(place)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `CheckpointError` for anything else, or more than 64 MB of it."""
    if path.stat().st_size > 64_000_000:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes are too many for a description")
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return document


def _open_safetensors(path: Path, documents: dict[str, dict[str, Any]]) -> Source:
    files = ExitStack()
    try:
        file = files.enter_context(safe_open(path, framework="pt"))
        names = list(file.keys())
        views = {name: file.get_slice(name) for name in names}
        shapes = {name: tuple(view.get_shape()) for name, view in views.items()}
        dtypes = {name: str(view.get_dtype()) for name, view in views.items()}
    except (SafetensorError, OSError) as error:
        files.close()
        raise CheckpointError(f"{path}: not a whole safetensors file: {error}") from None

    header = Header(path, shapes, dtypes, dict(file.metadata() or {}), documents)
    return Source(header, {name: partial(file.get_tensor, name) for name in names}, files)


def _open_shards(path: Path, documents: dict[str, dict[str, Any]], trust: bool) -> Source:
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path}: expected a `weight_map` from tensor to file")
    files, readers = ExitStack(), {}
    shapes, dtypes = {}, {}
    shards: dict[str, Source] = {}
    for name in sorted({str(place) for place in places.values()}):
        if Path(name).name != name:
            raise CheckpointError(f"{path}: the shard {name!r} lies outside of the folder")
        shards[name] = files.enter_context(open_source(path.parent / name, trust_pickle=trust))
    for tensor, place in places.items():
        shard = shards[str(place)]
        if tensor not in shard:
            raise CheckpointError(f"{path}: {tensor} is not in {place}")
        shapes[tensor] = shard.header.shapes[tensor]
        dtypes[tensor] = shard.header.dtypes[tensor]
        readers[tensor] = shard._readers[tensor]
    return Source(Header(path, shapes, dtypes, {}, documents), readers, files)


def _open_npz(path: Path, documents: dict[str, dict[str, Any]]) -> Source:
    files = ExitStack()
    shapes, dtypes, readers = {}, {}, {}
    try:
        archive = files.enter_context(zipfile.ZipFile(path))
        members = archive.infolist()
        declared, size = sum(member.file_size for member in members), path.stat().st_size
        if declared > INFLATION * size + 16_000_000:
            raise CheckpointError(
                f"{path}: {size} bytes declare {declared} bytes of arrays; no weights shrink so far"
            )
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in shapes:
                raise CheckpointError(f"{path}: the array {name!r} is there twice")
            with archive.open(member) as file:
                shapes[name], dtypes[name] = _npy_header(path, name, file, member.file_size)
            readers[name] = _array_reader(archive, member)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        files.close()
        raise CheckpointError(f"{path}: not a whole .npz file: {error}") from None
    return Source(Header(path, shapes, dtypes, {}, documents), readers, files)


def _npy_header(path: Path, name: str, file: Any, size: int) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of a member, held against the bytes it declares."""
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise CheckpointError(f"{path}: {name} holds Python objects, not numbers")
    if (needed := int(np.prod(shape, dtype=object)) * dtype.itemsize) > size:
        raise CheckpointError(f"{path}: {name} declares {needed} bytes and has {size}")
    return tuple(int(side) for side in shape), dtype.str


def _array_reader(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Callable[[], Tensor]:
    def read() -> Tensor:
        with archive.open(member) as file:
            array = npy.read_array(file, allow_pickle=False)
        if array.dtype == np.dtype("V2"):  # bfloat16, which numpy has no name for
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(np.ascontiguousarray(array).reshape(array.shape))

    return read


def _open_pickle(path: Path, documents: dict[str, dict[str, Any]], trust: bool) -> Source:
    if not trust:
        raise CheckpointError(
            f"{path}: a pickle, which can run code when it is read; if you trust where it comes "
            f"from, say --trust-pickle (trust_pickle=True), else ask for a .safetensors file"
        )
    try:
        # DeiT's and timm's training checkpoints hold their settings as a Namespace, plain data.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path)
            )
    except Exception as error:  # noqa: BLE001 - whatever a hostile pickle makes torch raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next((line.strip() for line in lines if "Unsupported global" in line), lines[0])
        raise CheckpointError(f"{path}: torch's weights_only reader refuses: {reason}") from None
    tensors, notes = _unpacked(path, content)
    header = Header(
        path,
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
        {},
        documents,
        notes,
    )
    readers = {name: partial(tensors.__getitem__, name) for name in tensors}
    return Source(header, readers, ExitStack())


CONTAINERS = ("state_dict_ema", "model_ema", "ema", "state_dict", "model", "teacher", "student")
"""Entries of a training checkpoint that hold the weights, best first."""


def _unpacked(path: Path, content: object) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The dictionary of tensors inside a training checkpoint, and through what it was reached."""
    notes: list[str] = []
    while isinstance(content, dict):
        inner = next((n for n in CONTAINERS if isinstance(content.get(n), dict)), None)
        if inner is None:
            break
        notes.append(f"weights taken from the entry {inner!r}")
        content = content[inner]
    if not isinstance(content, dict) or not any(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"{path}: holds no dictionary of tensors; save a state_dict()")
    tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
    if others := [str(name) for name in content if str(name) not in tensors]:
        notes.append(f"no tensors, left out: {', '.join(others[:5])}")
    return tensors, tuple(notes)


def without_prefix(source: Source) -> Source:
    """Take off what data parallelism and compilation put before every name."""
    for prefix in ("module.", "_orig_mod.", "backbone."):
        names = list(source)
        if names and all(name.startswith(prefix) for name in names):
            note = f"prefix {prefix!r} taken off"
            return without_prefix(source.renamed({n: n.removeprefix(prefix) for n in names}, note))
    return source
