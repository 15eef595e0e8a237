"""Bytes of one image that the backward pass needs, by formula (`docs/scaling.md`).

Autograd keeps the inputs of products, norms and activation functions. Under autocast the tokens
between the blocks and the inputs of norms stay in float32, and inputs of products have two bytes.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Literal

from vitkit.planning.sizes import patch_values, trained_tokens
from vitkit.spec import ViTSpec

FULL = 4
"""Bytes of a number in float32."""
HALF = 2
"""Bytes of a number in bfloat16 and float16."""


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of a step.

    Attributes:
        amp: `off` is float32; the others are those of autocast.
        kernel: `fused` attention keeps one number for each row of weights, `plain` all weights.
        on_gpu: autocast on a GPU computes norms and softmax in float32, on a processor not.
    """

    amp: Literal["off", "bfloat16", "float16"] = "bfloat16"
    kernel: Literal["fused", "plain"] = "fused"
    on_gpu: bool = True

    @property
    def size(self) -> int:
        """The bytes of a number in a matrix product."""
        return FULL if self.amp == "off" else HALF

    @property
    def is_mixed(self) -> bool:
        """True under autocast."""
        return self.amp != "off"


@dataclass(frozen=True)
class BlockActivations:
    """Bytes that one block keeps for one image.

    Attributes:
        tokens: its input, in float32.
        norms: inputs of the second norm, means and deviations.
        attention: inputs of the projections and what the attention kernel keeps.
        mlp: inputs of both layers and of the activation function.
        scales: inputs of LayerScale, masks of dropout.
    """

    tokens: int
    norms: int
    attention: int
    mlp: int
    scales: int

    @property
    def total(self) -> int:
        """All bytes of the block."""
        return sum(astuple(self))


@dataclass(frozen=True)
class Activations:
    """Bytes for one image of a batch.

    Attributes:
        block: what each block keeps.
        outside: what the parts before and after the blocks keep.
        depth: the number of blocks.
        backward: temporary bytes at the beginning of the backward pass, before memory is freed.
    """

    block: BlockActivations
    outside: int
    depth: int
    backward: int

    def kept(self, recompute: bool) -> int:
        """Return the bytes kept at the end of the forward pass, and while a block is recomputed.

        Args:
            recompute: keep the inputs of the blocks alone, and all of one block at a time.
        """
        if not recompute:
            return self.outside + self.depth * self.block.total
        return self.outside + (self.depth - 1) * self.block.tokens + self.block.total

    def stored(self, recompute: bool) -> int:
        """Return the bytes that autograd holds at the end of the forward pass."""
        block = self.block.tokens if recompute else self.block.total
        return self.outside + self.depth * block


def image_activations(spec: ViTSpec, arithmetic: Arithmetic) -> Activations:
    """Return the bytes that one image needs in a training step, besides the image itself."""
    tokens = trained_tokens(spec)
    block = _block(spec, tokens, arithmetic)
    return Activations(
        block=block,
        outside=_outside(spec, tokens, arithmetic),
        depth=spec.depth,
        backward=_backward(spec, tokens, arithmetic, block),
    )


def _block(spec: ViTSpec, tokens: int, arithmetic: Arithmetic) -> BlockActivations:
    size, mixed = arithmetic.size, arithmetic.is_mixed
    stream = _stream(spec, arithmetic) * tokens * spec.width
    product = size * tokens * spec.width
    attention = product + _attention(spec, tokens, arithmetic)
    mlp = product + _mlp(spec, tokens, size)
    norms = _norm(spec, tokens, arithmetic, stream) + _statistics(spec, tokens)
    if spec.block == "pre_norm":
        norms += _norm_beside(spec, tokens, arithmetic, stream) + _statistics(spec, tokens)
    else:
        norms += _norm(spec, tokens, arithmetic, stream) + _statistics(spec, tokens)
        # The products' inputs are the tokens: themselves in float32, or copies, and then no norm
        # needs the tokens of the block's input.
        attention -= 0 if mixed else product
        norms -= stream if mixed else 0
    if spec.block == "res_post_norm" and mixed and not arithmetic.on_gpu:
        norms -= 2 * (stream - product)  # the inputs of norms are branches, with two bytes
    return BlockActivations(
        tokens=stream,
        norms=norms,
        attention=attention,
        mlp=mlp,
        scales=_scales(spec, tokens, size),
    )


def _stream(spec: ViTSpec, arithmetic: Arithmetic) -> int:
    """Return the bytes of a number of the tokens between blocks.

    Learned tokens and positions are float32; without any, autocast leaves the patches as they are.
    """
    learned = spec.num_prefix_tokens or spec.positions == "learned" or spec.embedding_norm
    return FULL if learned else arithmetic.size


def _norm(spec: ViTSpec, tokens: int, arithmetic: Arithmetic, stream: int) -> int:
    """Return the bytes of a norm's input, and of what RMSNorm keeps on a processor besides."""
    full = FULL * tokens * spec.width
    kept = full if arithmetic.on_gpu else stream
    return kept + full * (spec.norm == "rms" and not arithmetic.on_gpu)


def _norm_beside(spec: ViTSpec, tokens: int, arithmetic: Arithmetic, stream: int) -> int:
    """Return the same for a norm whose input is the block's own, if that is float32 already."""
    kept = _norm(spec, tokens, arithmetic, stream)
    return kept - (stream if stream == FULL * tokens * spec.width or not arithmetic.on_gpu else 0)


def _statistics(spec: ViTSpec, rows: int) -> int:
    """Return the bytes of mean and deviation of each row; RMSNorm has one number."""
    return FULL * rows * (2 if spec.norm == "layer" else 1)


def _attention(spec: ViTSpec, tokens: int, arithmetic: Arithmetic) -> int:
    """Return the bytes of query, key, value, weights or their sums, and the output of the heads."""
    inner, heads, size = spec.attention_width, spec.num_heads, arithmetic.size
    projected = 3 * size * tokens * inner
    if spec.qk_norm:
        # the norm keeps its input, of which the value is a part; query and key are new
        projected += 2 * tokens * inner * size + 2 * _statistics(spec, tokens * heads)
        if arithmetic.is_mixed and arithmetic.on_gpu:
            projected += 2 * tokens * inner * FULL
        if spec.norm == "rms" and not arithmetic.on_gpu:
            projected += 2 * tokens * inner * FULL
    elif spec.positions == "rope" and arithmetic.kernel == "fused":
        projected += 2 * tokens * inner * size  # turned copies; the value is a part of all three
    output = size * tokens * inner
    return projected + output + _weights(spec, tokens, arithmetic)


def _weights(spec: ViTSpec, tokens: int, arithmetic: Arithmetic) -> int:
    """Return the bytes of the attention weights, or of their sums in a fused kernel."""
    heads, size, dropout = spec.num_heads, arithmetic.size, spec.attention_dropout > 0
    # the fused kernel of a processor has no dropout; torch then takes two products
    if arithmetic.kernel == "fused" and (arithmetic.on_gpu or not dropout):
        return FULL * tokens * heads
    each = size
    if arithmetic.is_mixed and arithmetic.on_gpu:
        each += FULL  # the softmax in float32, and its copy
    if dropout:  # a mask, and the weights that it leaves
        each += size + (1 if arithmetic.on_gpu else size)
    return each * heads * tokens**2


def _mlp(spec: ViTSpec, tokens: int, size: int) -> int:
    """Return the bytes between the two layers of the MLP."""
    hidden = size * tokens * spec.mlp_width
    if spec.mlp != "plain":
        return 4 * hidden  # gate, value, silu of the gate, their product
    # relu's gradient is known from its output; quick_gelu keeps a sigmoid as well
    return {"relu": 1, "quick_gelu": 3}.get(spec.activation, 2) * hidden


def _scales(spec: ViTSpec, tokens: int, size: int) -> int:
    """Return the bytes that LayerScale and dropout keep: an input, or a mask of as many numbers."""
    stream = size * tokens * spec.width
    kept = 2 * stream * (spec.layer_scale is not None)
    kept += stream * (spec.projection_dropout > 0)
    return kept + (stream + size * tokens * spec.mlp_width) * (spec.mlp_dropout > 0)


def _outside(spec: ViTSpec, tokens: int, arithmetic: Arithmetic) -> int:
    """Return the bytes before and after the blocks: patches, norms, pooling and head."""
    size, width, patches = arithmetic.size, spec.width, spec.num_patches
    # a processor's convolution in float32 keeps the images themselves
    copied = arithmetic.on_gpu or arithmetic.is_mixed or spec.stem != "convolution"
    kept = size * patches * patch_values(spec) * copied
    if spec.stem == "normed_linear":
        kept += FULL * patches * (patch_values(spec) + width)
        kept += 2 * 2 * FULL * patches
    if spec.embedding_norm:
        kept += _norm(spec, tokens, arithmetic, FULL * tokens * width)
        kept += _statistics(spec, tokens)
    if spec.patch_dropout:  # all tokens, of which some are taken
        kept += FULL * (patches + spec.num_prefix_tokens) * width
    seen = tokens - spec.num_prefix_tokens
    kept += _last_norm(spec, tokens, arithmetic)
    if spec.pooling == "map":
        kept += size * seen * (width + 2 * spec.attention_width)
        kept += size * (2 * spec.mlp_width + 4 * width)
    heads = 1 + spec.distillation_token
    return kept + heads * (size * spec.head_inputs + FULL * spec.num_classes)


def _last_norm(spec: ViTSpec, tokens: int, arithmetic: Arithmetic) -> int:
    """Return the bytes of the last norm, and of all tokens where one of them is read."""
    all_tokens = _stream(spec, arithmetic) * tokens * spec.width
    before = spec.final_norm and spec.norm_before_pool
    kept = 0
    if before:
        kept += _norm(spec, tokens, arithmetic, all_tokens) + _statistics(spec, tokens)
    # the class token is a part of the memory of all tokens
    keeps_all = not arithmetic.is_mixed or (spec.final_norm and not before)
    return kept + all_tokens * (spec.pooling == "cls" and keeps_all)


def _backward(spec: ViTSpec, tokens: int, arithmetic: Arithmetic, block: BlockActivations) -> int:
    """Return the temporary bytes while the last block is differentiated.

    The gradient of the tokens, its copy under autocast, and the gradient of the MLP's hidden layer;
    the input of the last norm is free by then. Plain attention needs the gradients of its weights
    twice, when the MLP's activations are free.
    """
    stream, size = FULL * tokens * spec.width, arithmetic.size
    gradient = stream + arithmetic.is_mixed * size * tokens * spec.width
    freed = stream * (spec.final_norm and spec.norm_before_pool)
    hidden = size * tokens * spec.mlp_width * (1 if spec.mlp == "plain" else 2)
    most = gradient + hidden
    if arithmetic.kernel == "plain":
        softmax = FULL if arithmetic.on_gpu else size
        weights = (softmax + size) * spec.num_heads * tokens**2
        most = max(most, gradient + weights - block.mlp)
    return max(0, most - freed)
