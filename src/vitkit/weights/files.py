"""Open a local file or folder of weights: header first, tensors one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.io.results import Documents, read_json
from vitkit.messages import nearest_parent
from vitkit.weights.array_files import open_npz, open_safetensors
from vitkit.weights.pickles import PICKLE_ENDINGS, open_pickle
from vitkit.weights.tensor_file import Header, Source
from vitkit.weights.zip_checks import MAX_TENSORS

# Opening a local file or folder of weights: header first, tensors one by one.
#
# The one entry to files of weights. safetensors and `.npz` cannot run code; a pickle is opened only
# where the user trusts it, and then by torch's restricted reader alone.

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


def open_source(path: Path, *, trust_pickle: bool = False) -> Source:
    """Open a file of weights, or a folder as hubs lay them out.

    Args:
        path: `.safetensors` (also by its index of shards), `.npz`, a pickle, or a folder with one.
        trust_pickle: read `.pth`, `.pt`, `.bin` at all; torch's `weights_only` reader does it.

    Raises:
        CheckpointError: no such file, another kind of file, damaged, or a pickle without trust.
    """
    if _is_folder(path):
        path = _weights_of(path)
    _check_file(path)
    # Read only when a format asks for one: a broken document that no format needs is no error.
    documents = Documents(path.parent)
    if path.name.endswith(".index.json"):
        return _open_shards(path, documents, trust_pickle)
    return _open_file(path, documents, trust_pickle)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False  # such as a name that is too long; `_check_file` reports it


def _weights_of(folder: Path) -> Path:
    """Return the file of weights in a folder."""
    for name in WEIGHTS_FILES:
        if (folder / name).is_file():
            return folder / name
    last = folder / "weights" / "last.safetensors"
    if last.is_file():  # a run that was stopped in its first epoch
        raise CheckpointError(
            f"{folder}: no weights/best.safetensors, as no epoch of this run is complete; name "
            f"{last}"
        )
    raise CheckpointError(
        f"{folder} is not a run or checkpoint folder (no model.safetensors or "
        "weights/best.safetensors); name one, or a file of weights"
    )


def _check_file(path: Path) -> None:
    """Refuse a file that cannot be a checkpoint, before anything parses it."""
    try:
        exists = path.exists()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
    if not exists:
        raise CheckpointError(f"{path}: no such file; {nearest_parent(path)}")
    if not path.is_file():
        raise CheckpointError(f"{path}: not a file")
    try:
        with path.open("rb") as file:
            # Enough for the prefixes in `IMPOSTORS`, such as that of a Git LFS pointer.
            start = file.read(64)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from None
    if not start:
        raise CheckpointError(f"{path}: the file is empty (0 bytes)")
    for magic, message in IMPOSTORS.items():
        if start.lower().startswith(magic):
            raise CheckpointError(f"{path}: {message}")


def _open_file(path: Path, documents: Mapping[str, dict[str, Any]], trust: bool) -> Source:
    """Open one file that is complete in itself."""
    # By the ending: trying readers one after the other would run the pickle reader on anything.
    if path.name.endswith(PICKLE_ENDINGS):
        source = open_pickle(path, documents, trust)
    elif path.suffix == ".safetensors":
        source = open_safetensors(path, documents)
    elif path.suffix == ".npz":
        source = open_npz(path, documents)
    else:
        raise CheckpointError(
            f"{path}: ends in {path.suffix or 'nothing'}; expected .safetensors, .npz, "
            f"{', '.join(PICKLE_ENDINGS)}"
        )
    try:
        _check_header(source.header)
    except CheckpointError:
        source.__exit__()
        raise
    return source


def _check_header(header: Header) -> None:
    """Refuse too many tensors, and empty tensors with huge sides."""
    if len(header.shapes) > MAX_TENSORS:
        raise CheckpointError(
            f"{header.path}: {len(header.shapes)} tensors are too many; at most "
            f"{MAX_TENSORS} are read"
        )
    for name, shape in header.shapes.items():
        if 0 in shape and max(shape) > LONGEST_EMPTY:
            raise CheckpointError(
                f"{header.path}: {name} is empty, with a side of {max(shape)}; expected at most "
                f"{LONGEST_EMPTY}"
            )


def _open_shards(path: Path, documents: Mapping[str, dict[str, Any]], trust: bool) -> Source:
    """Open all files of a sharded checkpoint by its index, `{"weight_map": {tensor: file}}`."""
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: expected a `weight_map` from tensor names to files")
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    readers: dict[str, Callable[[], Tensor]] = {}
    shards: dict[str, Source] = {}
    with ExitStack() as files:
        # Each file is opened once, however many tensors the index finds in it.
        for file_name in sorted({str(value) for value in weight_map.values()}):
            file = path.parent / file_name
            # The index is untrusted: it may only name files of weights in its own folder.
            is_plain_name = Path(file_name).name == file_name
            if not is_plain_name or not file_name.endswith((".safetensors", *PICKLE_ENDINGS)):
                raise CheckpointError(
                    f"{path}: the shard {file_name!r} is not a weights file, or lies outside of "
                    "the folder"
                )
            _check_file(file)
            shards[file_name] = files.enter_context(_open_file(file, {}, trust))
        for tensor, file_name in weight_map.items():
            shard = shards[str(file_name)]
            if tensor not in shard:
                raise CheckpointError(f"{path}: {tensor} is not in {file_name}")
            shapes[tensor] = shard.header.shapes[tensor]
            dtypes[tensor] = shard.header.dtypes[tensor]
            readers[tensor] = shard.reader(tensor)
        return Source(Header(path, shapes, dtypes, {}, documents), readers, files.pop_all())
