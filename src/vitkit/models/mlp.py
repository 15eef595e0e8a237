"""The MLP of an encoder block: two linear layers with a non-linearity between them (Sec. 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

from jaxtyping import Float
from torch import Tensor, nn

from vitkit.errors import SpecError, did_you_mean
from vitkit.spec import Activation


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
        if activation not in ACTIVATIONS:
            near = did_you_mean(activation, ACTIVATIONS)
            raise SpecError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}{near}")
        self.fc1 = nn.Linear(width, mlp_width)
        self.act = ACTIVATIONS[activation]()
        self.drop1 = nn.Dropout(dropout)
        self.fc2 = nn.Linear(mlp_width, width)
        self.drop2 = nn.Dropout(dropout)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        """MLP(x) of Eq. 3."""
        x = self.drop1(self.act(self.fc1(x)))
        return self.drop2(self.fc2(x))
