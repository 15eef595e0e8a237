"""The Vision Transformer: Eq. 1 to 4 of "An Image is Worth 16x16 Words" (arXiv 2010.11929).

Eq. 1 is in `embedding`, Eq. 2 and 3 in `encoder`; Eq. 4, y = LN(z_L^0), is `Readout` here: from the
last tokens to one vector, which the head takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitkit.errors import SettingError
from vitkit.models.attention import PLAIN, Context, CrossAttention
from vitkit.models.embedding import PatchDropout, RotaryPositions, make_embedding, make_stem
from vitkit.models.encoder import RunBlock, block_calls, stack_blocks
from vitkit.models.initialisation import initialise
from vitkit.models.interface.backbone import Backbone, Embedded
from vitkit.models.interface.pretrained import Origin, Pretrained
from vitkit.models.layers import MLP, make_norm
from vitkit.models.record import Record
from vitkit.other_names import translate_keywords
from vitkit.shapes import Grid, Images, Logits, Pooled, Tokens
from vitkit.spec import Pooling, ViTSpec, resolve_head_width


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


BLOCK_FIELDS = (
    "depth", "block", "drop_path", "drop_path_schedule", "width", "num_heads", "mlp_width",
    "head_width", "activation", "mlp", "qkv_bias", "qk_norm", "norm", "norm_eps", "layer_scale",
    "attention_dropout", "projection_dropout", "mlp_dropout",
)  # fmt: skip
"""Fields of a spec that its blocks are made of."""


class ViT(Backbone, Pretrained):
    """A plain Vision Transformer: images (B, C, H, W) -> logits (B, K).

    H and W may be any multiples of the patch; positions are resampled to their grid. Parameters
    have timm's names: `patch_embed.proj`, `cls_token`, `pos_embed`, `blocks.3.attn.qkv`, `norm`,
    `head`. Every variation is a module chosen here; `forward` is the same for all.

    Args:
        spec: the architecture, by default ViT-B/16. Initial weights come from torch's generator.
        backbone: with `spec.stem == "backbone"`, any module that gives a map (B, c, h, w), whose
            cells are then cut into patches. A checkpoint cannot describe it.
        **fields: any field of the spec, by its name here or elsewhere (`other_names.KEYWORDS`).

    Attributes:
        spec: as given.
        run_block: runs a block, if not by a plain call; set by `checkpoint_gradients`.
        origin: the checkpoint that the weights come from; `None` for initial weights.

    Raises:
        SpecError: a backbone that does not fit the spec, an unknown field, or an impossible spec.
        SettingError: not a spec.

    >>> model = ViT(image_size=32, patch_size=8, width=64, depth=2, num_heads=4, mlp_width=128)
    >>> model(torch.zeros(2, 3, 32, 48)).shape
    torch.Size([2, 1000])
    """

    def __init__(
        self, spec: ViTSpec | None = None, backbone: nn.Module | None = None, **fields: object
    ) -> None:
        super().__init__()
        self.spec = spec = _complete(spec, fields)
        self.run_block: RunBlock | None = None
        self.origin: Origin | None = None
        self._make_embedding(spec, backbone)
        self.blocks = stack_blocks(**{name: getattr(spec, name) for name in BLOCK_FIELDS})
        self._make_head(spec)
        initialise(self, spec)

    def _make_embedding(self, spec: ViTSpec, backbone: nn.Module | None) -> None:
        width = spec.width

        def tokens(count: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(1, count, width)) if count else None

        self.patch_embed = make_stem(spec, backbone)  # x_p E of Eq. 1
        self.cls_token = tokens(int(spec.class_token))
        self.dist_token = tokens(int(spec.distillation_token))
        self.reg_token = tokens(spec.num_registers)
        self.pos_embed = tokens(spec.position_rows)  # E_pos; None where positions are computed
        self.embedding = make_embedding(spec)
        self.patch_drop = PatchDropout(spec.patch_dropout, spec.num_prefix_tokens)
        head_width = resolve_head_width(width, spec.num_heads, spec.head_width)
        rotary = spec.positions == "rope"
        self.rope = RotaryPositions(head_width, spec.rope_temperature) if rotary else None
        self.norm_pre = make_norm(spec.norm, width, spec.norm_eps, spec.embedding_norm)

    def _make_head(self, spec: ViTSpec) -> None:
        def head(present: bool) -> nn.Module:
            return nn.Linear(spec.head_inputs, spec.num_classes) if present else nn.Identity()

        norm, width, first = spec.norm, spec.pooled_width, spec.norm_before_pool
        self.norm = make_norm(norm, spec.width, spec.norm_eps, spec.final_norm and first)
        self.attn_pool = self._make_pooling(spec)
        self.fc_norm = make_norm(norm, width, spec.norm_eps, spec.final_norm and not first)
        hidden = spec.representation_width
        self.pre_logits = Representation(width, hidden) if hidden else nn.Identity()
        self.head_drop = nn.Dropout(spec.head_dropout)
        self.head = head(spec.num_classes > 0)
        self.head_dist = head(spec.num_classes > 0 and spec.distillation_token)
        self.dist_pool = Readout("distillation") if spec.distillation_token else None
        averaged = spec.distillation_token and spec.distilled_readout == "mean"
        self._merge = _average if averaged else _first

    def _make_pooling(self, spec: ViTSpec) -> nn.Module:
        """Return the pooling of a spec; `reset_classifier` calls this, too."""
        return AttentionPool(spec) if spec.pooling == "map" else Readout(spec.pooling)

    def forward(self, images: Images, record: Record | None = None) -> Logits:
        """Return logits (B, K); with `num_classes=0`, the input of the head (B, E).

        Args:
            images: (B, C, H, W) float, normalised.
            record: what to keep on the way; see `Record`.

        Raises:
            ShapeError: another number of channels, or sides that the patch does not divide.
            SettingError: the record asks for a layer that is not there.
        """
        return self.forward_head(self.forward_features(images, record), record)

    def forward_features(self, images: Images, record: Record | None = None) -> Features:
        """Return all tokens after the last norm, by kind; errors as `forward`."""
        tokens, context, grid = self.embed(images)
        for block in block_calls(self.blocks, record, self.run_block):
            tokens = block(tokens, context)  # Eq. 2 and 3
        return Features.split(self.norm(tokens), grid, self.spec)

    def embed(self, images: Images) -> Embedded:
        """Return z_0 (B, T, D) of Eq. 1, the context of the blocks, and the grid."""
        grid = self.patch_embed.grid(images)
        patches = self.patch_embed(images)  # B N D
        tokens = self.embedding(patches, grid, self.prefix_tokens(patches), self.pos_embed)
        rotation = None if self.rope is None else self.rope(grid, tokens)
        tokens, rotation = self.patch_drop(tokens, rotation)
        return Embedded(self.norm_pre(tokens), Context(rotation), grid)

    def prefix_tokens(self, like: Tokens) -> Tensor:
        """Return class, distillation and register tokens (1, R, D), in this order; R may be 0."""
        tokens = (self.cls_token, self.dist_token, self.reg_token)
        present: list[Tensor] = [token for token in tokens if token is not None]
        return torch.cat(present, dim=1) if present else like[:1, :0]

    def forward_head(self, features: Features | Tokens, record: Record | None = None) -> Logits:
        """Return the same logits as `forward`, from its features, or from all tokens (B, T, D)."""
        if isinstance(features, Tensor):  # as `forward_intermediates` returns them
            features = Features.split(features, self.spec.grid, self.spec)
        return self._merge(self._logits(features, record))

    def forward_heads(self, features: Features) -> tuple[Logits, Logits]:
        """Return logits of the class head and of the distillation head, each (B, K).

        Raises:
            SettingError: the model has no distillation token.
        """
        if not self.spec.distillation_token:
            raise SettingError(
                "the model has one head; two need distillation_token=True in its spec"
            )
        cls, distillation = self._logits(features)
        return cls, distillation

    def pooled(self, features: Features) -> Float[Tensor, "B E"]:
        """Return the head's input (B, E): Eq. 4, and the representation layer if there is one."""
        return self._merge(self._readouts(features))

    def _readouts(self, features: Features, record: Record | None = None) -> list[Tensor]:
        pooled = [pool(features, record) for pool in (self.attn_pool, self.dist_pool) if pool]
        return [self.pre_logits(self.fc_norm(y)) for y in pooled]

    def _logits(self, features: Features, record: Record | None = None) -> list[Tensor]:
        read = zip((self.head, self.head_dist), self._readouts(features, record), strict=False)
        return [head(self.head_drop(y)) for head, y in read]


def _complete(spec: ViTSpec | None, fields: Mapping[str, object]) -> ViTSpec:
    """Return a spec, by default that of ViT-B/16, with fields changed, by any of their names."""
    spec = ViTSpec() if spec is None else spec
    if not isinstance(spec, ViTSpec):
        kind = type(spec).__name__
        raise SettingError(f"ViT takes a ViTSpec (vitkit.load takes a path), not a {kind}")
    return spec.replace(**translate_keywords(fields, vars(spec))) if fields else spec


def _first(outputs: list[Tensor]) -> Tensor:  # operator.itemgetter breaks a compiled graph
    return outputs[0]


def _average(outputs: list[Tensor]) -> Tensor:
    return (outputs[0] + outputs[1]) / 2
