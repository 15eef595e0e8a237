"""Pickles of `torch.save`: read by torch's restricted reader, then reduced to plain tensors.

A pickle can run code when it is read, so none is opened without the user's trust, and even then
only by the `weights_only` reader.
"""

from __future__ import annotations

import argparse
import re
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.weights.tensor_file import Header, Source
from vitkit.weights.zip_checks import READ_ERRORS, checked_entries

PICKLE_ENDINGS = (".pth", ".pth.tar", ".pt", ".bin", ".ckpt", ".pkl")
TRUST = (
    "add --trust-pickle (trust_pickle=True); for a command without that flag, convert it first: "
    "vitkit convert FILE OUT --to vitkit --trust-pickle"
)
"""The end of a message that refuses a pickle: how to trust it."""
CONTAINERS = (
    "state_dict_ema",
    "model_ema",
    "ema",
    "state_dict",
    "model_state_dict",
    "model_state",
    "model",
    "module",
    "net",
    "network",
    "weights",
    "params",
    "teacher",
    "student",
    "encoder",
)
"""Entries of a training checkpoint that hold the weights, best first."""


def open_pickle(path: Path, documents: Mapping[str, dict[str, Any]], trust: bool) -> Source:
    """Open a pickle of `torch.save`, such as a `.pth` file.

    Args:
        path: the file.
        documents: the JSON files beside it.
        trust: True if the user trusts the file.

    Raises:
        CheckpointError: no trust, a file that the restricted reader refuses, or no plain tensors.
    """
    if not trust:
        raise CheckpointError(
            f"{path}: is a pickle, and loading a pickle can run code; use a .safetensors file, "
            f"or, if you trust the source, {TRUST}"
        )
    records = _pickle_records(path)
    try:
        # DeiT's and timm's training checkpoints hold their settings as a Namespace, plain data.
        with torch.serialization.safe_globals([argparse.Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=records is not None
            )
    except Exception as error:  # noqa: BLE001 - a hostile pickle makes torch raise anything
        raise CheckpointError(
            f"{path}: torch refuses it with weights_only=True: {_refusal(error)}"
        ) from None
    # Before the tensors are unpacked: the name lies beside them, not among them.
    stated = _stated_model(content)
    tensors, notes = unpacked(path, content, records)
    if stated:
        notes = (*notes, f"says that its model is {stated['architecture']}")
    shapes: dict[str, tuple[int, ...]] = {}
    dtypes: dict[str, str] = {}
    readers: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in tensors.items():
        shapes[name] = tuple(tensor.shape)
        dtypes[name] = str(tensor.dtype).removeprefix("torch.")
        readers[name] = tensor.clone  # torch maps the file, which may change later
    header = Header(path, shapes, dtypes, {}, documents, notes, stated)
    return Source(header, readers, ExitStack())


def _refusal(error: Exception) -> str:
    """Return one line with the reason of torch's error."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    reason = next((line.strip() for line in lines if "Unsupported global" in line), lines[0])
    match = re.search(r"Unsupported global: GLOBAL (\S+)", reason)
    if match is None:
        return reason
    return f"it contains a {match[1]}; save only tensors, with torch.save(model.state_dict(), ...)"


def _pickle_records(path: Path) -> set[int] | None:
    """Return the sizes of the records in `torch.save`'s archive; None for an old, bare file."""
    with path.open("rb") as file:
        start = file.read(4)
    # Since torch 1.6 an archive; before, a pickle (0x80) or a tar file of several.
    if start != b"PK\x03\x04":
        if start[:1] != b"\x80" or tarfile.is_tarfile(path):
            raise CheckpointError(f"{path}: not a pickle or archive written by torch.save")
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            entries = checked_entries(path, archive)
    except READ_ERRORS as error:
        raise CheckpointError(
            f"{path}: not a complete archive: {error}; download or save it again"
        ) from None
    for entry in entries:
        # torch.jit.save writes this entry, torch.save does not.
        if entry.filename.endswith("/constants.pkl"):
            raise CheckpointError(f"{path}: a TorchScript program; save its state_dict() instead")
    sizes: set[int] = set()
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                f"{path}: compressed, which archives of torch.save never are; save it again"
            )
        sizes.add(entry.file_size)
    return sizes


def _stated_model(content: object) -> dict[str, Any]:
    """Return the model that a training checkpoint names, with the keys of timm's `config.json`."""
    if not isinstance(content, Mapping):
        return {}
    args = content.get("args")
    if isinstance(args, argparse.Namespace):
        args = vars(args)
    if not isinstance(args, Mapping):
        args = {}
    # timm writes the name twice; code that is built on it often keeps one of the two.
    for name in (content.get("arch"), args.get("model")):
        if isinstance(name, str) and re.fullmatch(r"[\w./-]{1,100}", name):
            break
    else:
        return {}
    keywords = args.get("model_kwargs")
    arguments = dict(keywords) if isinstance(keywords, Mapping) else {}
    size = args.get("img_size")
    if isinstance(size, int):
        arguments.setdefault("img_size", size)
    # "timm/vit_base_patch16_224.augreg" -> "vit_base_patch16_224"
    architecture = name.rpartition("/")[2].partition(".")[0]
    stated: dict[str, Any] = {"architecture": architecture, "model_args": arguments}
    pool = args.get("gp")
    if isinstance(pool, str):
        stated["global_pool"] = pool
    return stated


def unpacked(
    path: Path, content: object, records: set[int] | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the dictionary of tensors inside a training checkpoint, and notes on the way there.

    Args:
        path: the file, for messages.
        content: the object that torch's restricted reader returned.
        records: the sizes of the file's records, from `_pickle_records`.

    Raises:
        CheckpointError: no dictionary of tensors, several of them, or tensors that are not plain.
    """
    notes: list[str] = []
    while isinstance(content, dict):
        holding = [name for name, value in content.items() if _holds_tensors(value)]
        inner = _entry_with_weights(path, content, holding)
        if inner is None:
            break
        if len(notes) == len(CONTAINERS):
            raise CheckpointError(f"{path}: its entry {inner!r} is nested too deeply")
        notes.append(f"weights read from the entry {inner!r}")
        others = [name for name in holding if name != inner]
        if others:
            notes.append(f"other entries with tensors, left out: {_first_names(others)}")
        content = content[inner]
    if not isinstance(content, dict) or not any(isinstance(v, Tensor) for v in content.values()):
        raise CheckpointError(f"{path}: contains no dictionary of tensors; save a state_dict()")
    tensors: dict[str, Tensor] = {}
    other_names: list[Any] = []
    for name, value in content.items():
        if isinstance(name, str) and isinstance(value, Tensor):
            tensors[name] = _plain(path, name, value, records)
        else:
            other_names.append(name)
    # Views of one small storage may claim to be gigabytes.
    if sum(t.nbytes for t in tensors.values()) > 2 * path.stat().st_size + 16_000_000:
        raise CheckpointError(f"{path}: its tensors share too many numbers to be a model")
    if other_names:
        shown = _first_names([name for name in other_names[:5] if isinstance(name, str)])
        notes.append(f"entries without tensors, left out: {shown or len(other_names)}")
    return tensors, tuple(notes)


def _entry_with_weights(path: Path, content: dict[Any, Any], holding: list[Any]) -> Any:
    """Return the entry to unpack next, or None where the tensors are in `content` itself."""
    for name in CONTAINERS:
        if _leads_to_tensors(content.get(name)):
            return name
    if len(holding) == 1 and not _holds_tensors(content):
        return holding[0]
    if len(holding) > 1:
        raise CheckpointError(
            f"{path}: several entries contain tensors ({_first_names(holding)}); save one of "
            "them alone"
        )
    return None


def _first_names(names: list[Any]) -> str:
    return ", ".join(str(name)[:50] for name in names[:5])


def _holds_tensors(value: object) -> bool:
    """True for a dictionary with tensors other than scalars such as `{"decay": tensor(0.99)}`."""
    if not isinstance(value, dict):
        return False
    return any(isinstance(part, Tensor) and part.dim() > 0 for part in value.values())


def _leads_to_tensors(value: object, levels: int = 3) -> bool:
    """True if it holds tensors, directly or in entries of `CONTAINERS`; settings do not."""
    if not isinstance(value, dict) or not levels or _holds_tensors(value):
        return isinstance(value, dict)
    return any(_leads_to_tensors(value.get(name), levels - 1) for name in CONTAINERS)


def _plain(path: Path, name: str, tensor: Tensor, records: set[int] | None) -> Tensor:
    """Return the tensor without gradient and hooks, if the file contains all its values."""
    if tensor.is_nested:  # a nested tensor has no shape
        raise CheckpointError(f"{path}: {name} is a nested tensor; save it as a plain one")
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_quantized:
        raise CheckpointError(
            f"{path}: {name} is a {type(tensor).__name__}; save it as a plain tensor"
        )
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        kind = f"{tensor.layout} on {tensor.device}"
        raise CheckpointError(f"{path}: {name} is {kind}; save it as a dense tensor on the CPU")
    stored = tensor.untyped_storage().nbytes()
    if tensor.nbytes > stored or (records is not None and stored not in records):
        raise CheckpointError(
            f"{path}: {name} has the shape {tuple(tensor.shape)[:8]}, but the file stores "
            "another number of values for it"
        )
    return tensor.detach()
