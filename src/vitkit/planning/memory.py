"""Memory of one device in a training step, by part and at its peak (`docs/scaling.md`)."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from vitkit.planning.activations import FULL, HALF, Arithmetic, image_activations
from vitkit.planning.sizes import Parameters, count_parameters, muon_matrices
from vitkit.spec import ViTSpec

OptimizerName = Literal["adamw", "adam", "sgd", "muon"]
Parallel = Literal["ddp", "fsdp"]
MOMENTS: dict[OptimizerName, int] = {"adamw": 2, "adam": 2, "sgd": 1, "muon": 2}
"""Optimizer -> numbers that it keeps for each parameter; Muon keeps one for those of a matrix."""
MUON_BATCHED = 256
"""Longest side of a matrix that Muon orthogonalises together with others of its shape."""
GATHERED = 2
"""Blocks whose weights FSDP holds unsharded at once: the present one and the next."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of a run that decide its memory.

    Attributes:
        spec: of the model.
        optimizer: `adamw`, `adam`, `sgd` with momentum, or `muon`.
        arithmetic: precision and attention kernel.
        ema: whether an average of the weights is kept.
        devices: N, the processes that share a step.
        parallel: `ddp` keeps the whole model in each, `fsdp` a part.
        recompute: activation checkpointing of whole blocks.
    """

    spec: ViTSpec
    optimizer: OptimizerName = "adamw"
    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    ema: bool = False
    devices: int = 1
    parallel: Parallel = "ddp"
    recompute: bool = False

    @property
    def shards(self) -> int:
        """The number of parts that weights are split into."""
        return self.devices if self.parallel == "fsdp" else 1


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device.

    Attributes:
        weights: of the model, in float32.
        gradients: of all weights.
        optimizer: moments of the optimizer.
        ema: the average of the weights.
        copies: weights in half precision (autocast), and blocks that FSDP has gathered.
        images: of this device, in float32; they stay until the end of the step.
        activations: kept for the backward pass, for all images of this device; with activation
            checkpointing with those of the block that is recomputed.
        temporary: the largest short-lived tensors at the beginning of the backward pass.
        peak: the most that is held at once. Activations are freed while gradients come, so it is
            less than the sum.
    """

    weights: int
    gradients: int
    optimizer: int
    ema: int
    copies: int
    images: int
    activations: int
    temporary: int
    peak: int


def training_memory(training: Training, images: int, *, accumulated: bool = False) -> Memory:
    """Return the memory of one device with `images` images in a step.

    Args:
        training: the run.
        images: of one device, in a micro-batch.
        accumulated: gradients of earlier micro-batches of the step are kept.
    """
    parameters = count_parameters(training.spec)
    each = image_activations(training.spec, training.arithmetic)
    weights = FULL * parameters.total // training.shards
    moments = _moments(training.optimizer, parameters) // training.shards
    average = weights * training.ema
    copies = _copies(training, parameters)
    kept = images * each.kept(training.recompute)
    temporary = images * each.backward
    fixed = weights + moments + average
    # DDP's gradients lie in its buckets, which stay from step to step.
    in_buckets = training.devices > 1 and training.parallel == "ddp"
    buckets = weights if in_buckets or accumulated else 0
    start = fixed + buckets + copies + kept + temporary
    one_block = images * (each.outside + each.block.total + each.backward)
    end = fixed + weights + copies // max(1, training.spec.depth) + one_block
    update = fixed + weights + _update(training)
    pixels = images * _image_bytes(training.spec)
    return Memory(
        weights=weights,
        gradients=weights,
        optimizer=moments,
        ema=average,
        copies=copies,
        images=pixels,
        activations=kept,
        temporary=temporary,
        peak=pixels + max(start, end, update),
    )


def largest_batch(training: Training, available: float, *, accumulated: bool = False) -> int:
    """Return the most images of one device whose peak is at most `available` bytes; 0 if none.

    Args:
        training: the run.
        available: bytes.
        accumulated: of a micro-batch after others of the same step.
    """

    def peak(images: int) -> int:
        return training_memory(training, images, accumulated=accumulated).peak

    if peak(1) > available:
        return 0
    fits, beyond = 1, 2
    while peak(beyond) <= available:
        fits, beyond = beyond, 2 * beyond
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if peak(middle) <= available:
            fits = middle
        else:
            beyond = middle
    return fits


def _image_bytes(spec: ViTSpec) -> int:
    """Return the bytes of an image on the device, in float32."""
    return FULL * spec.in_channels * math.prod(spec.image_size)


def _moments(optimizer: OptimizerName, parameters: Parameters) -> int:
    numbers = MOMENTS[optimizer] * parameters.total
    if optimizer == "muon":
        numbers -= parameters.all_block_matrices
    return FULL * numbers


def kept_copies(training: Training) -> int:
    """Return the bytes of weights in half precision that autograd keeps for the backward pass."""
    if not training.arithmetic.is_mixed:
        return 0
    parameters = count_parameters(training.spec)
    return HALF * (parameters.other_matrices if training.recompute else parameters.matrices)


def _copies(training: Training, parameters: Parameters) -> int:
    """Return the bytes of weights besides the optimizer's own, while a step is computed."""
    copies = 0
    if training.arithmetic.is_mixed:
        kept = parameters.matrices
        if training.recompute:  # made again with each block
            kept = parameters.other_matrices + parameters.block_matrices
        copies += HALF * kept
    if training.shards > 1:
        # a gathered block with its gradient, the next one, and what is outside of the blocks
        rest = parameters.embedding + parameters.readout
        copies += FULL * ((GATHERED + 1) * parameters.block + 2 * rest)
    return copies


def _update(training: Training) -> int:
    """Return the temporary bytes of the update: Muon orthogonalises small equal matrices at once.

    Of each number a direction in float32, and three matrices in bfloat16 of Newton-Schulz.
    """
    if training.optimizer != "muon":
        return 0
    most = 0
    for shape, count in Counter(muon_matrices(training.spec)).items():
        together = count * training.spec.depth if max(shape) <= MUON_BATCHED else 1
        most = max(most, together * shape[0] * shape[1])
    return (FULL + 3 * HALF) * most
