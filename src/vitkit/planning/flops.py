"""Operations of one image, by part; a multiply-add counts as two (`docs/scaling.md`)."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from vitkit.planning.sizes import mlp_matrices, patch_values, trained_tokens
from vitkit.spec import ViTSpec

BACKWARD = 2
"""Backward over forward pass: each product has one for its input and one for its weight."""


@dataclass(frozen=True)
class Flops:
    """Operations of matrix products for one image; norms, activations and sums are not counted.

    Attributes:
        patches: the patch projection.
        projections: query, key, value and output of the attention of all blocks.
        attention: the two products with the attention weights in all blocks.
        mlp: the MLPs of all blocks.
        head: pooling by attention, representation layer and heads.
    """

    patches: int
    projections: int
    attention: int
    mlp: int
    head: int

    @property
    def blocks(self) -> int:
        """The operations of all blocks."""
        return self.projections + self.attention + self.mlp

    @property
    def total(self) -> int:
        """The operations of the whole model."""
        return sum(astuple(self))

    @property
    def products(self) -> int:
        """The operations of products with weights: all but `attention`."""
        return self.total - self.attention


def forward_flops(spec: ViTSpec, tokens: int | None = None) -> Flops:
    """Return the operations of one image's forward pass.

    F = 2 n C P^2 D + L (2 T (4 D a + m D M) + 4 T^2 a) + head, with n patches, T tokens, a = k h
    the width of all heads, and m = 2 matrices in an MLP, 3 in a SwiGLU.

    Args:
        spec: of the model.
        tokens: T; by default all tokens, as in inference.

    >>> round(forward_flops(ViTSpec()).total / 1e9, 2)
    35.13
    """
    count = spec.num_patches + spec.num_prefix_tokens if tokens is None else tokens
    width, inner, depth = spec.width, spec.attention_width, spec.depth
    return Flops(
        patches=2 * spec.num_patches * patch_values(spec) * width,
        projections=depth * 2 * count * 4 * width * inner,
        attention=depth * 4 * count**2 * inner,
        mlp=depth * 2 * count * mlp_matrices(spec) * width * spec.mlp_width,
        head=_head(spec, count - spec.num_prefix_tokens),
    )


def training_flops(spec: ViTSpec, recompute: bool = False) -> int:
    """Return the operations of one image in training: 3 F, and the blocks again if recomputed.

    This is the convention for model FLOPs. The images need no gradient, so 3 F has the patch
    projection once too often (0.2 % of ViT-B/16); a fused attention kernel multiplies query and key
    once more in its backward pass, which is not counted.

    Args:
        spec: of the model.
        recompute: with activation checkpointing of whole blocks.
    """
    forward = forward_flops(spec, trained_tokens(spec))
    return (1 + BACKWARD) * forward.total + recompute * forward.blocks


def _head(spec: ViTSpec, patches: int) -> int:
    width, inner, operations = spec.width, spec.attention_width, 0
    if spec.pooling == "map":  # one query attends to the patches, then a plain MLP
        operations += 2 * width * (2 * inner + 2 * patches * inner)
        operations += 4 * patches * inner + 4 * width * spec.mlp_width
    if spec.representation_width:
        operations += 2 * spec.pooled_width * spec.representation_width
        # a model with two heads has the layer before each
        operations *= 1 + spec.distillation_token
    heads = 1 + spec.distillation_token
    return operations + heads * 2 * spec.head_inputs * spec.num_classes
