"""One optimizer step: forward, loss, backward, clip, update, over one or more micro-batches.

Nothing here knows of epochs, logs or files. A step that meets a number that is not finite, or runs
out of memory, changes no weight. Several processes each take their part of the batch; before the
update one row of numbers from each decides the same for all.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

from vitkit.data.loader import Batch
from vitkit.data.randomness import hash64
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess
from vitkit.training.config import TrainConfig
from vitkit.training.distributed import World
from vitkit.training.precision import Precision, autocast
from vitkit.training.sharding import is_sharded, whole
from vitkit.training.signals import StopFlag

DROPOUT = 0x0D09
"""What the generator of a step is for, among the things drawn from the seed."""


@dataclass(frozen=True)
class Outcome:
    """What a step came to.

    Attributes:
        loss: mean over the batch of all processes, in nats.
        norm: of the whole gradient, before clipping.
        bad: `loss` or `gradient norm` where that is not finite; the weights are as before.
        rank: the first process that met it; `None` where all did.
        signum: the signal that had reached any process before the update, or 0.
    """

    loss: float
    norm: float
    bad: str | None = None
    rank: int | None = None
    signum: int = 0


class Objective(nn.Module):
    """Model and loss in one module, so that a wrapper around it sees all that has a gradient."""

    def __init__(
        self,
        model: nn.Module,
        preprocess: Preprocess,
        precision: Precision,
        device: torch.device,
        smoothing: float,
    ) -> None:
        super().__init__()
        self.model, self.preprocess, self.device = model, preprocess, device
        self.precision, self.smoothing = precision, smoothing

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """The mean loss of pictures (B, H, W, C) uint8 with class numbers (B,)."""
        batch = Batch(pixels, labels, labels, 0)
        images = batch.images(self.preprocess, self.device)
        with autocast(self.precision, self.device):
            logits = self.model(images)
        labels = labels.to(self.device)
        return F.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing)


class TrainingStep:
    """The arithmetic of training: call it with a batch and the number of the step.

    Args:
        model: in training mode, on `device`.
        optimizer: over its parameters, its rates already set.
        config: batch, accumulation, clipping, smoothing, seed.
        preprocess: how pixels become numbers.
        precision: `off` or `bfloat16`.
        device: where the model is.
        world: the processes that share the batch; a model that is not sharded is kept the same in
            all of them.
        stop: raised by a signal to this process.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        config: TrainConfig,
        preprocess: Preprocess,
        precision: Precision,
        device: torch.device,
        world: World | None = None,
        stop: StopFlag | None = None,
    ) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config
        self.world, self.stop, self.device = world or World(), stop or StopFlag(), device
        self.loss = Objective(model, preprocess, precision, device, config.label_smoothing)
        self._parallel = self._wrapped()

    def __call__(self, batch: Batch, step: int) -> Outcome:
        """Make the step, unless a number is not finite."""
        total = torch.zeros((), device=self.device)
        last = self.config.grad_accum_steps - 1
        for number, (pixels, labels) in enumerate(self._parts(batch)):
            self._seed(step, number)
            share = len(labels) / len(batch.labels)
            with self._gathering_gradients(number == last):
                part = self._parallel(pixels, labels) * share
                part.backward()
            total += part.detach()
        loss = float(total)
        norm = float(self._clip())
        made = self._agreed(loss, norm)
        if made.bad is None:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return made

    def _agreed(self, loss: float, norm: float) -> Outcome:
        """The same outcome in every process, from what each has met."""
        losses, norms, signals = zip(
            *self.world.gathered((loss, norm, float(self.stop.signum or 0))), strict=True
        )
        loss, signum = sum(losses) / len(losses), int(max(signals))
        for what, numbers in (("loss", losses), ("gradient norm", norms)):
            bad = [rank for rank, number in enumerate(numbers) if not math.isfinite(number)]
            if bad:
                everywhere = len(bad) == len(numbers)
                return Outcome(loss, norm, what, None if everywhere else bad[0], signum)
        return Outcome(loss, norm, None, None, signum)

    def _clip(self) -> Tensor:
        """Bring the gradient to its largest norm; the norm it had."""
        most = self.config.clip_grad or math.inf
        return whole(clip_grad_norm_(self.model.parameters(), most))

    def _wrapped(self) -> nn.Module:
        if self.world.size == 1 or any(is_sharded(p) for p in self.model.parameters()):
            return self.loss
        # A head that is not read gets no gradient, and is looked for only where there is one. The
        # layout of the gradient of a token is of no weight.
        warnings.filterwarnings("ignore", message="Grad strides do not match bucket view")
        idle = isinstance(self.model, ViT) and self.model.spec.distilled_readout == "cls"
        return nn.parallel.DistributedDataParallel(
            self.loss,
            process_group=self.world.group,
            gradient_as_bucket_view=True,
            find_unused_parameters=idle,
        )

    def _gathering_gradients(self, last: bool) -> AbstractContextManager[None]:
        """Gradients travel once a step, after the last micro-batch."""
        if isinstance(self._parallel, nn.parallel.DistributedDataParallel):
            quiet: AbstractContextManager[None] = self._parallel.no_sync()
            return nullcontext() if last else quiet
        if self.world.size > 1:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        return nullcontext()

    def largest_that_fits(self, batch: Batch) -> int:
        """How many pictures of a batch fit into memory at once, found by halving; 0 for not one."""
        if any(is_sharded(p) for p in self.model.parameters()):
            return 0  # no process can try it without the others
        count = len(batch.labels) // self.config.grad_accum_steps
        weights = [p for p in self.model.parameters() if p.requires_grad]
        while count := count // 2:
            self.optimizer.zero_grad(set_to_none=True)
            try:
                loss = self.loss(batch.pixels[:count], batch.labels[:count])
                torch.autograd.grad(loss, weights, allow_unused=True)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                continue
            return count
        return 0

    def _parts(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
        """The micro-batches, in order."""
        count = self.config.grad_accum_steps
        yield from zip(batch.pixels.chunk(count), batch.labels.chunk(count), strict=True)

    def _seed(self, step: int, number: int) -> None:
        """Dropout is a function of (seed, step, micro-batch), counted over all processes."""
        number += self.world.rank * self.config.grad_accum_steps
        torch.manual_seed((int(hash64(self.config.seed, step, DROPOUT)) >> 1) + number)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out; torch's CPU allocator raises a `RuntimeError`."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and "allocate memory" in str(error)
    )
