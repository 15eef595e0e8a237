"""Tensors that lie in parts on several processes, as safetensors files: each writes its own parts.

Written by torch's distributed checkpoints, whose safetensors writer says in the header where in the
whole tensor a part begins. It merges files, too, but would make every scalar zero (torch 2.13: its
merge returns early for an empty shape), so the parts stay as they are and are put together when
they are read. Scalars are the same everywhere and never come here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.io.atomic import output_error

OFFSETS = "DCP_SHARDING_INFO"
"""The header's entry with where each part begins."""


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write sharded tensors; every process must call. Raises `OutputError`."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:  # what each process has met; all of them know of all
        met = [failure for failure, _ in error.failures.values()]
        full = next((failure for failure in met if isinstance(failure, OSError)), None)
        if full is None:
            raise RuntimeError(f"{folder}: {met[0]}") from error
        raise output_error(folder, full, sum(t.nbytes for t in tensors.values())) from error


def read_shards(folder: Path) -> dict[str, Tensor]:
    """The whole tensors that the files of a folder have parts of; none if it is not there.

    Raises:
        CheckpointError: parts are missing.
    """
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            begins = json.loads(file.metadata()[OFFSETS])
            for name in file.keys():  # noqa: SIM118 - no mapping
                part = file.get_tensor(name)
                parts.setdefault(name, []).append((begins[name]["saved_offsets"], part))
    return {name: _together(f"{folder}: {name}", found) for name, found in parts.items()}


def _together(name: str, parts: list[tuple[list[int], Tensor]]) -> Tensor:
    shape = [
        max(begin[axis] + part.shape[axis] for begin, part in parts)
        for axis in range(parts[0][1].ndim)
    ]
    result = torch.empty(shape, dtype=parts[0][1].dtype)
    if sum(part.numel() for _, part in parts) != result.numel():
        raise CheckpointError(f"{name} of shape {tuple(shape)} is not covered by its parts")
    for begin, part in parts:
        place = [slice(b, b + size) for b, size in zip(begin, part.shape, strict=True)]
        result[tuple(place)] = part
    return result
