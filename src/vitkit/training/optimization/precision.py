"""The arithmetic of a run: precision, attention kernel, and float16's loss scale."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch

from vitkit.errors import CheckpointError
from vitkit.models.attention import AttentionKernel
from vitkit.models.vit import ViT
from vitkit.training.state.registry import Tensors, Values

Precision = Literal["off", "bfloat16", "float16"]
LEAST_FLOPS, LEAST_FLOPS_GPU = 5e8, 5e10
"""Operations of an optimizer step, on a processor and on a GPU, below which autocast's conversions
cost more than its products save. The GPU's is an estimate (a millisecond of kernel launches at 50
TFLOP/s in float32), not a measurement."""
MOST_TOKENS = 1024
"""The longest sequence for which plain attention is chosen."""


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context a forward pass runs in."""
    if precision == "off":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


def half_precision(device: torch.device) -> Precision:
    """`bfloat16`, or `float16` on a GPU that has no bfloat16 of its own."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float16"
    return "bfloat16"


def choose_precision(model: ViT, batch_size: int, device: torch.device) -> tuple[Precision, str]:
    """Choose the precision of a run that leaves it open.

    The choice depends on the processor's features, the model and the batch size alone. Nothing is
    timed, so the same command on the same machine always makes the same choice.
    `benchmarks/arithmetic.py` has the measurements behind the numbers.

    Args:
        model: on any device.
        batch_size: images of one optimizer step, over all processes and accumulation steps.
        device: the one that the run trains on.

    Returns:
        The precision, and the reason in a few words.
    """
    half, kind = half_precision(device), "processor" if device.type == "cpu" else "device"
    if not has_fast_half(device):
        return "off", f"this {kind} is not known to be faster in {half}"
    flops = 6 * _num_tokens(model) * sum(p.numel() for p in model.parameters()) * batch_size
    if flops < (LEAST_FLOPS if device.type == "cpu" else LEAST_FLOPS_GPU):
        return "off", f"a step of {flops:.1g} operations is too small to gain from {half}"
    return half, f"this {kind} multiplies faster in {half}"


def choose_kernel(model: ViT, precision: Precision, device: torch.device) -> AttentionKernel:
    """Choose the attention kernel for a precision: fused, except for half precision on a processor.

    There torch's fused kernel is slower than the two matrix products written out. Above
    `MOST_TOKENS` tokens it is not, and plain attention's maps would take most of the memory.
    """
    half_on_cpu = device.type == "cpu" and precision != "off"
    return "plain" if half_on_cpu and _num_tokens(model) <= MOST_TOKENS else "fused"


def _num_tokens(model: ViT) -> int:
    return model.spec.num_patches + model.spec.num_prefix_tokens


def has_fast_half(device: torch.device) -> bool:
    """Return whether matrix products in `half_precision(device)` are known to be faster.

    Every CUDA device; processors with AMX (Intel), or AMD's with AVX512-BF16. Intel's without AMX
    were slower in bfloat16 than in float32 (0.62 times the speed), and others were not measured.
    """
    if device.type != "cpu":
        return device.type == "cuda"
    features: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    amd = str(features.get("cpu_name", "")).startswith("AMD")
    return bool(features.get("amx_bf16") or (amd and features.get("avx512_bf16")))


class LossScale:
    """Keeps float16's small gradients from becoming zeros: loss times scale, gradient over scale.

    "Mixed Precision Training" (arXiv 1710.03740), Sec. 3.2, with the numbers of torch's
    `GradScaler`, whose step knows neither Muon's views nor the parts of sharded weights. Every
    scale is a power of two, so scaling itself rounds nothing.

    Attributes:
        scale: the factor.
        good: steps since it last changed.
    """

    FIRST, LOWEST, PATIENCE = 2.0**16, 1.0, 2000

    def __init__(self) -> None:
        self.scale, self.good = self.FIRST, 0

    def fitted(self) -> None:
        """A gradient was finite: after `PATIENCE` of them in a row, try twice the scale."""
        self.good += 1
        if self.good == self.PATIENCE:
            self.scale, self.good = self.scale * 2, 0

    def lowered(self) -> bool:
        """A gradient was not finite: halve the scale; False where that cannot help."""
        if self.scale <= self.LOWEST:
            return False
        self.scale, self.good = self.scale / 2, 0
        return True

    def tensors(self) -> Tensors:
        """None."""
        return {}

    def values(self) -> Values:
        """Both numbers."""
        return {"scale": self.scale, "good": self.good}

    def restore(self, tensors: Tensors, values: Values) -> None:
        """Go on with both. Raises `CheckpointError`."""
        if values.keys() != {"scale", "good"}:
            raise CheckpointError(f"loss scale: stored as {values}")
        self.scale, self.good = float(values["scale"]), int(values["good"])


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
