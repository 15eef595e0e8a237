"""A model too large for one device: every process holds a part of each weight (FSDP2).

Parameters become `DTensor`s. What leaves the process, or comes in, is whole: `whole` and `placed`
go from one to the other, and leave tensors that are not sharded as they are.
"""

from __future__ import annotations

import warnings
from typing import Any, cast

import torch
from torch import Tensor, nn

from vitkit.distributed import World
from vitkit.models.vit import ViT


def shard(model: ViT, world: World, device: torch.device) -> None:
    """Split every block, and what is outside of them, over the processes, in place.

    "PyTorch FSDP" (arXiv 2304.11277); a block is gathered when it is computed, and let go after.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    assert world.group is not None, "a single process has nothing to share"
    mesh = DeviceMesh.from_group(world.group, device.type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # A distilled model is called by these; its features are views, and nobody writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    for other in ("forward_features", "forward_heads"):
        register_fsdp_forward_method(model, other)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this process has only a part of it."""
    return hasattr(tensor, "device_mesh")


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor; every process must ask for it."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """The part that is here."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def placed(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor split as another one is."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = cast(Any, like).device_mesh, cast(Any, like).placements
    return distribute_tensor(tensor.to(like.device), mesh, placements, src_data_rank=None)


def has_shards(model: nn.Module) -> bool:
    """Whether this process has only a part of the weights."""
    return any(is_sharded(parameter) for parameter in model.parameters())


def placed_as(model: ViT, other: ViT, world: World, device: torch.device) -> ViT:
    """A model in one piece, on the device or split over the processes, as another one is."""
    if not has_shards(other):
        return model.to(device)
    shard(model, world, device)
    return model


def unsharded_model(model: ViT, world: World) -> ViT:
    """The model in one piece, which the first process gets; every process must ask for it.

    Returns:
        The model itself where it is whole; else, in the first process, a copy on the CPU, and in
        the others the model as it is: they give their parts and keep nothing.
    """
    if not has_shards(model):
        return model
    gathered = {}
    for name, value in model.state_dict().items():
        tensor = whole(value)
        if world.first:
            gathered[name] = tensor.cpu()
    if not world.first:
        return model
    with torch.device("meta"):
        copy = ViT(model.spec)
    copy.load_state_dict(gathered, assign=True)
    return copy.eval()
