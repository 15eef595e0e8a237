"""Parameters, operations and bytes of a training step, from a model's spec (`docs/scaling.md`)."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Literal, NamedTuple

from vitkit.spec import ViTSpec

Parallel = Literal["ddp", "fsdp"]
OptimizerName = Literal["adamw", "adam", "sgd", "muon"]
FULL, HALF = 4, 2
"""Bytes of a number in float32, and in bfloat16 or float16."""
MOST_IMAGES = 2**24
"""More images than any GPU holds."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of a run that decide its operations and memory, named as flags of `train`.

    Attributes:
        spec: of the model; no network is before its patches.
        opt: optimizer; `sgd` has momentum.
        amp: `off` is float32; the others are those of autocast.
        attention_kernel: `fused` keeps one number for each row of attention weights, `plain` all.
        model_ema: whether an average of the weights is kept.
        gpus: N, the processes that share a step.
        parallel: `ddp` keeps the whole model in each, `fsdp` a part.
        recompute: activation checkpointing of whole blocks.
        on_gpu: False for autocast and kernels of a processor, on which tests count.
    """

    spec: ViTSpec
    opt: OptimizerName = "adamw"
    amp: Literal["off", "bfloat16", "float16"] = "bfloat16"
    attention_kernel: Literal["fused", "plain"] = "fused"
    model_ema: bool = False
    gpus: int = 1
    parallel: Parallel = "ddp"
    recompute: bool = False
    on_gpu: bool = True

    @property
    def is_mixed(self) -> bool:
        """True under autocast."""
        return self.amp != "off"

    @property
    def size(self) -> int:
        """The bytes of a number in a matrix product."""
        return HALF if self.is_mixed else FULL

    @property
    def shards(self) -> int:
        """The number of parts that weights are split into."""
        return self.gpus if self.parallel == "fsdp" else 1

    @property
    def tokens(self) -> int:
        """T, the tokens of an image in training: patch dropout leaves some out."""
        patches = self.spec.num_patches
        if self.spec.patch_dropout:
            patches = max(1, round(patches * (1 - self.spec.patch_dropout)))
        return patches + self.spec.num_prefix_tokens


class Parameters(NamedTuple):
    """Numbers of parameters: of the model and of a block, and of both those of matrices."""

    total: int
    block: int
    block_matrices: int
    other_matrices: int  # of the patch projection, of the pooling and of the heads


def count_parameters(spec: ViTSpec) -> Parameters:
    """Return the numbers of parameters of a plain ViT.

    >>> count_parameters(ViTSpec()).total
    86567656
    """
    width, inner, hidden = spec.width, spec.attention_width, spec.mlp_width
    vectors = 2 if spec.norm == "layer" else 1  # a norm's scale, and of LayerNorm a shift
    values, gates = _patch_values(spec), _first_layers(spec)
    # the blocks
    matrices = 4 * width * inner + (gates + 1) * width * hidden
    block = matrices + {True: 3, "no_key": 2, False: 0}[spec.qkv_bias] * inner
    block += 2 * width + gates * hidden + 2 * vectors * width  # biases and norms
    block += 2 * vectors * (inner // spec.num_heads) * spec.qk_norm
    block += 2 * width * (spec.layer_scale is not None)
    # before them
    others = values * width
    rest = (spec.patch_bias + spec.num_prefix_tokens + spec.position_rows) * width
    rest += 2 * (values + width) * (spec.stem == "normed_linear")
    rest += vectors * width * spec.embedding_norm
    # after them
    rest += vectors * (width if spec.norm_before_pool else spec.pooled_width) * spec.final_norm
    if spec.pooling == "map":
        others += 4 * width * inner + 2 * width * hidden
        rest += 3 * inner + hidden + (3 + vectors) * width
    if spec.representation_width:
        others += spec.pooled_width * spec.representation_width
        rest += spec.representation_width
    heads = (1 + spec.distillation_token) * spec.num_classes
    others += heads * spec.head_inputs
    return Parameters(spec.depth * block + others + rest + heads, block, matrices, others)


class Flops(NamedTuple):
    """Operations for one image: a multiply-add counts as two, and only matrix products count."""

    patches: int
    projections: int
    attention: int
    mlp: int
    head: int


def forward_flops(spec: ViTSpec, tokens: int | None = None) -> Flops:
    """Return the operations of one image's forward pass.

    Args:
        spec: of the model.
        tokens: T; by default all tokens, as in inference.

    >>> round(sum(forward_flops(ViTSpec())) / 1e9, 2)
    35.13
    """
    count = spec.num_patches + spec.num_prefix_tokens if tokens is None else tokens
    width, inner, heads = spec.width, spec.attention_width, 1 + spec.distillation_token
    patches, head = count - spec.num_prefix_tokens, 0
    if spec.pooling == "map":  # one query attends to the patches, then a plain MLP
        head += 4 * inner * (width + patches * width + patches) + 4 * width * spec.mlp_width
    if spec.representation_width:  # a model with two heads has the layer before each
        head = heads * (head + 2 * spec.pooled_width * spec.representation_width)
    return Flops(
        patches=2 * spec.num_patches * _patch_values(spec) * width,
        projections=spec.depth * 8 * count * width * inner,
        attention=spec.depth * 4 * count**2 * inner,
        mlp=spec.depth * 2 * count * (_first_layers(spec) + 1) * width * spec.mlp_width,
        head=head + heads * 2 * spec.head_inputs * spec.num_classes,
    )


def training_flops(run: Training) -> int:
    """Return the operations of one image in training: 3 F, and the blocks again if recomputed."""
    forward = forward_flops(run.spec, run.tokens)
    blocks = forward.projections + forward.attention + forward.mlp
    return 3 * sum(forward) + run.recompute * blocks


class Activations(NamedTuple):
    """Bytes for one image."""

    stream: int  # the tokens between two blocks
    block: int  # what one block keeps for the backward pass, its input included
    outside: int  # what the parts before and after the blocks keep
    temporary: int  # at the beginning of the backward pass, besides


def image_activations(run: Training) -> Activations:
    """Return the bytes that one image needs in a step, besides the image itself.

    Autograd keeps the inputs of products, norms and activation functions. Under autocast, learned
    tokens and the inputs of norms are float32, and the inputs of products have two bytes.
    """
    spec, tokens = run.spec, run.tokens
    full, product = FULL * tokens * spec.width, run.size * tokens * spec.width
    learned = spec.num_prefix_tokens or spec.positions == "learned" or spec.embedding_norm
    stream = full if learned else product
    norm = _norm(run, stream)
    mlp = product + _mlp(run)
    block = 2 * norm + product + _attention(run) + mlp
    if stream < full and run.on_gpu and spec.block == "pre_norm":
        block += stream  # the first norm keeps a copy in float32
    if spec.block == "res_post_norm" and not run.on_gpu:
        block -= 2 * (stream - product)  # the inputs of norms are branches
    # LayerScale keeps its input, dropout a mask of as many numbers
    block += product * (2 * (spec.layer_scale is not None) + (spec.projection_dropout > 0))
    block += (product + run.size * tokens * spec.mlp_width) * (spec.mlp_dropout > 0)
    return Activations(stream, block, _outside(run, stream), _temporary(run, mlp))


def _patch_values(spec: ViTSpec) -> int:
    """Return C P P, the numbers of a patch."""
    return spec.in_channels * math.prod(spec.patch_size)


def _first_layers(spec: ViTSpec) -> int:
    """Return the matrices before the activation function of an MLP: two with a gate (SwiGLU)."""
    return 1 if spec.mlp == "plain" else 2


def _norm(run: Training, stream: int) -> int:
    """Return the bytes of a norm's input in float32, and of mean and deviation of each token."""
    full = FULL * run.tokens * run.spec.width
    kept = full if run.on_gpu else stream + full * (run.spec.norm == "rms")
    return kept + _statistics(run.spec, run.tokens)


def _statistics(spec: ViTSpec, rows: int) -> int:
    return FULL * rows * (2 if spec.norm == "layer" else 1)


def _attention(run: Training) -> int:
    """Return the bytes of query, key, value, weights or their sums, and the output of the heads."""
    spec, tokens, size = run.spec, run.tokens, run.size
    heads, queries = spec.num_heads, 2 * tokens * spec.attention_width  # and as many keys
    kept = 2 * size * queries
    if spec.qk_norm:  # of which the inputs are kept besides
        kept += size * queries + 2 * _statistics(spec, tokens * heads)
        copied = run.is_mixed if run.on_gpu else spec.norm == "rms"
        kept += FULL * queries * copied
    elif spec.positions == "rope" and run.attention_kernel == "fused":
        kept += size * queries  # turned copies
    if run.attention_kernel == "fused":
        return kept + FULL * tokens * heads
    each = size  # of a weight
    if run.is_mixed and run.on_gpu:
        each += FULL  # the softmax in float32
    if spec.attention_dropout:
        each += size + 1  # the weights that are left, and a mask
    return kept + each * heads * tokens**2


def _mlp(run: Training) -> int:
    """Return the bytes between the layers of the MLP."""
    hidden = run.size * run.tokens * run.spec.mlp_width
    if run.spec.mlp != "plain":
        return 4 * hidden  # gate, value, silu of the gate, their product
    # relu's gradient is known from its output; quick_gelu keeps a sigmoid as well
    return {"relu": 1, "quick_gelu": 3}.get(run.spec.activation, 2) * hidden


def _outside(run: Training, stream: int) -> int:
    """Return the bytes before and after the blocks: patches, norms, pooling and head."""
    spec, size, width, patches = run.spec, run.size, run.spec.width, run.spec.num_patches
    # a processor's convolution in float32 keeps the images themselves
    copied = run.on_gpu or run.is_mixed or spec.stem != "convolution"
    kept = size * patches * _patch_values(spec) * copied
    if spec.stem == "normed_linear":
        kept += FULL * patches * (_patch_values(spec) + width + 4)
    if spec.embedding_norm:
        kept += _norm(run, stream)
    if spec.patch_dropout:  # all tokens, of which some are taken
        kept += FULL * (patches + spec.num_prefix_tokens) * width
    first = spec.final_norm and spec.norm_before_pool
    if first:
        kept += _norm(run, stream)
    # under autocast the class token alone is copied, unless a norm follows
    if spec.pooling == "cls" and (not run.is_mixed or (spec.final_norm and not first)):
        kept += stream
    if spec.pooling == "map":
        seen = run.tokens - spec.num_prefix_tokens
        kept += size * seen * (width + 2 * spec.attention_width)
        kept += size * (2 * spec.mlp_width + 4 * width)
    heads = 1 + spec.distillation_token
    return kept + heads * (size * spec.head_inputs + FULL * spec.num_classes)


def _temporary(run: Training, mlp: int) -> int:
    """Return the bytes while the last block is differentiated, less the freed input of its norm.

    The gradient of the tokens, its copy under autocast, and the gradient of the MLP's hidden layer.
    Plain attention needs two gradients of its weights, when the MLP's activations are free.
    """
    spec, tokens, size = run.spec, run.tokens, run.size
    full = FULL * tokens * spec.width
    most = size * tokens * spec.mlp_width * _first_layers(spec)
    if run.attention_kernel == "plain":
        softmax = FULL if run.on_gpu else size
        most = max(most, (softmax + size) * spec.num_heads * tokens**2 - mlp)
    most += full + run.is_mixed * size * tokens * spec.width
    return max(0, most - full * (spec.final_norm and spec.norm_before_pool))


def training_memory(run: Training, images: int) -> dict[str, int]:
    """Return the bytes on one GPU with `images` images, by part, and their `peak`.

    Activations are freed while gradients come, so the peak is less than the sum.
    """
    spec, parameters, each = run.spec, count_parameters(run.spec), image_activations(run)
    weights = FULL * parameters.total // run.shards
    numbers = parameters.total * (1 if run.opt == "sgd" else 2)
    if run.opt == "muon":  # one number for each of the blocks' matrices
        numbers -= spec.depth * parameters.block_matrices
    moments = FULL * numbers // run.shards
    fixed = weights * (1 + run.model_ema) + moments
    copies = _copies(run, parameters)
    kept = images * (each.outside + spec.depth * each.block)
    if run.recompute:
        kept = images * (each.outside + (spec.depth - 1) * each.stream + each.block)
    # DDP's gradients lie in its buckets, which stay from step to step
    stay = run.gpus > 1 and run.parallel == "ddp"
    start = weights * stay + copies + kept + images * each.temporary
    one_block = images * (each.outside + each.block + each.temporary)
    end = weights + copies // spec.depth + one_block
    pixels = images * FULL * spec.in_channels * math.prod(spec.image_size)
    return {
        "weights": weights,
        "gradients": weights,
        "optimizer": moments,
        "ema": weights * run.model_ema,
        "copies": copies,
        "images": pixels,
        "activations": kept,
        "temporary": images * each.temporary,
        "peak": pixels + fixed + max(start, end),
    }


def _copies(run: Training, parameters: Parameters) -> int:
    """Return the bytes of weights besides the optimizer's own, while a step is computed."""
    # with checkpointing, a block's copies are made again
    blocks = 1 if run.recompute else run.spec.depth
    halves = parameters.other_matrices + blocks * parameters.block_matrices
    copies = HALF * halves * run.is_mixed
    if run.shards > 1:
        # a gathered block with its gradient, the next block, and what is outside of the blocks
        outside = parameters.total - run.spec.depth * parameters.block
        copies += FULL * (3 * parameters.block + 2 * outside)
    return copies


def largest_batch(run: Training, available: float) -> int:
    """Return the most images of one device whose peak is at most `available` bytes; 0 if none."""
    return bisect_right(
        range(1, MOST_IMAGES), available, key=lambda images: training_memory(run, images)["peak"]
    )
