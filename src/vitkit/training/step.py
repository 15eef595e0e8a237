"""One optimizer step: forward, loss, backward, clip, update; with DDP and FSDP around the model.

Nothing here knows of epochs, logs or files. A step that meets a number that is not finite, or runs
out of memory, changes no weight. Several processes each take their part of the batch; before the
update one row of numbers from each decides the same for all.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_

from vitkit import devices, distributed, process, randomness, shapes
from vitkit.data.augmentation.pipeline import ModelInputs
from vitkit.data.loading.loader import Batch
from vitkit.models.vit import ViT
from vitkit.training.optimization.precision import LossScale, Precision, autocast

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

Transform = Callable[[Batch, int, int], ModelInputs]
"""(batch, step, part of the step) -> inputs of the objective."""


@dataclass(frozen=True)
class StepResult:
    """The result of a step.

    Attributes:
        loss: mean over the batch of all processes, in nats.
        norm: norm of the whole gradient, before clipping.
        bad: `loss` or `gradient norm` where that is not finite; the weights are as before.
        rank: the first process that met it; `None` where all did.
        signum: the signal that had reached any process before the update, or 0.
        overflow: the gradient went past float16's range; the weights are as before, and the loss
            scale is halved.
    """

    loss: float
    norm: float
    bad: str | None = None
    rank: int | None = None
    signum: int = 0
    overflow: bool = False


class Objective(nn.Module):
    """Model and loss in one module, so that a wrapper around it sees all that has a gradient.

    Args:
        model: gives logits (B, K).
        loss: loss of logits and targets, the mean over the batch.
        precision: precision of the model's matrix products; the loss is computed in float32.
        device: where the model is.
    """

    def __init__(
        self, model: nn.Module, loss: shapes.Loss, precision: Precision, device: torch.device
    ) -> None:
        super().__init__()
        self.model, self.loss = model, loss
        self.precision, self.device = precision, device

    def forward(self, fed: ModelInputs) -> Tensor:
        """Return the mean loss of a batch, a scalar in float32.

        Args:
            fed: normalised images (B, C, H, W), and class numbers (B,) or probabilities (B, K).
        """
        with autocast(self.precision, self.device):
            logits = self.model(fed.images)
        return self.label_loss(logits.float(), fed)

    def label_loss(self, logits: Tensor, fed: ModelInputs) -> Tensor:
        """Return the mean loss of logits (B, K) by the labels."""
        return self.loss(logits, fed.targets)


class TrainingStep:
    """The arithmetic of training: call it with a batch and the number of the step.

    Args:
        objective: the model, in training mode on its device, and its loss.
        optimizer: over the model's parameters, its rates already set.
        transform: (batch, step, part) -> what the objective is given.
        accumulate: micro-batches that a batch is split into; their gradients are summed.
        clip: largest norm of the gradient; `None` for no limit.
        seed: seed of the run; dropout is a function of it.
        compile: compile the objective; a model that is sharded or kept in step is compiled, too.
        world: the processes that share the batch; a model that is not sharded is kept the same in
            all of them.
        stop: set by a signal to this process.

    Attributes:
        scale: scale of the loss in float16, a part of the run's state; else `None`.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: optim.Optimizer,
        transform: Transform,
        *,
        accumulate: int = 1,
        clip: float | None = None,
        seed: int = 0,
        compile: bool = False,
        world: distributed.ProcessGroup | None = None,
        stop: process.StopFlag | None = None,
    ) -> None:
        self.objective, self.model = objective, objective.model
        self.optimizer, self.transform = optimizer, transform
        self.accumulate, self.clip, self.seed = accumulate, clip, seed
        self.world, self.stop = world or distributed.ProcessGroup(), stop or process.StopFlag()
        self.scale = LossScale() if objective.precision == "float16" else None
        if compile:
            # Sizes that vary (`progressive`) are compiled one by one: with sizes for variables,
            # torch's compiler fails at the interpolation of positions.
            objective.compile(dynamic=False)
        self._parallel = _data_parallel(self.objective, self.model, self.world)

    def __call__(self, batch: Batch, step: int) -> StepResult:
        """Make the step; where a number is not finite the weights stay as they are.

        Args:
            batch: this process's images of the step.
            step: counted from 0; mixing and dropout are functions of it.
        """
        total = torch.zeros((), device=self.objective.device)
        last = self.accumulate - 1
        for number, micro in enumerate(batch.parts(self.accumulate)):
            # its number among the parts of all processes, by which mixing and dropout are drawn
            part = self.world.rank + self.world.size * number
            self._seed(step, part)
            fed = self.transform(micro, step, part)
            # The processes exchange gradients once, with the last micro-batch.
            with _exchanging_gradients(self._parallel, self.model, self.world, number == last):
                # mean over the parts: each is a mean over equally many images
                loss = self._parallel(fed) / self.accumulate
                (loss if self.scale is None else loss * self.scale.scale).backward()
            # Stays on the device: reading it would wait for the backward pass.
            total += loss.detach()
        result = self._rescaled(self._agreed(float(total), float(self._clip())))
        if result.bad is None and not result.overflow:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return result

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate, 0 or more, of every parameter group; layer decay gives each its share."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)

    def _agreed(self, loss: float, norm: float) -> StepResult:
        """Combine losses, norms and signals of all processes to the same result in each."""
        # one exchange per step, of three numbers
        losses, norms, signals = zip(
            *self.world.all_gather((loss, norm, float(self.stop.signum or 0))), strict=True
        )
        loss, signum = sum(losses) / len(losses), int(max(signals))
        for what, numbers in (("loss", losses), ("gradient norm", norms)):
            bad = [rank for rank, number in enumerate(numbers) if not math.isfinite(number)]
            if bad:
                everywhere = len(bad) == len(numbers)
                return StepResult(loss, norm, what, None if everywhere else bad[0], signum)
        return StepResult(loss, norm, None, None, signum)

    def _rescaled(self, result: StepResult) -> StepResult:
        """Adjust the loss scale of float16; a gradient beyond its range becomes an overflow."""
        if self.scale is None or result.bad == "loss":
            return result
        if result.bad is None:
            self.scale.count_finite()
        elif self.scale.lower():
            return replace(result, bad=None, rank=None, overflow=True)
        return result

    def _clip(self) -> Tensor:
        """Clip the gradient; return its norm before."""
        if self.scale is not None:
            parameters = self.model.parameters()
            gradients = [distributed.local_tensor(p.grad) for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, 1 / self.scale.scale)
        # with an infinite limit the norm is measured and nothing is clipped
        most = self.clip or math.inf
        return distributed.full_tensor(clip_grad_norm_(self.model.parameters(), most))

    def _seed(self, step: int, part: int) -> None:
        """Seed torch: dropout is a function of (seed, step, part)."""
        # 63 bits, as torch's seeds are signed
        devices.seed_generators(
            (int(randomness.hash64(self.seed, step, randomness.Draw.DROPOUT)) >> 1) + part
        )


# Several processes with a whole model each: wrapped in DDP, which averages their gradients.


def _data_parallel(
    objective: nn.Module, model: nn.Module, world: distributed.ProcessGroup
) -> nn.Module:
    """Wrap the objective in DDP if several processes each hold the whole model."""
    if world.size == 1 or has_shards(model):
        return objective
    # Parameters without a gradient are searched for only if a head is unused. The memory layout
    # of a token's gradient does not matter.
    warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
    idle = isinstance(model, ViT) and model.spec.distilled_readout == "cls"
    return nn.parallel.DistributedDataParallel(
        objective,
        process_group=world.group,
        # gradients are views of the communication buckets, without memory of their own
        gradient_as_bucket_view=True,
        find_unused_parameters=idle,
    )


def _exchanging_gradients(
    wrapped: nn.Module, model: nn.Module, world: distributed.ProcessGroup, last: bool
) -> AbstractContextManager[None]:
    """Return the context of a micro-batch: gradients are exchanged only after the last one."""
    if isinstance(wrapped, nn.parallel.DistributedDataParallel):
        quiet: AbstractContextManager[None] = wrapped.no_sync()
        if last:
            return nullcontext()
        return quiet
    if world.size > 1:
        cast("FSDPModule", model).set_requires_gradient_sync(last)
    return nullcontext()


# Sharding a model that is too large for one device: every process holds a part of each weight.
#
# Fully sharded data parallelism (FSDP2) turns parameters into `DTensor`s. The helpers for such
# tensors, `full_tensor`, `local_tensor` and `distribute_like`, are in `vitkit.distributed`.


def shard(model: ViT, world: distributed.ProcessGroup, device: torch.device) -> None:
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
    return any(distributed.is_sharded(parameter) for parameter in model.parameters())


def place_like(
    model: ViT, other: ViT, world: distributed.ProcessGroup, device: torch.device
) -> ViT:
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


def unsharded_model(model: ViT, world: distributed.ProcessGroup) -> ViT:
    """Gather a sharded model in the first process; every process must call.

    Returns:
        The model itself if it is not sharded. Otherwise a copy on the CPU in the first process, and
        the sharded model in the others: they only send their parts.
    """
    if not has_shards(model):
        return model
    gathered = {}
    for name, value in model.state_dict().items():
        tensor = distributed.full_tensor(value)
        if world.is_main:
            # Moved at once: the device may not hold all tensors unsharded.
            gathered[name] = tensor.cpu()
    if not world.is_main:
        return model
    with torch.device("meta"):
        copy = ViT(model.spec)
    copy.load_state_dict(gathered, assign=True)
    return copy.eval()
