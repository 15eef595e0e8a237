"""The settings of `vitkit plan`: checked, and with what `auto` means."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitkit.cli.plan.table import Measured, title_of
from vitkit.errors import SettingError
from vitkit.models.presets import preset, table
from vitkit.other_names import usual_name
from vitkit.planning.activations import Arithmetic, image_activations
from vitkit.planning.estimate import Way
from vitkit.planning.hardware import THIS, Hardware, find_gpu
from vitkit.planning.memory import Training, kept_copies
from vitkit.planning.throughput import Rates, gpu_rates, step_time
from vitkit.process import available_memory
from vitkit.spec import ViTSpec

IMAGES_OF_GPU, IMAGES_OF_PROCESSOR = 256, 8
"""Images of a device in a step, if no batch size is given."""
MAX_PLAIN = 1024
"""Tokens up to which `vitkit train` takes plain attention in half precision on a processor."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """The arguments of the verb, by their names there."""

    model: str
    gpus: int
    gpu: str
    batch_size: int | None
    epochs: int
    images: int
    img_size: int | None
    amp: str
    attention_kernel: str
    opt: str
    model_ema: bool
    parallel: str
    grad_checkpointing: str | None
    compile: bool
    measure: bool
    json: bool
    spec: dict[str, Any] | None

    @property
    def on_gpu(self) -> bool:
        """True for a GPU of the table."""
        return self.gpu != THIS

    @property
    def batch(self) -> int:
        """The images of a step on all devices."""
        if self.batch_size is not None:
            return self.batch_size
        return self.gpus * IMAGES_OF_GPU if self.on_gpu else IMAGES_OF_PROCESSOR


def check_request(request: Request) -> None:
    """Refuse arguments that do not go together, before anything slow.

    Raises:
        SettingError: names the flag.
    """
    if request.on_gpu:
        find_gpu(request.gpu)
    counts = {"gpus": request.gpus, "epochs": request.epochs, "images": request.images}
    for name, value in counts.items():
        if value < 1:
            raise SettingError(f"--{name} {value}: must be 1 or more")
    _check_images(request)
    if request.opt == "muon" and request.parallel == "fsdp" and request.gpus > 1:
        raise SettingError(
            "--opt muon needs whole matrices, and --parallel fsdp splits them; pass "
            "--parallel ddp or --opt adamw"
        )
    if request.on_gpu:
        if request.measure:
            raise SettingError(f"--measure: makes steps here, not on {request.gpu}; add --gpu this")
        return
    if request.gpus > 1:
        raise SettingError(f"--gpus {request.gpus}: --gpu this is one processor; leave --gpus out")
    if request.compile:
        raise SettingError("--compile: its gain is known for GPUs alone; leave it out")


def _check_images(request: Request) -> None:
    """Refuse a batch that all images of the training split do not fill."""
    batch, images, gpus = request.batch, request.images, request.gpus
    if batch <= images:
        return
    most = images // gpus * gpus
    mend = f"pass --batch-size {most} or less" if most else f"pass --gpus {images} or less"
    default = " (the default)" if request.batch_size is None else ""
    raise SettingError(
        f"--batch-size {batch}{default}: --images {images} do not fill one step of --gpus {gpus}; "
        f"{mend}"
    )


def spec_of(model: str, img_size: int | None, fields: dict[str, Any]) -> ViTSpec:
    """Return the spec of a name or a checkpoint, whose weights are not read."""
    if img_size is not None:
        if img_size < 1:
            raise SettingError.about("img_size", img_size, "must be 1 or more")
        fields = fields | {"image_size": img_size}
    model = model if os.path.exists(model) else usual_name(model, table())
    # timm's names of models have neither a dot nor a slash
    if not (os.path.exists(model) or Path(model).suffix or "/" in model):
        return preset(model, **fields)
    from vitkit.weights.inspection import inspect

    return inspect(model).spec.replace(**fields)


def arithmetic_of(spec: ViTSpec, amp: str, kernel: str, gpu: str) -> Arithmetic:
    """Return the arithmetic that `vitkit train` would choose where a flag says auto."""
    on_gpu = gpu != THIS
    if amp == "auto" and on_gpu:
        amp = "bfloat16" if find_gpu(gpu).has_bfloat16 else "float16"
    elif amp == "auto":
        from vitkit.planning.measure import has_fast_bfloat16

        amp = "bfloat16" if has_fast_bfloat16() else "off"
    if on_gpu and amp == "bfloat16" and not find_gpu(gpu).has_bfloat16:
        raise SettingError(f"--amp bfloat16: {gpu} has none; pass --amp float16 or off")
    if kernel == "auto":
        few = spec.num_patches + spec.num_prefix_tokens <= MAX_PLAIN
        kernel = "plain" if not on_gpu and amp != "off" and few else "fused"
    return Arithmetic(amp, kernel, on_gpu)  # type: ignore[arg-type]


def device_of(gpu: str, training: Training, images: int) -> tuple[Hardware, Rates]:
    """Return the facts of the device and its rates, measured where it is this processor."""
    if gpu != THIS:
        device = find_gpu(gpu)
        return device, gpu_rates(device, training.arithmetic)
    from vitkit.planning.measure import processor_rates

    rates = processor_rates(training, images)
    device = Hardware(
        name="this processor",
        half_tflops=rates.products / 1e12,
        full_tflops=rates.products / 1e12,
        bandwidth=rates.traffic,
        memory=float(available_memory()),
        link=1.0,
        network=1.0,
    )
    return device, rates


def measure_ways(training: Training, images: int, ways: list[Way], rates: Rates) -> Measured:
    """Return seconds of a step and kept bytes of every way: by formula, and measured here."""
    from vitkit.planning.measure import faster_of, kept_bytes, measured_step, processor_rates

    # before and after the steps, so that a busy moment does not decide
    steps = []
    for way in ways:
        steps.append(measured_step(replace(training, recompute=way.recompute), images))
    rates = faster_of(rates, processor_rates(training, images))
    found: Measured = {}
    for way, seconds in zip(ways, steps, strict=True):
        one = replace(training, recompute=way.recompute)
        formula = image_activations(training.spec, training.arithmetic).stored(way.recompute)
        title = title_of(way, 1)
        found[f"{title}: seconds of a step"] = (step_time(one, images, rates).total, seconds)
        kept = images * formula + kept_copies(one)
        found[f"{title}: bytes kept for the backward pass"] = (
            float(kept),
            float(kept_bytes(one, images)),
        )
    return found
