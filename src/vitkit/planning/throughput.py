"""Time of a training step, from the rates of a device (`docs/scaling.md`)."""

from __future__ import annotations

from dataclasses import dataclass

from vitkit.planning.activations import FULL, HALF, Arithmetic
from vitkit.planning.flops import forward_flops
from vitkit.planning.hardware import Hardware
from vitkit.planning.memory import Training
from vitkit.planning.sizes import count_parameters, muon_matrices, trained_tokens
from vitkit.spec import ViTSpec

# measured on an H100, as shares of its data sheet (benchmarks/results/gpu-nvidia-h100-*.json)
PRODUCTS_SHARE = 0.73
"""Share of the peak that matrix products of a step of ViT-B/16 reach."""
ATTENTION_SHARE = 0.167
"""Share of the peak that the fused attention kernel reaches, forward and backward."""
TRAFFIC_SHARE = 0.56
"""Share of the memory's bandwidth that norms, activations, sums and casts reach."""
BLOCK_SECONDS = 3.1e-3
"""Seconds to launch the 75 kernels of a block and its backward pass, under autocast."""
OTHER_SECONDS = 2.3e-3
"""Seconds to launch everything else of a step: embedding, head, loss, clipping, update."""
RECOMPUTE_LAUNCHES = 0.85
"""Launches of a recomputed block, relative to those of a block with its backward pass."""
COMPILED_TRAFFIC = 0.6
"""Bytes that a compiled step moves, relative to one that is not compiled."""
COMPILED_LAUNCHES = 0.78
"""Seconds of launches of a compiled step, relative to one that is not compiled."""
LINK_SHARE = 0.8
"""Share of a link that an exchange reaches. An assumption: no exchange was measured."""
BUCKET = 25e6
"""Bytes of a bucket of gradients; the last one is exchanged after the backward pass."""
SHARPNESS = 4
"""Power of the mean by which launches and work, which run beside each other, are added."""
ATTENTION_RUNS: dict[str, float] = {"fused": 3.5, "plain": 3.0}
"""Operations of attention with its backward pass, relative to the forward pass: a fused kernel
multiplies query and key once more."""
UPDATE_BYTES = 40
"""Bytes moved for each parameter: AdamW reads four numbers and writes three, clipping reads two and
writes one."""
GATE = 2.5
"""Bytes that a gate's functions move, relative to those of a plain activation function."""
MUON_STEPS = 5
"""Iterations of Newton-Schulz of an update by Muon."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The speed of one device.

    Attributes:
        products: operations a second of matrix products with weights.
        attention: operations a second of attention, forward and backward.
        activation: bytes a second of the MLP's activation function, forward and backward.
        traffic: bytes a second of everything else.
        update: bytes a second of the update of the weights.
        block_seconds: time to start the operations of a block.
        other_seconds: the same for the rest of a step.
        overlaps: whether operations are started while earlier ones are computed.
    """

    products: float
    attention: float
    activation: float
    traffic: float
    update: float
    block_seconds: float
    other_seconds: float
    overlaps: bool


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        products: of matrix products with weights.
        attention: of attention.
        traffic: of norms, activation functions, sums, casts and the update of the weights.
        launches: of the launches of all operations, beside the work.
        exchange: of all exchanges between devices.
        waiting: the part of `exchange` that nothing hides.
        total: of the step.
    """

    products: float
    attention: float
    traffic: float
    launches: float
    exchange: float
    waiting: float
    total: float


def gpu_rates(gpu: Hardware, arithmetic: Arithmetic) -> Rates:
    """Return the rates of a GPU, as shares of its data sheet that were measured on an H100."""
    peak = 1e12 * (gpu.half_tflops if arithmetic.is_mixed else gpu.full_tflops)
    moved = TRAFFIC_SHARE * gpu.bandwidth
    return Rates(
        products=PRODUCTS_SHARE * peak,
        attention=ATTENTION_SHARE * peak,
        activation=moved,
        traffic=moved,
        update=moved,
        block_seconds=BLOCK_SECONDS,
        other_seconds=OTHER_SECONDS,
        overlaps=True,
    )


def step_time(
    training: Training,
    images: int,
    rates: Rates,
    *,
    link: float = float("inf"),
    compiled: bool = False,
) -> StepTime:
    """Return the time of a step with `images` images on each device.

    Args:
        training: the settings of the run.
        images: of one device.
        rates: of one device.
        link: bytes a second that a device sends to the others.
        compiled: by `--compile`, as a share measured on an H100.
    """
    spec, arithmetic = training.spec, training.arithmetic
    forward = forward_flops(spec, trained_tokens(spec))
    again = int(training.recompute)  # one more forward pass of the blocks
    products = 3 * forward.products + again * (forward.products - forward.patches - forward.head)
    seconds_of_products = (images * products + _update_flops(training)) / rates.products
    attention = images * forward.attention * (again + ATTENTION_RUNS[arithmetic.kernel])
    attention = attention / rates.attention
    blocks = images * spec.depth
    traffic = blocks * _activation_traffic(spec, arithmetic, again) / rates.activation
    traffic += blocks * _block_traffic(spec, arithmetic, again) / rates.traffic
    traffic *= COMPILED_TRAFFIC if compiled else 1
    traffic += _update_traffic(training) / rates.update
    work = seconds_of_products + attention + traffic
    launches = spec.depth * rates.block_seconds * (1 + again * RECOMPUTE_LAUNCHES)
    launches = (launches + rates.other_seconds) * (COMPILED_LAUNCHES if compiled else 1)
    power = SHARPNESS if rates.overlaps else 1
    computed = (work**power + launches**power) ** (1 / power)
    exchange, waiting = _exchange(training, computed, link)
    return StepTime(
        products=seconds_of_products,
        attention=attention,
        traffic=traffic,
        launches=launches,
        exchange=exchange,
        waiting=waiting,
        total=computed + waiting,
    )


def _activation_traffic(spec: ViTSpec, arithmetic: Arithmetic, again: int) -> float:
    """Return the bytes that a block's activation function moves for one image.

    Forward: one number read and one written, backward two read and one written; a gate has two
    functions and a product.
    """
    values = arithmetic.size * trained_tokens(spec) * spec.mlp_width
    return (5 + 2 * again) * values * (1.0 if spec.mlp == "plain" else GATE)


def _block_traffic(spec: ViTSpec, arithmetic: Arithmetic, again: int) -> float:
    """Return the bytes that a block's other operations move beside its products, for one image.

    Forward: two norms, two sums, and under autocast two casts; backward: the gradients of these,
    sums of the gradients of biases, and the gradient of qkv put together.
    """
    tokens = trained_tokens(spec)
    stream, hidden = tokens * spec.width, tokens * spec.mlp_width
    size, mixed = arithmetic.size, arithmetic.is_mixed
    cast = (FULL + HALF) * mixed
    forward = 2 * stream * (2 * FULL + cast + 2 * FULL + size)
    norms = 2 * stream * (5 * FULL + 2 * cast + 3 * FULL)
    biases = size * (3 * spec.attention_width * tokens + hidden + 2 * stream)
    gathered = 6 * size * spec.attention_width * tokens
    backward = norms + biases + gathered
    if spec.layer_scale is not None:
        forward += 4 * size * stream
        backward += 10 * size * stream
    if arithmetic.kernel == "plain":
        weights = size * spec.num_heads * tokens**2
        forward, backward = forward + 6 * weights, backward + 8 * weights
    return float((1 + again) * forward + backward)


def _update_traffic(training: Training) -> float:
    parameters = count_parameters(training.spec).total / training.shards
    casts = 3 * (FULL + HALF) * training.arithmetic.is_mixed  # weights, and gradients back
    average = 3 * FULL * training.ema
    return parameters * (UPDATE_BYTES + casts + average)


def _update_flops(training: Training) -> float:
    """Return the operations of Muon's orthogonalisation of the matrices of all blocks."""
    if training.optimizer != "muon":
        return 0.0
    flops = 0.0
    for shape in muon_matrices(training.spec):
        short, long = sorted(shape)
        flops += MUON_STEPS * (4 * short**2 * long + 2 * short**3)
    return training.spec.depth * flops


def _exchange(training: Training, computed: float, link: float) -> tuple[float, float]:
    """Return the seconds of all exchanges, and of those that the computation does not hide.

    A ring over N devices sends (N - 1) / N of all bytes once for each gather or scatter. DDP: the
    gradients are summed (a scatter and a gather) during the backward pass, two thirds of the step;
    the last bucket comes after it. FSDP: the weights are gathered twice and the gradients scattered
    once, during the whole step; the first block's gather and the last one's scatter are not hidden.
    """
    devices = training.devices
    if devices == 1:
        return 0.0, 0.0
    parameters = count_parameters(training.spec)
    every = (devices - 1) / devices * FULL * parameters.total / (LINK_SHARE * link)
    if training.parallel == "ddp":
        exchange = 2 * every
        last = exchange * min(1.0, BUCKET / (FULL * parameters.total))
        return exchange, max(last, exchange - 2 / 3 * computed)
    exchange = 3 * every
    edges = 2 * every * (parameters.block + parameters.embedding) / parameters.total
    return exchange, max(edges, exchange - computed)
