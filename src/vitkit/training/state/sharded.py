"""Sharded tensors as safetensors files: each process writes its own shards.

They are written by torch's distributed checkpoints, whose safetensors writer stores in the header
where in the full tensor a shard begins. torch can merge the files, too, but sets every scalar to
zero (torch 2.13: its merge returns early for an empty shape). Therefore the shards are put together
here when they are read. Scalars are the same in every process and are not written here.
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
"""Entry of the header with the offsets of each shard in its full tensor."""


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write sharded tensors; every process must call. Raises `OutputError`."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:
        # Every process gets the errors of all processes.
        for failure, _ in error.failures.values():
            if isinstance(failure, OSError):
                needed = sum(tensor.nbytes for tensor in tensors.values())
                raise output_error(folder, failure, needed) from error
        first, _ = next(iter(error.failures.values()))
        raise RuntimeError(f"{folder}: {first}") from error


def read_shards(folder: Path) -> dict[str, Tensor]:
    """Read the full tensors whose shards are in a folder; nothing if there is no such folder.

    Raises:
        CheckpointError: shards are missing.
    """
    shards: dict[str, list[tuple[list[int], Tensor]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            offsets = json.loads(file.metadata()[OFFSETS])
            for name in file.keys():  # noqa: SIM118 - it is not a mapping
                shard = file.get_tensor(name)
                shards.setdefault(name, []).append((offsets[name]["saved_offsets"], shard))
    return {name: _merge(f"{folder}: {name}", parts) for name, parts in shards.items()}


def _merge(name: str, shards: list[tuple[list[int], Tensor]]) -> Tensor:
    """Put the shards of one tensor together, each at its offsets."""
    # The shape is not stored: it is where the last shard ends along each axis.
    first = shards[0][1]
    shape = [0] * first.ndim
    for offsets, shard in shards:
        for axis, offset in enumerate(offsets):
            shape[axis] = max(shape[axis], offset + shard.shape[axis])
    full = torch.empty(shape, dtype=first.dtype)
    # Shards do not overlap, so their sizes add up to that of the full tensor.
    covered = 0
    for _, shard in shards:
        covered += shard.numel()
    if covered != full.numel():
        raise CheckpointError(f"{name} of shape {tuple(shape)} is not covered by its parts")
    for offsets, shard in shards:
        region = full
        for axis, offset in enumerate(offsets):
            region = region.narrow(axis, offset, shard.shape[axis])
        region.copy_(shard)
    return full
