"""The layers of a block besides attention: MLP, norms, drop path, LayerScale; and eval mode.

The lowest file of `models`: attention, encoder and embedding take these layers from here.
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
from vitkit.spec import Activation, MLPKind, Norm


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
assert set(ACTIVATIONS) == set(get_args(Activation)), "spec.Activation lists what layers.py builds"


class MLP(nn.Module):
    """fc2(act(fc1(x))), with dropout after each linear layer: (..., D) -> (..., D).

    Args:
        width: D.
        mlp_width: M, the hidden width.
        activation: a name of `ACTIVATIONS`.
        dropout: rate after both linear layers.

    Raises:
        SpecError: an activation that does not exist.
    """

    activations = ACTIVATIONS

    def __init__(
        self,
        width: int,
        mlp_width: int,
        *,
        activation: str = "gelu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.make_first(width, mlp_width)
        self.act = by_name("activation", activation, self.activations)()
        self.drop1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(mlp_width, width)
        self.drop2 = nn.Dropout(dropout)

    def make_first(self, width: int, mlp_width: int) -> None:
        self.fc1 = nn.Linear(width, mlp_width)

    def hidden(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch M"]:
        """Return the input of `fc2`."""
        return self.act(self.fc1(x))

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """Return MLP(x) of Eq. 3."""
        return self.drop2(self.fc2(self.drop1(self.hidden(x))))


class PackedSwiGLU(MLP):
    """fc2(silu(g) * v) with [g, v] = fc1(x), the gate first: DINOv2's `w12`; timm's keys.

    Arguments as for `MLP`; M is the width after the gate, and the activation must be `silu`.
    """

    activations = {"silu": nn.SiLU}  # noqa: RUF012

    def make_first(self, width: int, mlp_width: int) -> None:
        self.fc1 = nn.Linear(width, 2 * mlp_width)  # gate above value

    def hidden(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch M"]:
        gate, value = self.fc1(x).chunk(2, dim=-1)  # (..., M) each
        return self.act(gate) * value


class SplitSwiGLU(PackedSwiGLU):
    """The same with gate and value in separate matrices: timm's `fc1_g` and `fc1_x`."""

    def make_first(self, width: int, mlp_width: int) -> None:
        self.fc1_g = nn.Linear(width, mlp_width)
        self.fc1_x = nn.Linear(width, mlp_width)

    def hidden(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch M"]:
        return self.act(self.fc1_g(x)) * self.fc1_x(x)


MLPS = {"plain": MLP, "swiglu_packed": PackedSwiGLU, "swiglu_split": SplitSwiGLU}
assert set(MLPS) == set(get_args(MLPKind)), "spec.MLPKind lists what layers.py builds"


NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}
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
