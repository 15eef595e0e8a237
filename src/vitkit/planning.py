"""Operations, memory and time of a training, by formula, before it starts (`docs/scaling.md`)."""

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple

from vitkit.errors import SettingError
from vitkit.spec import ViTSpec

OptimizerName = Literal["adamw", "adam", "sgd", "muon"]
FULL, HALF = 4, 2
"""Bytes of a number in float32, and in bfloat16 or float16."""
SPARE = 2e9
"""Bytes of a GPU that a plan leaves free: CUDA's context, workspaces, gaps. An allowance."""

# measured on an H100, as shares of its data sheet (benchmarks/results/gpu-nvidia-h100-*.json)
PRODUCTS_SHARE, ATTENTION_SHARE = 0.73, 0.167
"""Shares of the peak that matrix products with weights, and fused attention, reach."""
TRAFFIC_SHARE = 0.56
"""Share of the memory's bandwidth that norms, activations, sums and casts reach."""
BLOCK_SECONDS, OTHER_SECONDS = 3.1e-3, 2.3e-3
"""Seconds to launch the kernels of a block with its backward pass, and of the rest of a step."""
RECOMPUTED_LAUNCHES = 0.85
"""Launches of a recomputed block, relative to `BLOCK_SECONDS`."""
COMPILED_TRAFFIC, COMPILED_LAUNCHES = 0.6, 0.78
"""Bytes moved and seconds of launches of a compiled step, relative to one that is not compiled."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of a run that decide its operations, memory and time."""

    spec: ViTSpec  # no network is before its patches
    opt: OptimizerName = "adamw"  # sgd has momentum
    mixed: bool = True  # under autocast; else all is float32
    model_ema: bool = False  # an average of the weights is kept
    compiled: bool = False  # the step is compiled
    recompute: bool = False  # activation checkpointing of whole blocks
    gpus: int = 1  # N, the processes that share a step
    shards: int = 1  # parts that the weights are split into: N with FSDP, 1 with DDP

    @property
    def tokens(self) -> int:
        """T, the tokens of an image in training: patch dropout leaves some out."""
        patches = round(self.spec.num_patches * (1 - self.spec.patch_dropout))
        return max(1, patches) + self.spec.num_prefix_tokens


class Parameters(NamedTuple):
    """Numbers of parameters."""

    total: int  # W
    block: int  # of one block


@cache
def count_parameters(spec: ViTSpec) -> Parameters:
    """Return the numbers of parameters, by the shapes of a model with one block and no memory.

    >>> count_parameters(ViTSpec()).total
    86567656
    """
    import torch

    from vitkit.models.vit import ViT

    with torch.device("meta"):
        model = ViT(spec.replace(depth=1))
    total = sum(parameter.numel() for parameter in model.parameters())
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    return Parameters(total + (spec.depth - 1) * block, block)


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
    width, inner, hidden = spec.width, spec.attention_width, spec.mlp_width
    head = spec.head_inputs * spec.num_classes
    head += spec.pooled_width * (spec.representation_width or 0)
    head *= 2 * (1 + spec.distillation_token)
    if spec.pooling == "map":  # one query attends to the patches, then a plain MLP
        patches = count - spec.num_prefix_tokens
        head += 4 * inner * (width + patches * width + patches) + 4 * width * hidden
    return Flops(
        patches=2 * _pixels(spec) * width,
        projections=spec.depth * 8 * count * width * inner,
        attention=spec.depth * 4 * count**2 * inner,
        mlp=spec.depth * 2 * count * (_first_layers(spec) + 1) * width * hidden,
        head=head,
    )


def _pixels(spec: ViTSpec) -> int:
    """Return the numbers of an image, which are those of its patches."""
    return spec.in_channels * math.prod(spec.image_size)


def _first_layers(spec: ViTSpec) -> int:
    """Return the matrices before the activation function of an MLP: two with a gate (SwiGLU)."""
    if spec.mlp == "plain":
        return 1
    return 2


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

    Autograd keeps the inputs of products, norms and activation functions. Under autocast, tokens
    and the inputs of norms are float32, and the inputs of products have two bytes. Attention is
    fused, and keeps one number for each row of its weights.
    """
    spec, tokens, size = run.spec, run.tokens, HALF if run.mixed else FULL
    stream, product = FULL * tokens * spec.width, size * tokens * spec.width
    heads, hidden = size * tokens * spec.attention_width, size * tokens * spec.mlp_width
    norm = stream + 2 * FULL * tokens  # with mean and deviation of each token
    block = 2 * (norm + product) + 4 * heads + FULL * tokens * spec.num_heads
    # relu's gradient is known from its output; quick_gelu keeps a sigmoid as well; a SwiGLU keeps
    # gate, value, silu of the gate, and their product
    layers = {"relu": 1, "quick_gelu": 3}.get(spec.activation, 2)
    block += hidden * (layers if spec.mlp == "plain" else 4)
    # query and key before they are turned, or normalised with statistics and in float32
    block += 2 * heads * (spec.qk_norm or spec.positions == "rope")
    if spec.qk_norm:
        block += FULL * tokens * (4 * spec.num_heads + 2 * spec.attention_width * run.mixed)
    block += 2 * product * (spec.layer_scale is not None)  # the inputs of LayerScale
    # masks, which have as many numbers
    block += product * (spec.projection_dropout > 0) + (product + hidden) * (spec.mlp_dropout > 0)

    last_norm = spec.final_norm and spec.norm_before_pool
    norms = spec.embedding_norm + last_norm + 2 * (spec.stem == "normed_linear")
    outside = size * _pixels(spec) + norms * norm
    # under autocast the class token alone is copied
    outside += stream * (spec.pooling == "cls" and not run.mixed)
    outside += (product + 2 * heads) * (spec.pooling == "map")
    # the gradients of the MLP's hidden layer and of the tokens, which take the place of the last
    # norm's input, and their copy under autocast
    temporary = _first_layers(spec) * hidden + product * run.mixed + stream * (not last_norm)
    return Activations(stream, block, outside, temporary)


def training_memory(run: Training, images: int) -> dict[str, int]:
    """Return the bytes on one GPU with `images` images, by part, and their `peak`.

    Activations are freed while gradients come, so the peak is less than the sum.
    """
    (total, block), each, depth = count_parameters(run.spec), image_activations(run), run.spec.depth
    weights = FULL * total // run.shards
    moments = weights * (1 if run.opt == "sgd" else 2)
    if run.opt == "muon":  # one number for each of a block's matrices, which are nearly all of it
        moments -= FULL * depth * block
    outside = total - depth * block
    # with checkpointing, the copies of a block are made again
    copies = HALF * run.mixed * (outside + (1 if run.recompute else depth) * block)
    if run.shards > 1:  # a gathered block with its gradient, the next block, and what is outside
        copies += FULL * (3 * block + 2 * outside)
    one_block = images * (each.outside + each.block)
    kept = one_block + images * (depth - 1) * (each.stream if run.recompute else each.block)
    # DDP's gradients lie in its buckets, which stay from step to step
    stay = run.gpus > 1 and run.shards == 1
    start, end = weights * stay + copies + kept, weights + copies // depth + one_block
    memory = {
        "weights": weights,
        "gradients": weights,
        "optimizer": moments,
        "ema": weights * run.model_ema,
        "copies": copies,
        "images": images * FULL * _pixels(run.spec),
        "activations": kept,
        "temporary": images * each.temporary,
    }
    always = weights + moments + memory["ema"] + memory["images"] + memory["temporary"]
    return memory | {"peak": always + max(start, end)}


def largest_batch(run: Training, available: float) -> int:
    """Return the most images of one device whose peak is at most `available` bytes; 0 if none."""
    most = range(1, 2**24)  # more than any GPU holds
    return bisect_right(most, available, key=lambda images: training_memory(run, images)["peak"])


@dataclass(frozen=True)
class GPU:
    """A kind of GPU, by its maker's data sheet; 1 GB is 10^9 bytes."""

    name: str  # as `torch.cuda.get_device_properties` has it
    half_tflops: float  # 10^12 operations a second of dense matrix products
    full_tflops: float  # the same in float32, without TF32
    bandwidth: float  # GB a second between memory and chip
    gigabytes: float  # of memory
    amp: Literal["bfloat16", "float16"] = "bfloat16"  # the better type of autocast that it has


GPUName = Literal["h100", "h200", "a100-40", "a100-80", "l4", "t4", "rtx4090", "this"]
GPUS = {
    "h100": GPU("NVIDIA H100 80GB HBM3", 989.4, 67.0, 3350.0, 80.0),
    "h200": GPU("NVIDIA H200", 989.4, 67.0, 4800.0, 141.0),
    "a100-40": GPU("NVIDIA A100-SXM4-40GB", 312.0, 19.5, 1555.0, 40.0),
    "a100-80": GPU("NVIDIA A100-SXM4-80GB", 312.0, 19.5, 2039.0, 80.0),
    "l4": GPU("NVIDIA L4", 121.0, 30.3, 300.0, 24.0),
    "t4": GPU("Tesla T4", 65.0, 8.1, 300.0, 16.0, amp="float16"),
    "rtx4090": GPU("NVIDIA GeForce RTX 4090", 165.2, 82.6, 1008.0, 24.0),
}
"""Value of `--gpu` -> facts."""


def find_gpu(name: GPUName) -> GPU:
    """Return the facts of a GPU; with `this`, the memory is what this machine's GPU has.

    Raises:
        SettingError: no GPU here, or one of another kind.
    """
    if name != "this":
        return GPUS[name]
    import torch

    wrong = "this machine has no CUDA GPU"
    if torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        for gpu in GPUS.values():
            if gpu.name == here.name:
                return replace(gpu, gigabytes=here.total_memory / 1e9)
        wrong = f"the peak of {here.name!r} is not known"
    raise SettingError(f"--gpu this: {wrong}; pass one of {', '.join(GPUS)}")


def step_time(run: Training, images: int, gpu: GPU) -> dict[str, float]:
    """Return the seconds of a step with `images` images on each GPU, without exchanges.

    Launches run beside the work, which are the first three parts.
    """
    spec, again, parameters = run.spec, run.recompute, count_parameters(run.spec)
    peak = 1e12 * (gpu.half_tflops if run.mixed else gpu.full_tflops)
    attention = forward_flops(spec, run.tokens).attention
    products = images * (training_flops(run) - (3 + again) * attention)
    if run.opt == "muon":  # five iterations of Newton-Schulz: 25 D for each number of a block
        products += spec.depth * 25 * spec.width * parameters.block
    moved = images * spec.depth * _block_traffic(run) * (COMPILED_TRAFFIC if run.compiled else 1)
    # clipping and AdamW, casts of weights and gradients, an average
    update = 10 * FULL + 3 * (FULL + HALF) * run.mixed + 3 * FULL * run.model_ema
    moved += update * parameters.total / run.shards
    launches = spec.depth * BLOCK_SECONDS * (1 + again * RECOMPUTED_LAUNCHES) + OTHER_SECONDS
    parts = {
        "products": products / (PRODUCTS_SHARE * peak),
        # the backward pass of the fused kernel multiplies query and key once more
        "attention": images * (3.5 + again) * attention / (ATTENTION_SHARE * peak),
        "traffic": moved / (TRAFFIC_SHARE * 1e9 * gpu.bandwidth),
    }
    work, launches = sum(parts.values()), launches * (COMPILED_LAUNCHES if run.compiled else 1)
    return parts | {"launches": launches, "total": (work**4 + launches**4) ** (1 / 4)}


def _block_traffic(run: Training) -> int:
    """Return the bytes that a block moves for one image beside its products."""
    spec, width, size = run.spec, run.spec.width, HALF if run.mixed else FULL
    cast = (FULL + HALF) * run.mixed
    functions = size * spec.mlp_width * _first_layers(spec)
    scaled = size * width * (spec.layer_scale is not None)
    # of each token: two norms, two sums, two casts, the activation function, LayerScale
    forward = 2 * width * (4 * FULL + cast + size) + 2 * functions + 4 * scaled
    # their gradients, sums of the gradients of biases, and the gradient of qkv put together
    backward = 2 * width * (8 * FULL + 2 * cast + size) + 3 * functions + 10 * scaled
    backward += size * (9 * spec.attention_width + spec.mlp_width)
    return run.tokens * ((1 + run.recompute) * forward + backward)


def estimate(run: Training, gpu: GPU, batch_size: int, images: int) -> dict[str, Any]:
    """Return the memory and time of a run, as an entry of `ways` of `vitkit plan --json`.

    Args:
        run: the settings of the run.
        gpu: of which there are `run.gpus`.
        batch_size: images of a step on all GPUs, which divide it.
        images: of all epochs.
    """
    step = step_time(run, batch_size // run.gpus, gpu)
    return {
        "parallel": "fsdp" if run.shards > 1 else "ddp",
        "recompute": run.recompute,
        "training_flops": training_flops(run),
        "memory": training_memory(run, batch_size // run.gpus),
        "largest_batch": largest_batch(run, gpu.gigabytes * 1e9 - SPARE) * run.gpus,
        "step": step,
        "images_per_second": batch_size / step["total"],
        "days": images * step["total"] / batch_size / 86_400,
    }
