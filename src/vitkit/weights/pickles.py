"""Pickles of `torch.save`: read by torch's restricted reader, then reduced to plain tensors.

A pickle can run code when it is read, so none is opened without the user's trust, and even then
only by the `weights_only` reader.
"""

import argparse
import re
import tarfile
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitkit import errors, messages
from vitkit.io.untrusted import READ_ERRORS, checked_entries, refuse

PICKLE_ENDINGS = (".pth", ".pth.tar", ".pt", ".bin", ".ckpt", ".pkl")
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


SAFE_GLOBALS = (
    "argparse.Namespace",
    *(f"builtins.{name}" for name in ("dict", "float", "int", "list", "str", "tuple")),
    *(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")),
    "pathlib.PosixPath",
    "pathlib.PurePosixPath",
    "numpy.dtype",
    "numpy.ndarray",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    # numpy's type of Python objects is not among them
    *(f"numpy.dtypes.{name}" for name in np.dtypes.__all__ if name != "ObjectDType"),
    "numpy.random.mtrand.RandomState",
    "numpy.random._mt19937.MT19937",
    "numpy.random._pickle.__randomstate_ctor",
    "numpy.random._pickle.__bit_generator_ctor",
)
"""What a pickle may name beside torch's own: settings, paths, times and numbers, which run no
code. Such data lie beside the weights of training checkpoints."""
SAFE_ALIASES = {
    "collections.defaultdict": "vitkit.weights.pickles._without_default",
    "numpy.core.multiarray._reconstruct": "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar": "numpy._core.multiarray.scalar",
    "pathlib._local.PosixPath": "pathlib.PosixPath",
    "pathlib._local.PurePosixPath": "pathlib.PurePosixPath",
    "pathlib._local.WindowsPath": "pathlib.PureWindowsPath",
    "pathlib.WindowsPath": "pathlib.PureWindowsPath",
}
"""Name in the files of other versions and systems -> what stands for it."""


def _without_default(*factory: object) -> dict[Any, Any]:
    """Return a dictionary for the items of a `defaultdict`, which torch does not fill."""
    return {}


def read_pickle(
    path: Path, trust: bool
) -> tuple[dict[str, Tensor], tuple[str, ...], dict[str, Any]]:
    """Read the tensors of a pickle of `torch.save`, such as a `.pth` file.

    Args:
        path: the file.
        trust: True if the user trusts the file.

    Returns:
        The tensors, which may share memory with the file; notes on the way to them; the model that
        a training checkpoint names, with the keys of timm's `config.json`.

    Raises:
        CheckpointError: no trust, a file that the restricted reader refuses, or no plain tensors.
    """
    untrusted = (
        "is a pickle, and loading a pickle can run code; use a .safetensors file, or, if you trust "
        f"the source, {messages.TRUST}"
    )
    refuse(path, {untrusted: not trust})
    records = _record_sizes(path)
    names = dict(zip(SAFE_GLOBALS, SAFE_GLOBALS, strict=True)) | SAFE_ALIASES
    safe: list[Any] = [(resolve_name(name), written) for written, name in names.items()]
    try:
        with torch.serialization.safe_globals(safe), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            content = torch.load(
                path, map_location="cpu", weights_only=True, mmap=records is not None
            )
    except Exception as error:  # noqa: BLE001 - a hostile pickle makes torch raise anything
        raise errors.CheckpointError(
            f"{path}: torch refuses it with weights_only=True: {_refusal(error)}"
        ) from None
    # Before the tensors are unpacked: the name lies beside them, not among them.
    stated = _stated_model(content)
    tensors, notes = _unpacked(path, content, records)
    if stated:
        notes = (*notes, f"says that its model is {stated['architecture']}")
    return tensors, notes, stated


def _refusal(error: Exception) -> str:
    """Return one line with the reason of torch's error."""
    text = str(error).strip()
    match = re.search(r"Unsupported global: GLOBAL (\S+)", text)
    if match is not None:
        return f"it has a {match[1]}; save only tensors, with torch.save(model.state_dict(), ...)"
    # torch's advice stands before its reason
    reason = text.partition("WeightsUnpickler error:")[2].strip() or text or type(error).__name__
    return reason.splitlines()[0]


def _record_sizes(path: Path) -> set[int] | None:
    """Return the sizes of the records in `torch.save`'s archive; None for an older file."""
    # An archive since torch 1.6; before, pickles one after the other.
    try:
        if not zipfile.is_zipfile(path):
            # a format of 2016, which torch would unpack into a folder
            is_tar = tarfile.is_tarfile(path)
            refuse(path, {"a tar file; load it with torch, and save it again": is_tar})
            return None
        with zipfile.ZipFile(path) as archive:
            entries = checked_entries(path, archive)
    except READ_ERRORS as error:
        raise errors.CheckpointError(
            f"{path}: not a complete archive: {error}; download or save it again"
        ) from None
    # torch maps the file, so compressed records would be taken for their content.
    packed = {entry.compress_type for entry in entries} - {zipfile.ZIP_STORED}
    refuse(path, {"compressed, which archives of torch.save never are; save it again": packed})
    return {entry.file_size for entry in entries}


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
    arguments = {}
    if isinstance(keywords, Mapping):
        arguments = dict(keywords)
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


def _unpacked(
    path: Path, content: object, records: set[int] | None
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the dictionary of tensors inside a training checkpoint, and notes on the way there.

    Args:
        path: the file, for messages.
        content: the object that torch's restricted reader returned.
        records: the sizes of the file's records, from `_record_sizes`.

    Raises:
        CheckpointError: no dictionary of tensors, several of them, or tensors that are not plain.
    """
    notes: list[str] = []
    # Dictionaries may hold themselves.
    while isinstance(content, dict) and len(notes) < len(CONTAINERS):
        holding = [name for name, value in content.items() if _holds_tensors(value)]
        inner = next((name for name in CONTAINERS if _leads_to_tensors(content.get(name))), None)
        if inner is None:
            several = (
                f"several entries contain tensors ({messages.few(holding)}); save one of them alone"
            )
            refuse(path, {several: len(holding) > 1})
            if not holding or _holds_tensors(content):
                break
            inner = holding[0]
        notes.append(f"weights read from the entry {inner!r}")
        others = [name for name in holding if name != inner]
        if others:
            notes.append(f"other entries with tensors, left out: {messages.few(others)}")
        content = content[inner]
    tensors: dict[str, Tensor] = {}
    other_names: list[Any] = []
    for name, value in content.items() if isinstance(content, dict) else ():
        if isinstance(name, str) and isinstance(value, Tensor):
            tensors[name] = _plain(path, name, value, records)
        else:
            other_names.append(name)
    # Views of one small storage may claim to be gigabytes.
    claimed = sum(tensor.nbytes for tensor in tensors.values())
    problems = {
        "contains no dictionary of tensors; save a state_dict()": not tensors,
        "its tensors share too many numbers to be a model": (
            claimed > 2 * path.stat().st_size + 16_000_000
        ),
    }
    refuse(path, problems)
    if other_names:
        notes.append(f"entries without tensors, left out: {messages.few(other_names)}")
    return tensors, tuple(notes)


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
    is_plain = (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not tensor.is_nested
        and not tensor.is_quantized
        and tensor.layout == torch.strided
        and tensor.device.type == "cpu"
    )
    stored = tensor.untyped_storage().nbytes() if is_plain else 0
    shape = tuple(tensor.shape)[:8] if is_plain else ()
    problems = {
        f"{name} is no plain, dense tensor on the CPU; save it as one": not is_plain,
        f"{name} has the shape {shape}, but the file stores another number of values for it": (
            is_plain and (tensor.nbytes > stored or stored not in (records or {stored}))
        ),
    }
    refuse(path, problems)
    return tensor.detach()
