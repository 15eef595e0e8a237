"""The arithmetic of a run: precision, attention kernel, and the loss scale of float16."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from vitkit.errors import MODEL, SettingError, check_type
from vitkit.models import attention, encoder
from vitkit.models.vit import ViT
from vitkit.training.state.registry import Metadata, Stateful, Tensors

Precision = Literal["off", "bfloat16", "float16"]
MIN_FLOPS_CPU = 5e8
"""Operations of an optimizer step below which the conversions of autocast cost more than its faster
products save, on a processor."""
MIN_FLOPS_GPU = 5e10
"""The same for a GPU: an estimate (a millisecond of kernel launches at 50 TFLOP/s in float32), not
a measurement."""
MAX_PLAIN_TOKENS = 1024
"""The longest sequence for which plain attention is chosen."""


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """Return the context manager for a forward pass in this precision.

    Args:
        precision: `off` is float32, without autocast.
        device: device of the inputs.
    """
    if precision == "off":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


def _half_precision(device: torch.device) -> Precision:
    """Return `bfloat16`, or `float16` for a GPU without native bfloat16."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float16"
    return "bfloat16"


def choose_precision(model: ViT, batch_size: int, device: torch.device) -> tuple[Precision, str]:
    """Choose the precision of a run that does not set it.

    The choice depends on the features of the processor, the model and the batch size alone. It is
    not timed, so that the same command on the same machine always makes the same choice. The limits
    come from measurements by `benchmarks/arithmetic.py`.

    Args:
        model: on any device.
        batch_size: images of one optimizer step, over all processes and accumulation steps.
        device: device of the run.

    Returns:
        The precision, and the reason in a few words.
    """
    half = _half_precision(device)
    kind, fewest = "device", MIN_FLOPS_GPU
    if device.type == "cpu":
        kind, fewest = "processor", MIN_FLOPS_CPU
    if not _has_fast_half(device):
        return "off", f"this {kind} is not known to be faster in {half}"
    # Two operations per weight and token in the forward pass, four in the backward pass.
    flops = 6 * _num_tokens(model) * sum(p.numel() for p in model.parameters()) * batch_size
    if flops < fewest:
        return "off", f"a step of {flops:.0e} operations is too small to gain from {half}"
    return half, f"this {kind} multiplies faster in {half}"


def choose_kernel(
    model: ViT, precision: Precision, device: torch.device
) -> attention.AttentionKernel:
    """Choose the attention kernel: fused, except for half precision on a processor.

    There torch's fused kernel is slower than two explicit matrix products. Above
    `MAX_PLAIN_TOKENS` tokens it is faster, and the attention maps of the plain kernel would take
    most of the memory.
    """
    half_on_cpu = device.type == "cpu" and precision != "off"
    if half_on_cpu and _num_tokens(model) <= MAX_PLAIN_TOKENS:
        return "plain"
    return "fused"


def _num_tokens(model: ViT) -> int:
    return model.spec.num_patches + model.spec.num_prefix_tokens


def _has_fast_half(device: torch.device) -> bool:
    """Return whether matrix products in `half_precision(device)` are known to be faster."""
    if device.type != "cpu":
        return device.type == "cuda"
    # Missing in some builds of torch; then no CPU feature is known.
    features: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    # Intel has AVX512-BF16, too, but gains nothing from it.
    amd = str(features.get("cpu_name", "")).startswith("AMD")
    return bool(features.get("amx_bf16") or (amd and features.get("avx512_bf16")))


class LossScale(Stateful):
    """A dynamic loss scale for float16: loss times scale, gradient divided by scale.

    Without it, small gradients become zeros. "Mixed Precision Training" (arXiv 1710.03740),
    Sec. 3.2, with the numbers of torch's `GradScaler`, whose step supports neither Muon's views nor
    sharded weights. Every scale is a power of two, so that scaling itself does not round.

    Attributes:
        scale: the factor.
        finite_steps: steps with finite gradients since the scale last changed.
    """

    FIRST, LOWEST, PATIENCE = 2.0**16, 1.0, 2000

    def __init__(self) -> None:
        self.scale = self.FIRST
        self.finite_steps = 0

    def count_finite(self) -> None:
        """Count a step with a finite gradient; after `PATIENCE` in a row, double the scale."""
        self.finite_steps += 1
        if self.finite_steps == self.PATIENCE:
            self.scale *= 2
            self.finite_steps = 0

    def lower(self) -> bool:
        """Halve the scale after an overflow; return False if it is at its minimum already."""
        if self.scale <= self.LOWEST:
            return False
        self.scale /= 2
        self.finite_steps = 0
        return True

    def metadata(self) -> Metadata:
        """Return the scale and the number of finite steps."""
        return {"scale": self.scale, "good": self.finite_steps}

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Restore both numbers."""
        self.scale = float(metadata["scale"])
        self.finite_steps = int(metadata["good"])


def wait_for(device: torch.device) -> None:
    """Wait until the device has finished all work that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


# Activation checkpointing: recompute a block in the backward pass to save memory.
#
# "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174).


def checkpoint_gradients(model: ViT, recompute: str | None = "block") -> ViT:
    """Choose whether activations are recomputed in the backward pass; the gradients are unchanged.

    Args:
        model: changed in place, and returned.
        recompute: `block` recomputes everything but the input of each block, which takes the least
            memory and a third more time; `None` recomputes nothing.

    Raises:
        SettingError: another name, or not a ViT.
    """
    if recompute not in ("block", None):
        raise SettingError(f"recompute {recompute!r} must be 'block' or None")
    check_type(model, ViT, "checkpoint_gradients", MODEL)
    # the encoder runs every block by this function where there is one
    model.run_block = encoder.recompute_block if recompute else None
    return model
