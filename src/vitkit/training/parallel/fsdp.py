"""Sharding a model that is too large for one device: every process holds a part of each weight.

Fully sharded data parallelism (FSDP2) turns parameters into `DTensor`s. The helpers for such
tensors, `full_tensor`, `local_tensor` and `distribute_like`, are in `vitkit.distributed`.
"""

from __future__ import annotations

import warnings

import torch
from torch import nn

from vitkit.distributed import ProcessGroup, full_tensor, is_sharded
from vitkit.models.vit import ViT


def shard(model: ViT, world: ProcessGroup, device: torch.device) -> None:
    """Shard every block, and the parameters outside of the blocks, over the processes, in place.

    "PyTorch FSDP" (arXiv 2304.11277): the weights of a block are gathered when it is computed and
    freed afterwards.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    assert world.group is not None, "a single process has no model to shard"
    mesh = DeviceMesh.from_group(world.group, device.type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # A distilled model is called through these two methods. The features that they return are
    # views, which no caller writes to.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    for method in ("forward_features", "forward_heads"):
        register_fsdp_forward_method(model, method)


def has_shards(model: nn.Module) -> bool:
    """Return whether this process holds only a part of the weights."""
    return any(is_sharded(parameter) for parameter in model.parameters())


def place_like(model: ViT, other: ViT, world: ProcessGroup, device: torch.device) -> ViT:
    """Move an unsharded model to the device, and shard it if another model is sharded.

    Args:
        model: with whole weights; changed in place, and returned.
        other: the model whose layout it gets.
        world: the processes of the run, all of which must call.
        device: device of this process.
    """
    if not has_shards(other):
        return model.to(device)
    shard(model, world, device)
    return model


def unsharded_model(model: ViT, world: ProcessGroup) -> ViT:
    """Gather a sharded model in the first process; every process must call.

    Returns:
        The model itself if it is not sharded. Otherwise a copy on the CPU in the first process, and
        the sharded model in the others: they only send their parts.
    """
    if not has_shards(model):
        return model
    gathered = {}
    for name, value in model.state_dict().items():
        tensor = full_tensor(value)
        if world.is_main:
            # Moved at once: the device may not hold all tensors unsharded.
            gathered[name] = tensor.cpu()
    if not world.is_main:
        return model
    with torch.device("meta"):
        copy = ViT(model.spec)
    copy.load_state_dict(gathered, assign=True)
    return copy.eval()
