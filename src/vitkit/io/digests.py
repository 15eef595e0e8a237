"""SHA-256 digests of tensors, the same on every machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """A sha256 for each group of tensors: `blocks.3`, `patch_embed`, `head`, `cls_token`.

    Each is over its tensors in the order of their names: name, dtype, shape, bytes. So a flipped
    bit is found, with its place, and parts of two models are compared by their headers alone.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(tensors):
        parts = name.split(".")
        groups.setdefault(".".join(parts[: 2 if parts[0] == "blocks" else 1]), []).append(name)
    with ThreadPoolExecutor(2) as threads:  # hashing leaves the interpreter free
        found = threads.map(partial(_digest, tensors), groups.values())
    return dict(zip(groups, found, strict=True))


def _digest(tensors: Mapping[str, Tensor], names: Sequence[str]) -> str:
    sha256 = hashlib.sha256()
    for name in names:
        tensor = tensors[name].detach().cpu().contiguous()
        sha256.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.flatten().view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def fingerprint(tensors: Mapping[str, Tensor], without: Sequence[str] = ()) -> str:
    """Hash a model's tensors, name by name; groups such as `head` may be left out."""
    kept = {group: digest for group, digest in digests(tensors).items() if group not in without}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
