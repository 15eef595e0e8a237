"""An exponential moving average of the weights, which is evaluated and shared if it is on."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from vitkit.distributed import local_tensor
from vitkit.errors import CheckpointError
from vitkit.training.state.registry import Metadata, ModelPart, Tensors

Model = TypeVar("Model", bound=nn.Module)


class EMA(Generic[Model]):
    """theta' <- d theta' + (1 - d) theta after every step (Polyak and Juditsky, 1992).

    The decay warms up, d = min(decay, (1 + n) / (10 + n)) after n updates, so that the random
    initial weights are forgotten in short runs too. The updates are counted in the state of the
    average, so a resumed run continues with the same decay.

    Args:
        model: provides the initial average.
        decay: d, in [0, 1).
    """

    def __init__(self, model: Model, decay: float) -> None:
        # A separate model, which can be evaluated directly.
        self.model: Model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay
        self.updates = 0

    @torch.no_grad()
    def update(self, model: Model) -> None:
        """Add the weights of one more step to the average; buffers are copied."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        # Averaging is elementwise: each process averages its own part of a sharded weight.
        averages: list[Tensor] = [local_tensor(average) for average in self.model.parameters()]
        weights: list[Tensor] = [local_tensor(weight) for weight in model.parameters()]
        # theta' + (1 - d) (theta - theta'), for all weights in one call
        torch._foreach_lerp_(averages, weights, 1.0 - decay)
        for own, current in zip(self.model.buffers(), model.buffers(), strict=True):
            own.copy_(current)
        self.updates += 1

    # these three make the average a part of the run's state
    def tensors(self) -> Tensors:
        """Return the averages."""
        return ModelPart(self.model).tensors()

    def metadata(self) -> Metadata:
        """Return the decay and the number of updates."""
        return {"decay": self.decay, "updates": self.updates}

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Restore the average. Raises `CheckpointError` for another model or decay."""
        if metadata.keys() != {"decay", "updates"} or metadata["decay"] != self.decay:
            raise CheckpointError(
                f"ema: the state has {metadata}, this run has decay {self.decay}; resume with "
                "the run's own --model-ema-decay"
            )
        ModelPart(self.model).load(tensors, {})
        self.updates = int(metadata["updates"])
