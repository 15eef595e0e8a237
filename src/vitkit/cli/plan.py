"""`vitkit plan MODEL|CHECKPOINT`."""

from __future__ import annotations

import json as json_text
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, Suppress

from vitkit.cli.parsing.command import Command, describe_function
from vitkit.cli.parsing.fields import as_flags, take_fields
from vitkit.cli.parsing.words import read_words
from vitkit.cli.printing.columns import align, fold, terminal_width
from vitkit.cli.train import FIELDS
from vitkit.errors import SettingError
from vitkit.models.presets import preset, table
from vitkit.other_names import usual_name
from vitkit.planning.activations import Arithmetic
from vitkit.planning.estimate import Schedule, Way, check_batch, estimates
from vitkit.planning.flops import forward_flops, training_flops
from vitkit.planning.hardware import GB, SPARE_GB, THIS, Hardware, find_gpu
from vitkit.planning.memory import OptimizerName, Parallel, Training
from vitkit.planning.sizes import check_planned, count_parameters
from vitkit.planning.throughput import Rates, gpu_rates
from vitkit.spec import ViTSpec

IMAGES_OF_GPU, IMAGES_OF_PROCESSOR = 256, 8
"""Images of a device in a step, if no batch size is given."""
MAX_PLAIN = 1024
"""Tokens up to which `vitkit train` takes plain attention in half precision on a processor."""
EXAMPLES = (
    "vitkit plan vit_base_patch16_224 --gpus 8 --gpu h200 --batch-size 2048",
    "vitkit plan ViT-L/16 --gpu rtx4090 --batch-size 64 --img-size 384  # does it fit?",
    "vitkit plan vit_tiny_patch16_224 --gpu this --measure  # formula and this processor",
)


def plan_command(
    model: Positional[str],
    *,
    gpus: Annotated[int, tyro.conf.arg(aliases=("--devices",))] = 1,
    gpu: str = "h100",
    batch_size: Annotated[int | None, tyro.conf.arg(aliases=("--batch", "-b"))] = None,
    epochs: int = 300,
    images: int = 1_281_167,
    img_size: int | None = None,
    amp: Literal["auto", "off", "bfloat16", "float16"] = "auto",
    attention_kernel: Literal["auto", "fused", "plain"] = "auto",
    opt: OptimizerName = "adamw",
    model_ema: bool = False,
    parallel: Literal["both", "ddp", "fsdp"] = "both",
    grad_checkpointing: Literal["block"] | None = None,
    compile: bool = False,
    measure: bool = False,
    json: bool = False,
    spec: Suppress[dict[str, Any] | None] = None,
) -> None:
    """Estimate operations, memory, speed and days of a training before it is started.

    The formulas, their sources and how far they agree with measurements are in docs/scaling.md.

    Args:
        model: a model's name, or a checkpoint of any known format.
        gpus: number of GPUs.
        gpu: kind of GPU: h100, h200, a100-40, a100-80, l4, t4, rtx4090; or `this`, the processor
            of this machine, whose speed is measured in some seconds.
        batch_size: images of a step on all GPUs; default 256 for each, or 8 on a processor.
        epochs: passes over the images.
        images: images of the training split; the default is that of ImageNet-1k.
        img_size: image size in pixels; default the model's own.
        amp: mixed precision, as for train; auto uses it on every GPU.
        attention_kernel: one fused kernel, or two matrix products and a softmax, as for train.
        opt: optimizer.
        model_ema: keep an average of the weights.
        parallel: with several GPUs, DDP with the whole model in each, FSDP with a part, or both.
        grad_checkpointing: only with activation checkpointing of blocks; default: without and with.
        compile: with a compiled step, a share that was measured on an H100.
        measure: with --gpu this, also make training steps here and compare them with the formulas.
        json: print JSON.
        spec: fields of `ViTSpec`.
    """
    on_gpu = gpu != THIS
    if on_gpu:
        find_gpu(gpu)  # a name that does not exist is refused first
    check_counts(gpus=gpus, epochs=epochs, images=images)
    if not on_gpu and gpus > 1:
        raise SettingError(f"--gpus {gpus}: --gpu this is one processor; leave --gpus out")
    if not on_gpu and compile:
        raise SettingError(
            "--compile: its gain was measured on a GPU; leave it out with --gpu this"
        )
    if measure and on_gpu:
        raise SettingError(
            f"--measure: makes steps on this processor, not on {gpu}; add --gpu this"
        )
    batch_size = batch_size or _default_batch(batch_size, gpus, on_gpu)
    check_batch(batch_size, gpus)
    planned = _spec_of(model, img_size, spec or {})
    check_planned(planned)
    arithmetic = _arithmetic(planned, amp, attention_kernel, gpu)
    training = Training(
        spec=planned, optimizer=opt, arithmetic=arithmetic, ema=model_ema, devices=gpus
    )
    schedule = Schedule(batch_size=batch_size, images=images, epochs=epochs)
    device, rates = _device(gpu, training, batch_size)
    ways: tuple[Parallel, ...] = ("ddp", "fsdp") if parallel == "both" else (parallel,)
    again = (True,) if grad_checkpointing else (False, True)
    found = estimates(
        training, schedule, device, rates, ways=ways, recompute=again, compiled=compile
    )
    measured = _measured(training, batch_size, found, rates) if measure else {}
    if json:
        sys.stdout.write(_json(model, training, schedule, device, found, measured))
        return
    width = terminal_width()
    lines = _lines(model, training, schedule, device, found, measured)
    sys.stdout.write("".join(f"{fold(line, width)}\n" for line in lines))


def check_counts(**counts: int) -> None:
    """Raise `SettingError` for a count that is not at least 1, named as its flag."""
    for name, value in counts.items():
        if value < 1:
            raise SettingError(f"--{name} {value}: must be 1 or more")


def describe(_: Sequence[str] = ()) -> Command:
    """Describe the verb."""
    return describe_function("plan", plan_command, examples=EXAMPLES, extra=[FIELDS])


def run(arguments: list[str]) -> None:
    """Parse the arguments and print the plan."""
    rest, spec = take_fields(read_words(describe(), arguments).ordered)
    with as_flags("img_size"), as_flags(*spec, group="spec."):
        tyro.cli(partial(plan_command, spec=spec), args=rest, prog="vitkit plan")


def _default_batch(given: int | None, gpus: int, on_gpu: bool) -> int:
    if given is not None:
        raise SettingError(f"--batch-size {given}: must be 1 or more")
    return gpus * IMAGES_OF_GPU if on_gpu else IMAGES_OF_PROCESSOR


def _spec_of(model: str, img_size: int | None, fields: dict[str, Any]) -> ViTSpec:
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


def _arithmetic(spec: ViTSpec, amp: str, kernel: str, gpu: str) -> Arithmetic:
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


def _device(gpu: str, training: Training, images: int) -> tuple[Hardware, Rates]:
    """Return the facts of the device and its rates, measured where it is this processor."""
    if gpu != THIS:
        device = find_gpu(gpu)
        return device, gpu_rates(device, training.arithmetic)
    from vitkit.planning.hardware import memory_of_machine
    from vitkit.planning.measure import processor_rates

    rates = processor_rates(training, images)
    device = Hardware(
        name="this processor",
        half_tflops=rates.products / 1e12,
        full_tflops=rates.products / 1e12,
        bandwidth=rates.traffic,
        memory=memory_of_machine(),
        link=1.0,
        network=1.0,
    )
    return device, rates


def _measured(
    training: Training, images: int, ways: list[Way], rates: Rates
) -> dict[str, list[float]]:
    """Return seconds of a step and kept bytes of every way: by formula, and measured here."""
    from dataclasses import replace

    from vitkit.planning.activations import image_activations
    from vitkit.planning.measure import faster_of, kept_bytes, measured_step, processor_rates
    from vitkit.planning.memory import kept_copies
    from vitkit.planning.throughput import step_time

    # before and after the steps, so that a busy moment does not decide
    steps = []
    for way in ways:
        steps.append(measured_step(replace(training, recompute=way.recompute), images))
    rates = faster_of(rates, processor_rates(training, images))
    found: dict[str, list[float]] = {}
    for way, seconds in zip(ways, steps, strict=True):
        one = replace(training, recompute=way.recompute)
        formula = image_activations(training.spec, training.arithmetic).stored(way.recompute)
        title = _title(way, 1)
        found[f"{title}: seconds of a step"] = [step_time(one, images, rates).total, seconds]
        kept = images * formula + kept_copies(one)
        found[f"{title}: bytes kept for the backward pass"] = [kept, kept_bytes(one, images)]
    return found


def _title(way: Way, devices: int) -> str:
    name = "no checkpointing" if devices == 1 else way.parallel.upper()
    if way.recompute:
        return "checkpointing" if devices == 1 else f"{name}, chkpt"
    return name


def _json(
    model: str,
    training: Training,
    schedule: Schedule,
    device: Hardware,
    ways: list[Way],
    measured: dict[str, list[float]],
) -> str:
    spec = training.spec
    made: dict[str, Any] = {
        "model": model,
        "parameters": count_parameters(spec).total,
        "tokens": spec.num_patches + spec.num_prefix_tokens,
        "forward_flops": forward_flops(spec).total,
        "forward_flops_by_part": asdict(forward_flops(spec)),
        "training_flops": training_flops(spec),
        "training_flops_checkpointing": training_flops(spec, recompute=True),
        "gpu": device.name,
        "gpus": training.devices,
        "available_bytes": device.available,
        "amp": training.arithmetic.amp,
        "attention_kernel": training.arithmetic.kernel,
        "opt": training.optimizer,
        "schedule": asdict(schedule),
        "ways": [asdict(way) for way in ways],
    }
    if measured:
        made["measured"] = {
            name: {"formula": formula, "measured": real}
            for name, (formula, real) in measured.items()
        }
    return json_text.dumps(made, indent=2) + "\n"


def _lines(
    model: str,
    training: Training,
    schedule: Schedule,
    device: Hardware,
    ways: list[Way],
    measured: dict[str, list[float]],
) -> Iterator[str]:
    """Yield the lines of the plan, of at most 80 columns but for sentences."""
    spec, forward = training.spec, forward_flops(training.spec)
    height, across = spec.image_size
    tokens = spec.num_patches + spec.num_prefix_tokens
    millions = count_parameters(spec).total / 1e6
    yield f"{model}: {millions:,.2f} M parameters"
    yield f"an image: {height} x {across} pixels, {tokens:,} tokens"
    facts = [["GFLOP of an image"], ["forward", _giga(forward.total)]]
    for part, operations in asdict(forward).items():
        facts.append([f"  {part}", _giga(operations)])
    facts.append(["training", _giga(training_flops(spec))])
    facts.append(["  with checkpointing", _giga(training_flops(spec, recompute=True))])
    yield from _aligned(facts)
    yield ""
    each = schedule.batch_size // training.devices
    yield f"{training.devices} x {device.name}, {each:,} images on each in a step"
    amp = training.arithmetic.amp.replace("off", "float32")
    average = ", an average of the weights" * training.ema
    yield f"{amp}, {training.arithmetic.kernel} attention, {training.optimizer}{average}"
    yield ""
    yield from _aligned(_rows(training, schedule, device, ways))
    yield ""
    for way in ways:
        if not way.fits:
            yield _too_large(way, schedule, training, device)
    for name, (formula, real) in measured.items():
        yield f"{name}: formula {formula:.4g}, measured {real:.4g} ({formula / real:.2f})"
    if not measured and training.arithmetic.on_gpu:
        yield "Speed: shares of the data sheet that were measured on an H100. Other GPUs and"
        yield "exchanges between GPUs were not measured; see docs/scaling.md."


def _rows(
    training: Training, schedule: Schedule, device: Hardware, ways: list[Way]
) -> list[list[str]]:
    titles = [_title(way, training.devices) for way in ways]
    rows = [["GB on each", *titles]]
    labels = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer",
              "ema": "average (EMA)", "copies": "copies of weights", "activations": "activations",
              "temporary": "temporary", "peak": "at most at once"}  # fmt: skip
    for field, label in labels.items():
        values = [asdict(way.memory)[field] for way in ways]
        if any(values):
            rows.append([label, *(f"{value / GB:,.2f}" for value in values)])
    limit = f"fits in {device.available / GB:,.0f} GB"
    rows.append([limit, *("yes" if way.fits else "no" for way in ways)])
    rows.append(["largest batch", *(f"{way.largest_batch:,}" for way in ways)])
    rows.append(["ms of a step", *(f"{way.step.total * 1e3:,.1f}" for way in ways)])
    if training.devices > 1:
        rows.append(["  waiting", *(f"{way.step.waiting * 1e3:,.1f}" for way in ways)])
    rows.append(["images/s", *(f"{way.images_per_second:,.0f}" for way in ways)])
    rows.append([f"days, {schedule.epochs:,} epochs", *(f"{way.days:,.2f}" for way in ways)])
    return rows


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    """Yield the rows with numbers flush right; the first row is a heading."""
    most = max(map(len, rows))
    wide = [0] * most
    filled = [row + [""] * (most - len(row)) for row in rows]
    for row in filled:
        wide = [max(width, len(cell)) for width, cell in zip(wide, row, strict=True)]
    padded = []
    for row in filled:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], wide[1:], strict=True)]
        padded.append([row[0], *cells])
    yield from align(padded).splitlines()


def _too_large(way: Way, schedule: Schedule, training: Training, device: Hardware) -> str:
    """Return the sentence about a way that does not fit, with what does."""
    name = _title(way, training.devices)
    text = (
        f"{name} does not fit: {way.memory.peak / GB:,.1f} GB of {device.available / GB:,.0f} "
        f"({device.memory / GB:,.0f} without {SPARE_GB:.0f} to spare); "
    )
    if not way.largest_batch:
        return text + "not even one image for each GPU does"
    accumulate = -(-schedule.batch_size // way.largest_batch)
    return text + (
        f"the largest batch that does is {way.largest_batch:,}; for {schedule.batch_size:,} "
        f"images in a step pass --grad-accum-steps {accumulate} or more to train"
    )


def _giga(operations: int) -> str:
    return f"{operations / 1e9:,.3f}"
