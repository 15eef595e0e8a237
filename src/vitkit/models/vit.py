"""The Vision Transformer: Eq. 1 to 4 of "An Image is Worth 16x16 Words" (arXiv 2010.11929)."""

from __future__ import annotations

import torch
from torch import nn

from vitkit.models.embedding import STEMS, Embedding
from vitkit.models.encoder import run_blocks, stack_blocks
from vitkit.models.initialisation import init_jax
from vitkit.models.readout import Features, Readout
from vitkit.models.record import Record
from vitkit.shapes import Images, Logits
from vitkit.spec import ViTSpec


class ViT(nn.Module):
    """A plain Vision Transformer: pictures (B, C, H, W) -> logits (B, K).

    H and W may be any multiples of the patch; positions are resampled where they are not
    `spec.image_size`. Parameter names are timm's: `patch_embed.proj`, `cls_token`, `pos_embed`,
    `blocks.3.attn.qkv`, `norm`, `head`.

    Args:
        spec: the architecture. Initial weights come from torch's global generator.

    Attributes:
        spec: as given.

    >>> model = ViT(ViTSpec(image_size=32, patch_size=8, width=64, depth=2, num_heads=4,
    ...                     mlp_width=128, num_classes=10))
    >>> model(torch.zeros(2, 3, 32, 48)).shape
    torch.Size([2, 10])
    """

    def __init__(self, spec: ViTSpec) -> None:
        super().__init__()
        self.spec = spec
        width, tokens = spec.width, spec.num_prefix_tokens + spec.num_patches
        self.patch_embed = STEMS[spec.stem](spec.in_channels, spec.patch_size, width)
        self.cls_token = nn.Parameter(torch.empty(1, 1, width)) if spec.class_token else None
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, width))
        self.embedding = Embedding(spec.grid, dropout=spec.position_dropout)
        self.blocks = stack_blocks(
            spec.depth,
            drop_path=spec.drop_path,
            width=width,
            num_heads=spec.num_heads,
            mlp_width=spec.mlp_width,
            head_width=spec.head_width,
            activation=spec.activation,
            qkv_bias=spec.qkv_bias,
            norm_eps=spec.norm_eps,
            attention_dropout=spec.attention_dropout,
            projection_dropout=spec.projection_dropout,
            mlp_dropout=spec.mlp_dropout,
        )
        self.norm = nn.LayerNorm(width, eps=spec.norm_eps)
        self.readout = Readout(spec.pooling)
        self.head = nn.Linear(width, spec.num_classes) if spec.num_classes else nn.Identity()
        init_jax(self)

    def forward(self, images: Images, record: Record | None = None) -> Logits:
        """Logits (B, K); with `num_classes=0`, pooled features (B, D).

        Args:
            images: (B, C, H, W) float, normalised.
            record: what to keep on the way; see `Record`.

        Raises:
            ShapeError: another number of channels, or sides that the patch does not divide.
            SettingError: the record asks for a layer that is not there.
        """
        return self.forward_head(self.forward_features(images, record))

    def forward_features(self, images: Images, record: Record | None = None) -> Features:
        """Every token after the last norm, taken apart; arguments and errors as for `forward`."""
        grid = self.patch_embed.grid(images)
        tokens = self.embedding(self.patch_embed(images), grid, self.cls_token, self.pos_embed)
        tokens = self.norm(run_blocks(self.blocks, tokens, record))
        return Features.split(tokens, grid, class_token=self.spec.class_token)

    def forward_head(self, features: Features) -> Logits:
        """The same logits as `forward`, from features already at hand."""
        return self.head(self.readout(features))
