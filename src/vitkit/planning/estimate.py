"""GPUs, the time of a step, and every way to run a training on them (`docs/scaling.md`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from vitkit.errors import SettingError
from vitkit.messages import did_you_mean
from vitkit.planning.memory import (
    FULL,
    HALF,
    Training,
    count_parameters,
    forward_flops,
    largest_batch,
    training_memory,
)

THIS = "this"
"""Name of the first GPU of this machine."""
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


@dataclass(frozen=True)
class GPU:
    """A kind of GPU, by its maker's data sheet; 1 GB is 10^9 bytes."""

    name: str  # as `torch.cuda.get_device_properties` has it
    half_tflops: float  # 10^12 operations a second of dense matrix products
    full_tflops: float  # the same in float32, without TF32
    bandwidth: float  # GB a second between memory and chip
    gigabytes: float  # of memory
    has_bfloat16: bool = True  # or float16 alone

    @property
    def available(self) -> float:
        """The bytes that a training step may have."""
        return self.gigabytes * 1e9 - SPARE


GPUS = {
    "h100": GPU("NVIDIA H100 80GB HBM3", 989.4, 67.0, 3350.0, 80.0),
    "h200": GPU("NVIDIA H200", 989.4, 67.0, 4800.0, 141.0),
    "a100-40": GPU("NVIDIA A100-SXM4-40GB", 312.0, 19.5, 1555.0, 40.0),
    "a100-80": GPU("NVIDIA A100-SXM4-80GB", 312.0, 19.5, 2039.0, 80.0),
    "l4": GPU("NVIDIA L4", 121.0, 30.3, 300.0, 24.0),
    "t4": GPU("Tesla T4", 65.0, 8.1, 300.0, 16.0, has_bfloat16=False),
    "rtx4090": GPU("NVIDIA GeForce RTX 4090", 165.2, 82.6, 1008.0, 24.0),
}
"""Value of `--gpu` -> facts."""


def find_gpu(name: str) -> GPU:
    """Return the facts of a GPU; with `this`, the memory is what this machine's GPU has.

    Raises:
        SettingError: no such name, no GPU here, or one of another kind.
    """
    names = ", ".join(GPUS)
    if name in GPUS:
        return GPUS[name]
    if name != THIS:
        near = did_you_mean(name, [*GPUS, THIS])
        raise SettingError(f"--gpu {name}: must be one of {names}, {THIS}{near}")
    import torch

    if not torch.cuda.is_available():
        raise SettingError(f"--gpu {THIS}: this machine has no CUDA GPU; pass one of {names}")
    here = torch.cuda.get_device_properties(0)
    for gpu in GPUS.values():
        if gpu.name == here.name:
            return replace(gpu, gigabytes=here.total_memory / 1e9)
    raise SettingError(
        f"--gpu {THIS}: the peak of {here.name!r} is not known; pass the nearest of {names}"
    )


def step_time(run: Training, images: int, gpu: GPU, *, compiled: bool = False) -> dict[str, float]:
    """Return the seconds of a step with `images` images on each GPU, without exchanges.

    Launches run beside the work, which are the first three parts.
    """
    peak = 1e12 * (gpu.half_tflops if run.is_mixed else gpu.full_tflops)
    forward, again = forward_flops(run.spec, run.tokens), int(run.recompute)
    operations = 3 * (sum(forward) - forward.attention)
    operations += again * (forward.projections + forward.mlp)
    products = (images * operations + update_flops(run)) / (PRODUCTS_SHARE * peak)
    # the backward pass of a fused kernel multiplies query and key once more
    passes = again + (3.5 if run.attention_kernel == "fused" else 3)
    attention = images * passes * forward.attention / (ATTENTION_SHARE * peak)
    moved = images * run.spec.depth * _block_traffic(run, again)
    moved = moved * (COMPILED_TRAFFIC if compiled else 1) + _update_traffic(run)
    traffic = moved / (TRAFFIC_SHARE * 1e9 * gpu.bandwidth)
    launches = run.spec.depth * BLOCK_SECONDS * (1 + again * RECOMPUTED_LAUNCHES) + OTHER_SECONDS
    launches *= COMPILED_LAUNCHES if compiled else 1
    return {
        "products": products,
        "attention": attention,
        "traffic": traffic,
        "launches": launches,
        "total": ((products + attention + traffic) ** 4 + launches**4) ** (1 / 4),
    }


def update_flops(run: Training) -> int:
    """Return the operations of an update: those of Muon's five iterations of Newton-Schulz."""
    if run.opt != "muon":
        return 0
    spec, flops = run.spec, 0
    width, inner, hidden = spec.width, spec.attention_width, spec.mlp_width
    # query, key and value are three matrices; gate and value of a packed SwiGLU are one
    first = {"plain": [hidden], "swiglu_packed": [2 * hidden], "swiglu_split": [hidden, hidden]}
    for side in [inner, inner, inner, inner, hidden, *first[spec.mlp]]:
        short, long = sorted([side, width])
        flops += 5 * (4 * short**2 * long + 2 * short**3)
    return spec.depth * flops


def _block_traffic(run: Training, again: int) -> float:
    """Return the bytes that a block moves for one image beside its products.

    Forward: two norms, two sums, two casts, the activation function. Backward: their gradients,
    sums of the gradients of biases, and the gradient of qkv put together.
    """
    spec, size, width, hidden = run.spec, run.size, run.spec.width, run.spec.mlp_width
    cast = (FULL + HALF) * run.is_mixed
    functions = size * hidden * (1.0 if spec.mlp == "plain" else 2.5)  # a gate has two, a product
    # bytes of each token
    forward = 2 * width * (4 * FULL + cast + size) + 2 * functions
    backward = 2 * width * (8 * FULL + 2 * cast + size) + 3 * functions
    backward += size * (9 * spec.attention_width + hidden)
    if spec.layer_scale is not None:
        forward, backward = forward + 4 * size * width, backward + 10 * size * width
    if run.attention_kernel == "plain":
        weights = size * spec.num_heads * run.tokens
        forward, backward = forward + 6 * weights, backward + 8 * weights
    return run.tokens * ((1 + again) * forward + backward)


def _update_traffic(run: Training) -> float:
    """Return the bytes of clipping and AdamW, of casts of weights and gradients, of an average."""
    each = 10 * FULL + 3 * (FULL + HALF) * run.is_mixed + 3 * FULL * run.model_ema
    return each * count_parameters(run.spec).total / run.shards


def estimate(
    run: Training, gpu: GPU, batch_size: int, images: int, *, compiled: bool = False
) -> dict[str, Any]:
    """Return the memory and time of a run, as an entry of `ways` of `vitkit plan --json`.

    Args:
        run: the settings of the run.
        gpu: of which there are `run.gpus`.
        batch_size: images of a step on all GPUs, which divide it.
        images: of all epochs.
        compiled: by `--compile`.
    """
    each = batch_size // run.gpus
    memory, step = training_memory(run, each), step_time(run, each, gpu, compiled=compiled)
    return {
        "parallel": run.parallel,
        "recompute": run.recompute,
        "memory": memory,
        "fits": memory["peak"] <= gpu.available,
        "largest_batch": largest_batch(run, gpu.available) * run.gpus,
        "step": step,
        "images_per_second": batch_size / step["total"],
        "days": images * step["total"] / batch_size / 86_400,
    }
