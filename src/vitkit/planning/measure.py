"""Measurements on this machine's processor: the rates of a plan, a real step, kept activations."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.data.augmentation.model_inputs import ModelInputs
from vitkit.data.loading.batch import Batch
from vitkit.models.attention import KERNELS, use_attention
from vitkit.models.layers import ACTIVATIONS
from vitkit.models.vit import ViT
from vitkit.planning.activations import FULL, Arithmetic
from vitkit.planning.memory import Training
from vitkit.planning.sizes import trained_tokens
from vitkit.planning.throughput import ATTENTION_RUNS, UPDATE_BYTES, Rates
from vitkit.spec import ViTSpec
from vitkit.training.optimization.activation_checkpointing import checkpoint_gradients
from vitkit.training.optimization.losses import CrossEntropy
from vitkit.training.optimization.optimizers import make_optimizer
from vitkit.training.optimization.precision import autocast, has_fast_half
from vitkit.training.step import Objective, TrainingStep

CPU = torch.device("cpu")
MOST_ROWS = 4096
"""Tokens of the operations that are timed; more take longer and have the same rates."""
LEAST_SECONDS = 0.2
"""Time that an operation is repeated for, at least; the fastest repetition counts."""
LEAST_CALLS = 3
"""Repetitions at least."""
TINY = ViTSpec(
    image_size=(8, 8), patch_size=(4, 4), width=8, depth=1, num_heads=1, mlp_width=8, num_classes=2
)
"""A model whose step takes no time but for the start of its operations."""
TINY_BLOCKS = 8
"""Blocks more, by which the start of the operations of one is measured."""
UPDATED = 2_000_000
"""Parameters of the update that is timed."""


def has_fast_bfloat16() -> bool:
    """Return whether `vitkit train` chooses bfloat16 on this processor."""
    return has_fast_half(CPU)


def fastest(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest call, after one that warms up.

    Other programs only make a call slower, so the fastest one is that of the machine. With one
    thread the processor's time is taken, which leaves out what other programs do on the same core.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    call()
    times: list[float] = []
    while len(times) < LEAST_CALLS or sum(times) < LEAST_SECONDS:
        start = clock()
        call()
        times.append(clock() - start)
    return min(times)


def processor_rates(training: Training, images: int) -> Rates:
    """Time the kinds of operations of a step on this processor, at the sizes of the model.

    Five operations with their gradients are timed alone: a matrix product, attention, the
    activation function, a norm and a sum, an update of AdamW; and a step of a tiny model, for the
    time that starting operations takes. It lasts 2 to 10 seconds.

    Args:
        training: the settings of the run.
        images: of a step.
    """
    spec, arithmetic = training.spec, training.arithmetic
    rows = min(images * trained_tokens(spec), MOST_ROWS)
    shallow = _tiny_step(1)
    each = max(0.0, (_tiny_step(1 + TINY_BLOCKS) - shallow) / TINY_BLOCKS)
    return Rates(
        products=_products_rate(spec, arithmetic, rows),
        attention=_attention_rate(spec, arithmetic, images),
        activation=_activation_rate(spec, arithmetic, rows),
        traffic=_traffic_rate(spec, rows),
        update=_update_rate(),
        block_seconds=each,
        other_seconds=max(0.0, shallow - each),
        overlaps=False,
    )


def faster_of(one: Rates, other: Rates) -> Rates:
    """Return the better of two measurements of each rate: other programs make all of them worse."""
    return Rates(
        products=max(one.products, other.products),
        attention=max(one.attention, other.attention),
        activation=max(one.activation, other.activation),
        traffic=max(one.traffic, other.traffic),
        update=max(one.update, other.update),
        block_seconds=min(one.block_seconds, other.block_seconds),
        other_seconds=min(one.other_seconds, other.other_seconds),
        overlaps=one.overlaps,
    )


def measured_step(training: Training, images: int) -> float:
    """Return the seconds of a training step of `vitkit train` on this processor, the fastest one.

    Args:
        training: the settings of the run.
        images: of a step; random images, which are on the processor already.
    """
    step, batch = _step(training, images)
    return fastest(lambda: step(batch, 0))


def kept_bytes(training: Training, images: int) -> int:
    """Return the bytes that autograd keeps for the backward pass of a step on this processor.

    Counted by `torch.autograd.graph.saved_tensors_hooks`: the memory of all tensors that are kept,
    each piece once, without the model's own weights and the images.
    """
    model = _model(training)
    size = training.spec.image_size
    inputs = torch.randn(images, training.spec.in_channels, *size)
    not_counted = [*model.parameters(), *model.buffers(), inputs]
    known = {tensor.untyped_storage().data_ptr() for tensor in not_counted}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # held, so that no other one gets its address
        return tensor

    objective = Objective(model, CrossEntropy(), training.arithmetic.amp, CPU)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        objective(ModelInputs(inputs, torch.zeros(images, dtype=torch.long)))
    return sum(storage.nbytes() for storage in kept.values())


def _model(training: Training) -> ViT:
    model = checkpoint_gradients(ViT(training.spec), "block" if training.recompute else None)
    use_attention(model, training.arithmetic.kernel)
    return model.train()


def _step(training: Training, images: int) -> tuple[TrainingStep, Batch]:
    """Return a step as `vitkit train` has it, with images that are ready, and its batch."""
    spec, model = training.spec, _model(training)
    optimizer = make_optimizer(
        model, training.optimizer, lr=1e-4, weight_decay=0.05, betas=(0.9, 0.999)
    )
    inputs = ModelInputs(
        torch.randn(images, spec.in_channels, *spec.image_size),
        torch.zeros(images, dtype=torch.long),
    )
    numbers = torch.zeros(images, dtype=torch.long)
    pixels = torch.zeros(images, 1, 1, spec.in_channels, dtype=torch.uint8)
    batch = Batch(pixels=pixels, labels=numbers, indices=numbers, epoch=0, views=numbers)
    objective = Objective(model, CrossEntropy(), training.arithmetic.amp, CPU)
    return TrainingStep(objective, optimizer, lambda *_: inputs, clip=1.0), batch


def _tiny_step(depth: int) -> float:
    step, batch = _step(Training(spec=TINY.replace(depth=depth), arithmetic=Arithmetic("off")), 1)
    return fastest(lambda: step(batch, 0))


def _with_gradients(
    call: Callable[..., Tensor], *inputs: Tensor, amp: AbstractContextManager[object]
) -> float:
    """Return the seconds of an operation and its gradients for all inputs."""
    leaves = [tensor.requires_grad_() for tensor in inputs]
    gradient: list[Tensor] = []

    def both() -> None:
        with amp:
            made = call(*leaves)
        if not gradient:
            gradient.append(torch.randn_like(made))
        torch.autograd.grad(made, leaves, gradient[0])

    return fastest(both)


def _products_rate(spec: ViTSpec, arithmetic: Arithmetic, rows: int) -> float:
    """Time the four products of a block with their gradients, each alone."""
    width, inner = spec.width, spec.attention_width
    shapes = [(width, 3 * inner), (inner, width), (width, spec.mlp_width), (spec.mlp_width, width)]
    seconds = 0.0
    for inputs, outputs in shapes:
        x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs) / inputs**0.5
        seconds += _with_gradients(F.linear, x, weight, amp=autocast(arithmetic.amp, CPU))
    values = sum(inputs * outputs for inputs, outputs in shapes)
    return 6 * rows * values / seconds


def _attention_rate(spec: ViTSpec, arithmetic: Arithmetic, images: int) -> float:
    tokens, heads = trained_tokens(spec), spec.num_heads
    images = min(images, max(1, MOST_ROWS // tokens))
    dtype = torch.float32 if arithmetic.amp == "off" else getattr(torch, arithmetic.amp)
    shape = (images, heads, tokens, spec.attention_width // heads)
    q, k, v = (torch.randn(shape, dtype=dtype) for _ in "qkv")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return KERNELS[arithmetic.kernel](q, k, v, None, 0.0)

    seconds = _with_gradients(attend, q, k, v, amp=nullcontext())
    operations = 4 * images * tokens**2 * spec.attention_width
    return ATTENTION_RUNS[arithmetic.kernel] * operations / seconds


def _activation_rate(spec: ViTSpec, arithmetic: Arithmetic, rows: int) -> float:
    dtype = torch.float32 if arithmetic.amp == "off" else getattr(torch, arithmetic.amp)
    hidden = torch.randn(rows, spec.mlp_width, dtype=dtype)
    function = ACTIVATIONS[spec.activation]()
    seconds = _with_gradients(function, hidden, amp=nullcontext())
    return 5 * arithmetic.size * hidden.numel() / seconds


def _traffic_rate(spec: ViTSpec, rows: int) -> float:
    inputs = torch.randn(rows, spec.width)
    branch = torch.randn(rows, spec.width)
    norm = nn.LayerNorm(spec.width)

    def add(inputs: Tensor, branch: Tensor) -> Tensor:
        return norm(inputs + branch)

    seconds = _with_gradients(add, inputs, branch, amp=nullcontext())
    # two sums, the norm, and its gradients, as the formula counts them
    return FULL * inputs.numel() * (3 + 2 + 5) / seconds


def _update_rate() -> float:
    weight = nn.Parameter(torch.randn(UPDATED))
    weight.grad = torch.randn(UPDATED)
    optimizer = torch.optim.AdamW([weight], fused=True)

    def update() -> None:
        nn.utils.clip_grad_norm_([weight], 1.0)
        optimizer.step()

    return UPDATE_BYTES * UPDATED / fastest(update)
