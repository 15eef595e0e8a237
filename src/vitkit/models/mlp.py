"""The MLP of an encoder block: two linear layers with a non-linearity between them (Sec. 3.1).

Or a gated one, SwiGLU: "GLU Variants Improve Transformer" (arXiv 2002.05202), Eq. 6.
"""

from typing import get_args

from jaxtyping import Float
from torch import Tensor, nn

from vitkit.models.layers import ACTIVATIONS, by_name
from vitkit.spec import MLPKind


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
assert set(MLPS) == set(get_args(MLPKind)), "spec.MLPKind lists what mlp.py builds"
