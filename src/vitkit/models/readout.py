"""From the last tokens to one vector: Eq. 4 of "An Image is Worth 16x16 Words", y = LN(z_L^0)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitkit.errors import SettingError
from vitkit.models.attention import PLAIN, Context, CrossAttention
from vitkit.models.layers import make_norm
from vitkit.models.mlp import MLP
from vitkit.models.record import Record
from vitkit.shapes import Grid, Pooled, Tokens
from vitkit.spec import Pooling, ViTSpec


@dataclass(frozen=True)
class Features:
    """The tokens of a batch after the encoder and its last norm (if that precedes pooling).

    Attributes:
        cls: the class token (B, D), or `None` where the model has none.
        distillation: the distillation token (B, D), or `None`.
        registers: register tokens (B, R, D), or `None`.
        patches: patch tokens (B, N, D), row by row; fewer while `patch_dropout` trains.
        grid: (gh, gw), with N = gh * gw.
    """

    cls: Pooled | None
    distillation: Pooled | None
    registers: Float[Tensor, "B R D"] | None
    patches: Float[Tensor, "B N D"]
    grid: Grid

    @classmethod
    def split(cls, tokens: Tokens, grid: Grid, spec: ViTSpec) -> Features:
        """Take the normed tokens (B, T, D) of a model apart: class, distillation, registers."""
        registers = tokens[:, spec.num_prefix_tokens - spec.num_registers : spec.num_prefix_tokens]
        return cls(
            cls=tokens[:, 0] if spec.class_token else None,
            distillation=tokens[:, 1] if spec.distillation_token else None,  # after the class token
            registers=registers if spec.num_registers else None,
            patches=tokens[:, spec.num_prefix_tokens :],
            grid=grid,
        )

    def all_tokens(self) -> Tokens:
        """Return the tokens (B, T, D) as they were before `split`."""
        single = [t.unsqueeze(1) for t in (self.cls, self.distillation) if t is not None]
        registers = [] if self.registers is None else [self.registers]
        return torch.cat([*single, *registers, self.patches], dim=1)


POOLINGS: dict[str, Callable[[Any], Tensor]] = {
    "cls": lambda features: features.cls,
    "distillation": lambda features: features.distillation,
    "mean": lambda features: features.patches.mean(dim=1),
    "mean_all": lambda features: features.all_tokens().mean(dim=1),
    "cls_mean": lambda features: torch.cat([features.cls, features.patches.mean(dim=1)], dim=1),
}
assert {*POOLINGS, "map"} == {*get_args(Pooling), "distillation"}, "spec.Pooling lists these"


class Readout(nn.Module):
    """Eq. 4: y = LN(z_L)^0, the normed class token; or another summary of the normed tokens.

    Args:
        pooling: `cls`, `mean` (of the patches: big_vision's `gap`, arXiv 2205.01580), `mean_all`,
            `cls_mean` (both side by side, as DINOv2's linear probes) or `distillation`.
    """

    def __init__(self, pooling: str = "cls") -> None:
        super().__init__()
        self.pooling = pooling

    def forward(self, features: Features, record: Record | None = None) -> Float[Tensor, "B E"]:
        """Return y (B, D), or (B, 2 D) for `cls_mean`.

        Raises `SettingError` for a record of a MAP head's map.
        """
        if record is not None and record.attend_pool() and self.pooling != "distillation":
            raise SettingError(
                f"pooling cannot be recorded: this model's is {self.pooling!r}, and only a MAP "
                "head (pooling='map') has attention maps of its pooling"
            )
        return POOLINGS[self.pooling](features)


class AttentionPool(CrossAttention):
    """MAP: one learned query attends to the patches, then an MLP with a residual (SigLIP's head).

    Set Transformer (arXiv 1810.00825), Sec. 3.2, as in big_vision; keys as timm's `attn_pool`.
    Heads, MLP width and norm are the encoder's, the activation too but for a SwiGLU's.
    """

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__(spec.width, spec.num_heads, head_width=spec.head_width)
        self.latent = nn.Parameter(torch.zeros(1, 1, spec.width))
        self.norm = make_norm(spec.norm, spec.width, spec.norm_eps)
        activation = "gelu" if spec.mlp != "plain" else spec.activation
        self.mlp = MLP(spec.width, spec.mlp_width, activation=activation)

    def forward(  # type: ignore[override]
        self, features: Features, record: Record | None = None
    ) -> Pooled:
        """Return y (B, D)."""
        query = self.latent.expand(features.patches.shape[0], -1, -1)  # B 1 D
        context = PLAIN if record is None else Context(attend=record.attend_pool())
        pooled = super().forward(query, features.patches, context)[:, 0]  # B 1 D -> B D
        return pooled + self.mlp(self.norm(pooled))


class Representation(nn.Module):
    """tanh(W y + b) before the head: the paper's MLP head of pre-training (Sec. 3.1)."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(inputs, width)

    def forward(self, y: Float[Tensor, "B E"]) -> Float[Tensor, "B F"]:
        """Map (B, E) -> (B, F) in (-1, 1)."""
        return torch.tanh(self.fc(y))
