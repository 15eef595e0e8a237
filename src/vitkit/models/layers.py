"""Small layers: norms and activations by the names of a spec, drop path, LayerScale; eval mode.

The lowest file of `models`: MLP, attention, encoder and readout take these layers from here.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitkit.errors import SpecError
from vitkit.messages import did_you_mean
from vitkit.spec import Activation, Norm


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), which OpenAI CLIP uses (Hendrycks and Gimpel, arXiv 1606.08415)."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1.702 * x).sigmoid()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,  # exact: x * (1 + erf(x / sqrt(2))) / 2
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}
NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
assert set(ACTIVATIONS) == set(get_args(Activation)), "spec.Activation lists what layers.py builds"
assert set(NORMS) == set(get_args(Norm)), "spec.Norm lists what layers.py builds"


def make_norm(name: str, width: int, eps: float, present: bool = True) -> nn.Module:
    """Create LayerNorm (arXiv 1607.06450) or RMSNorm (arXiv 1910.07467) over the last axis."""
    return by_name("norm", name, NORMS)(width, eps=eps) if present else nn.Identity()


class DropPath(nn.Module):
    """Stochastic depth (arXiv 1603.09382): in training, the branch of whole images is dropped.

    Those it keeps are scaled up by 1 / (1 - rate).
    """

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
        """Return 0 for an image with probability `rate`, else branch / (1 - rate)."""
        if self.rate == 0.0 or not self.training:
            return branch
        keep_rate = 1.0 - self.rate  # 0 at rate 1, where every image is dropped
        shape = (branch.shape[0],) + (1,) * (branch.ndim - 1)  # one draw for each image
        return branch * torch.bernoulli(branch.new_full(shape, keep_rate)).div_(keep_rate or 1.0)


class LayerScale(nn.Module):
    """gamma * x, one learned number per channel, small at first (CaiT, arXiv 2103.17239, Eq. 4)."""

    def __init__(self, width: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((width,), start))

    def forward(self, branch: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return branch * self.gamma


def by_name(kind: str, name: str, known: Mapping[str, Any]) -> Any:
    """Return the value of this name; raise `SpecError` with the nearest name if there is none."""
    if name not in known:
        near = did_you_mean(name, known)
        raise SpecError(f"{kind} {name!r} is none of {', '.join(known)}{near}")
    return known[name]


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode for a `with` block, then each module back in its own mode."""
    # Not the model's mode for all of them: parts that are frozen may be in eval mode.
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
