"""SHA-256 digests of files and of tensors, the same on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BufferedReader, FileIO
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def file_sha256(file: Path | BufferedReader | FileIO) -> str:
    """Return the SHA-256 of a file, or of what is left of an open one, in 64 hex digits.

    Raises:
        OSError: it cannot be read.
    """
    if not isinstance(file, Path):
        return hashlib.file_digest(file, "sha256").hexdigest()
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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
    import torch  # here: a check of images needs digests of files, but no torch

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
