"""An exponential moving average of the weights: what is evaluated and shared, where it is on."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.training.parallel.fsdp import local
from vitkit.training.state.registry import ModelPart, Tensors, Values


class EMA:
    """theta' <- d theta' + (1 - d) theta after every step (Polyak and Juditsky, 1992).

    The decay warms up, d = min(decay, (1 + n) / (10 + n)) after n updates, so that the first random
    weights are forgotten in short runs too. Counted in its own state: a resumed run goes on where
    the average was.

    Args:
        model: its weights are where the average starts.
        decay: d, in [0, 1).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.updates = decay, 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Take in the weights of one more step; buffers are copied."""
        keep = min(self.decay, (1 + self.updates) / (10 + self.updates))
        averages: list[Tensor] = [local(average) for average in self.model.parameters()]
        weights: list[Tensor] = [local(weight) for weight in model.parameters()]
        torch._foreach_lerp_(averages, weights, 1.0 - keep)
        for mine, theirs in zip(self.model.buffers(), model.buffers(), strict=True):
            mine.copy_(theirs)
        self.updates += 1

    def tensors(self) -> Tensors:
        """The averages."""
        return ModelPart(self.model).tensors()

    def values(self) -> Values:
        """The decay, and how many updates there were."""
        return {"decay": self.decay, "updates": self.updates}

    def restore(self, tensors: Tensors, values: Values) -> None:
        """Go on averaging; `CheckpointError` for an average of another model or decay."""
        if values.keys() != {"decay", "updates"} or values["decay"] != self.decay:
            raise CheckpointError(f"ema: stored with {values}, this run has decay {self.decay}")
        ModelPart(self.model).restore(tensors, {})
        self.updates = int(values["updates"])
