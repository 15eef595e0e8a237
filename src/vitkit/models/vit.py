"""The Vision Transformer: Eq. 1 to 4 of "An Image is Worth 16x16 Words" (arXiv 2010.11929)."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitkit.errors import SettingError
from vitkit.models.attention import Context
from vitkit.models.embedding import Embedding, PatchDropout, make_stem
from vitkit.models.encoder import RunBlock, block_calls, stack_blocks
from vitkit.models.initialisation import initialise
from vitkit.models.interface.classifier import Backbone, complete_spec
from vitkit.models.interface.intermediates import Embedded
from vitkit.models.interface.pretrained import Origin, Pretrained
from vitkit.models.layers import make_norm
from vitkit.models.positions import FixedPositions, LearnedPositions, RotaryPositions
from vitkit.models.readout import AttentionPool, Features, Readout, Representation
from vitkit.models.record import Record
from vitkit.shapes import Images, Logits, Tokens
from vitkit.spec import ViTSpec, resolve_head_width

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
        self.spec = spec = complete_spec(spec, fields)
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
        learned = LearnedPositions(spec.grid, spec.position_resampling)
        positions = learned if spec.position_rows else FixedPositions(spec.positions)
        self.embedding = Embedding(positions, dropout=spec.position_dropout)
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
        self.attn_pool = AttentionPool(spec) if spec.pooling == "map" else Readout(spec.pooling)
        self.fc_norm = make_norm(norm, width, spec.norm_eps, spec.final_norm and not first)
        hidden = spec.representation_width
        self.pre_logits = Representation(width, hidden) if hidden else nn.Identity()
        self.head_drop = nn.Dropout(spec.head_dropout)
        self.head = head(spec.num_classes > 0)
        self.head_dist = head(spec.num_classes > 0 and spec.distillation_token)
        self.dist_pool = Readout("distillation") if spec.distillation_token else None
        averaged = spec.distillation_token and spec.distilled_readout == "mean"
        self._merge = _average if averaged else _first

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


def _first(outputs: list[Tensor]) -> Tensor:  # operator.itemgetter breaks a compiled graph
    return outputs[0]


def _average(outputs: list[Tensor]) -> Tensor:
    return (outputs[0] + outputs[1]) / 2
