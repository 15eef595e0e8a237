"""Opening a file of weights: what it says without its numbers, and its tensors one by one.

The one place where files of weights are opened. safetensors and `.npz` cannot run code; a pickle is
opened only where the user says that it is trusted, and then by torch's restricted reader alone.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from vitkit.errors import CheckpointError, nearest_parent
from vitkit.io.strict_json import Documents, parse, read_json
from vitkit.weights.catalogue import TRUST
from vitkit.weights.fetch import fetch, is_address
from vitkit.weights.files.pickles import unpacked
from vitkit.weights.files.zip_checks import (
    DAMAGE,
    MOST,
    array_header,
    array_reader,
    bytes_reader,
    entries,
    pickle_records,
    stated_model,
)

PICKLES = (".pth", ".pth.tar", ".pt", ".bin", ".ckpt", ".pkl")
IMPOSTORS = {
    b"version https://git-lfs": "a git-LFS pointer, not the file itself; run `git lfs pull`",
    b"<!doctype": "a web page saved as weights; download the file itself",
    b"<html": "a web page saved as weights; download the file itself",
}
WHOLE = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
         "pytorch_model.bin.index.json", "model.npz", "weights/best.safetensors")  # fmt: skip
"""What a folder's weights may be called, in the order in which transformers looks for them."""
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LONGEST_HEADER = 25_000_000
"""Bytes of a safetensors header; the library allows 100 MB, parsed into ten times as much."""
LONGEST_EMPTY = 65_536
"""Longest side of an empty tensor, which takes no bytes: its sides cost nothing to lie about."""


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
        stated: what a training checkpoint says of its model, as in timm's `config.json`.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    metadata: dict[str, str] = field(default_factory=dict)
    documents: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stated: Mapping[str, Any] = field(default_factory=dict)


class Source(Mapping[str, Tensor]):
    """The tensors of an open file by name, each read when it is asked for; a context manager.

    Each tensor has memory of its own: what happens to the file later does not reach it.
    """

    def __init__(
        self, header: Header, readers: Mapping[str, Callable[[], Tensor]], files: ExitStack
    ) -> None:
        self.header, self._readers, self._files = header, readers, files

    def __getitem__(self, name: str) -> Tensor:
        """The tensor, if it holds weights.

        Raises:
            CheckpointError: damaged, no floating-point numbers, or one that is not finite.
        """
        read = self._readers[name]
        try:
            return _weights(name, read())
        except CheckpointError as error:
            raise CheckpointError(f"{self.header.path}: {error}") from None
        except DAMAGE as error:
            raise CheckpointError(f"{self.header.path}: {name}: cannot be read: {error}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._readers  # a mapping's own would read the tensor to know

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
        header = replace(
            old,
            shapes={new: old.shapes[name] for name, new in names.items()},
            dtypes={new: old.dtypes[name] for name, new in names.items()},
            notes=(*old.notes, *notes),
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
    if not str(path):
        raise CheckpointError(
            "the name of the weights is empty; give a file, a folder or an address"
        )
    path = fetch(str(path), trust_pickle=trust_pickle) if is_address(path) else Path(path)
    if _is_folder(path):
        found = next((path / name for name in WHOLE if (path / name).is_file()), None)
        if found is None:
            raise CheckpointError(
                f"{path}: expected one of {', '.join(WHOLE)} in it; or name a file, such as the "
                f"weights/last.safetensors of a run that ended before its first epoch did"
            )
        path = found
    check_file(path)
    documents = Documents(path.parent)
    if path.name.endswith(".index.json"):
        return _open_shards(path, documents, trust_pickle)
    return _open_file(path, documents, trust_pickle)


def _open_file(path: Path, documents: Mapping[str, dict[str, Any]], trust: bool) -> Source:
    """One file that is whole in itself."""
    if path.name.endswith(PICKLES):
        opened = _open_pickle(path, documents, trust)
    elif path.suffix == ".safetensors":
        opened = _open_safetensors(path, documents)
    elif path.suffix == ".npz":
        opened = _open_npz(path, documents)
    else:
        raise CheckpointError(
            f"{path}: the ending {path.suffix or '(none)'} is none of .safetensors, .npz, "
            f"{', '.join(PICKLES)}"
        )
    try:
        _check_header(opened.header)
    except CheckpointError:
        opened.__exit__()
        raise
    return opened


def _check_header(header: Header) -> None:
    """No more tensors than any model has, and none whose sides cost nothing to declare."""
    if len(header.shapes) > MOST:
        raise CheckpointError(
            f"{header.path}: {len(header.shapes)} tensors are too many; {MOST} are the most"
        )
    for name, shape in header.shapes.items():
        if 0 in shape and max(shape) > LONGEST_EMPTY:
            raise CheckpointError(
                f"{header.path}: {name} is empty and {max(shape)} long; expected at most "
                f"{LONGEST_EMPTY}"
            )


def _weights(name: str, tensor: Tensor) -> Tensor:
    """The tensor, if it holds numbers that a model can compute with."""
    if tensor.dtype not in FLOATS:
        kind = str(tensor.dtype).removeprefix("torch.")
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise CheckpointError(f"{name}: {kind} numbers are no weights; expected {known}")
    if not torch.isfinite(tensor.sum(dtype=torch.float32)):  # sums never lose a NaN or infinity
        wrong = int((~torch.isfinite(tensor.float())).sum())
        if wrong:
            raise CheckpointError(
                f"{name}: {wrong} of {tensor.numel()} numbers are not finite; take a checkpoint "
                f"from before its training failed"
            )
    return tensor


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False


def check_file(path: Path) -> None:
    """Say what a file is that cannot be a checkpoint, before anything parses it."""
    try:
        there = path.exists()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
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


def _open_safetensors(path: Path, documents: Mapping[str, dict[str, Any]]) -> Source:
    with ExitStack() as opened:
        # One opening for all of it: a run may put a new file in its place at any moment.
        file = opened.enter_context(path.open("rb"))
        length = _header_length(path, file)
        try:
            said = parse(file.read(length))
            if len(said) > MOST + 1:
                raise ValueError(f"{len(said)} tensors are too many; {MOST} are the most")
            with safe_open(path, framework="pt"):
                pass  # it checks the whole header
        except DAMAGE as error:
            raise CheckpointError(
                f"{path}: not a whole safetensors file: {error}; get it again"
            ) from None
        files = opened.pop_all()
    metadata = said.pop("__metadata__", None) or {}
    shapes = {name: tuple(entry["shape"]) for name, entry in said.items()}
    dtypes = {name: entry["dtype"] for name, entry in said.items()}
    header = Header(path, shapes, dtypes, metadata, documents)
    readers = {
        name: bytes_reader(file, 8 + length + entry["data_offsets"][0], entry["dtype"],
                           shapes[name])
        for name, entry in said.items()
    }  # fmt: skip
    return Source(header, readers, files)


def _header_length(path: Path, file: io.BufferedReader) -> int:
    """Read the length of the header, and go to where it begins.

    Raises:
        CheckpointError: the file does not begin with such a length and `{`, or is too short.
    """
    start, size = file.read(9), os.fstat(file.fileno()).st_size
    file.seek(8)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 9 or start[8:] != b"{":
        raise CheckpointError(f"{path}: not a safetensors file; get it again")
    if length > LONGEST_HEADER:
        raise CheckpointError(
            f"{path}: not a safetensors file that vitkit reads: a header of {length} bytes; "
            f"{LONGEST_HEADER} are the most"
        )
    if length > size - 8:
        raise CheckpointError(
            f"{path}: not a whole safetensors file: a header of {length} bytes in a file of "
            f"{size}; get it again"
        )
    return length


def _open_shards(path: Path, documents: Mapping[str, dict[str, Any]], trust: bool) -> Source:
    places = read_json(path).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{path}: expected a `weight_map` from tensor to file")
    shapes, dtypes, readers = {}, {}, {}
    shards: dict[str, Source] = {}
    with ExitStack() as files:
        for name in sorted({str(place) for place in places.values()}):
            if Path(name).name != name or not name.endswith((".safetensors", *PICKLES)):
                raise CheckpointError(
                    f"{path}: the shard {name!r} is no file of weights, or lies outside of the "
                    f"folder"
                )
            check_file(path.parent / name)
            shards[name] = files.enter_context(_open_file(path.parent / name, {}, trust))
        for tensor, place in places.items():
            shard = shards[str(place)]
            if tensor not in shard:
                raise CheckpointError(f"{path}: {tensor} is not in {place}")
            shapes[tensor] = shard.header.shapes[tensor]
            dtypes[tensor] = shard.header.dtypes[tensor]
            readers[tensor] = shard._readers[tensor]
        return Source(Header(path, shapes, dtypes, {}, documents), readers, files.pop_all())


def _open_npz(path: Path, documents: Mapping[str, dict[str, Any]]) -> Source:
    shapes, dtypes, readers = {}, {}, {}
    try:
        with ExitStack() as files:
            archive = files.enter_context(zipfile.ZipFile(path))
            for entry in entries(path, archive):
                name = entry.filename.removesuffix(".npy")
                with archive.open(entry) as file:
                    shapes[name], dtypes[name] = array_header(
                        f"{path}: {name}", file, entry.file_size
                    )
                readers[name] = array_reader(archive, entry)
            return Source(Header(path, shapes, dtypes, {}, documents), readers, files.pop_all())
    except DAMAGE as error:
        raise CheckpointError(f"{path}: not a whole .npz file: {error}") from None


def _open_pickle(path: Path, documents: Mapping[str, dict[str, Any]], trust: bool) -> Source:
    if not trust:
        raise CheckpointError(
            f"{path}: a pickle, which can run code when it is read; ask for a .safetensors file, "
            f"or, if you trust where it comes from, {TRUST}"
        )
    records = pickle_records(path)
    try:
        # DeiT's and timm's training checkpoints hold their settings as a Namespace, plain data.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=records is not None
            )
    except Exception as error:  # noqa: BLE001 - whatever a hostile pickle makes torch raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next((line.strip() for line in lines if "Unsupported global" in line), lines[0])
        if found := re.search(r"Unsupported global: GLOBAL (\S+)", reason):
            reason = (
                f"it holds a {found[1]}; torch.save(model.state_dict(), ...) writes tensors alone"
            )
        raise CheckpointError(f"{path}: torch's weights_only reader refuses: {reason}") from None
    stated = stated_model(content)
    tensors, notes = unpacked(path, content, records)
    header = Header(
        path,
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()},
        {},
        documents,
        (*notes, f"says that its model is {stated['architecture']}") if stated else notes,
        stated,
    )
    readers = {name: tensor.clone for name, tensor in tensors.items()}  # the file is mapped
    return Source(header, readers, ExitStack())
