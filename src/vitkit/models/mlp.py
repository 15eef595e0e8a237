"""The MLP of an encoder block: two linear layers with a non-linearity between them (Sec. 3.1).

Or a gated one, SwiGLU: "GLU Variants Improve Transformer" (arXiv 2002.05202), Eq. 6.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import get_args

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.errors import SpecError, did_you_mean
from vitkit.spec import Activation, MLPKind


class QuickGELU(nn.Module):
    """x * sigmoid(1.702 x), which OpenAI CLIP uses (Hendrycks and Gimpel, arXiv 1606.08415)."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, elementwise."""
        return x * (1.702 * x).sigmoid()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "quick_gelu": QuickGELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}
assert set(ACTIVATIONS) == set(get_args(Activation)), "spec.Activation lists what mlp.py builds"


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

    def __init__(
        self, width: int, mlp_width: int, *, activation: str = "gelu", dropout: float = 0.0
    ) -> None:
        super().__init__()
        _check(activation, ACTIVATIONS, "activation")
        self.fc1 = nn.Linear(width, mlp_width)
        self.act = ACTIVATIONS[activation]()
        self.drop1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(mlp_width, width)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """MLP(x) of Eq. 3."""
        x = self.drop1(self.act(self.fc1(x)))
        return self.drop2(self.fc2(x))


class PackedSwiGLU(nn.Module):
    """fc2(silu(g) * x) with [g, x] = fc1(z): (..., D) -> (..., D); timm's keys `fc1`, `fc2`.

    Args:
        width: D.
        mlp_width: M, the width after the gate; `fc1` gives 2 M numbers.
        dropout: rate after the gate and after `fc2`.
    """

    def __init__(self, width: int, mlp_width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 2 * mlp_width)
        self.drop1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(mlp_width, width)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """The gate comes first, as in DINOv2's `w12`."""
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.drop2(self.fc2(self.drop1(F.silu(gate) * value)))


class SplitSwiGLU(nn.Module):
    """The same with gate and value in matrices of their own: timm's `fc1_g`, `fc1_x`, `fc2`.

    Arguments as for `PackedSwiGLU`.
    """

    def __init__(self, width: int, mlp_width: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1_g = nn.Linear(width, mlp_width)
        self.fc1_x = nn.Linear(width, mlp_width)
        self.drop1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(mlp_width, width)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """fc2(silu(W_g x) * W_x x)."""
        return self.drop2(self.fc2(self.drop1(F.silu(self.fc1_g(x)) * self.fc1_x(x))))


def make_mlp(kind: str, width: int, mlp_width: int, activation: str, dropout: float) -> nn.Module:
    """The MLP of a block by its name in `ViTSpec.mlp`; a SwiGLU is always gated by silu."""
    if kind == "plain":
        return MLP(width, mlp_width, activation=activation, dropout=dropout)
    _check(kind, SWIGLUS, "mlp")
    return SWIGLUS[kind](width, mlp_width, dropout=dropout)


SWIGLUS: dict[str, type[PackedSwiGLU] | type[SplitSwiGLU]] = {
    "swiglu_packed": PackedSwiGLU,
    "swiglu_split": SplitSwiGLU,
}
assert {"plain", *SWIGLUS} == set(get_args(MLPKind)), "spec.MLPKind lists what mlp.py builds"


def _check(name: str, known: Iterable[str], what: str) -> None:
    names = list(known)
    if name not in names:
        near = did_you_mean(name, names)
        raise SpecError(f"{what} {name!r} is none of {', '.join(names)}{near}")
