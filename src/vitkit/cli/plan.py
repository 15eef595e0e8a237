"""`vitkit plan MODEL|CHECKPOINT`."""

from __future__ import annotations

import itertools
import json as json_text
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, Suppress

from vitkit.cli.arguments import Command, describe_function
from vitkit.cli.output import fold, terminal_width
from vitkit.cli.parsing import as_flags, read_words, take_fields
from vitkit.cli.train import FIELDS
from vitkit.errors import SettingError
from vitkit.messages import short_number
from vitkit.models.presets import preset, table
from vitkit.other_names import usual_name
from vitkit.planning.estimate import GPU, estimate, find_gpu
from vitkit.planning.memory import (
    OptimizerName,
    Parallel,
    Training,
    count_parameters,
    forward_flops,
    training_flops,
)
from vitkit.spec import ViTSpec

EXAMPLES = (
    "vitkit plan vit_base_patch16_224 --gpus 8 --gpu h200 --batch-size 2048",
    "vitkit plan ViT-L/16 --gpu rtx4090 --batch-size 64 --img-size 384  # does it fit?",
    "vitkit plan vit_tiny_patch16_224 --gpu this  # the GPU of this machine",
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
    json: bool = False,
    spec: Suppress[dict[str, Any] | None] = None,
) -> None:
    """Estimate operations, memory, speed and days of a training before it is started.

    The formulas, their sources and how far they agree with measurements are in docs/scaling.md.

    Args:
        model: a model's name, or a checkpoint of any known format.
        gpus: number of GPUs.
        gpu: kind of GPU: h100, h200, a100-40, a100-80, l4, t4, rtx4090; or `this`, the first GPU
            of this machine.
        batch_size: images of a step on all GPUs; default 256 for each.
        epochs: passes over the images.
        images: images of the training split; the default is that of ImageNet-1k.
        img_size: image size in pixels; default the model's own.
        amp: mixed precision, as for train; auto uses it on every GPU.
        attention_kernel: one fused kernel, or two matrix products and a softmax; auto is fused.
        opt: optimizer.
        model_ema: keep an average of the weights.
        parallel: with several GPUs, DDP with the whole model in each, FSDP with a part, or both.
        grad_checkpointing: only with activation checkpointing of blocks; default: without and with.
        compile: with a compiled step, a share that was measured on an H100.
        json: print JSON.
        spec: fields of `ViTSpec`.
    """
    _print_plan(Namespace(**locals()))


def describe(_: Sequence[str] = ()) -> Command:
    """Describe the verb."""
    return describe_function("plan", plan_command, examples=EXAMPLES, extra=[FIELDS])


def run(arguments: list[str]) -> None:
    """Parse the arguments and print the plan."""
    rest, spec = take_fields(read_words(describe(), arguments).ordered)
    with as_flags("img_size"), as_flags(*spec, group="spec."):
        tyro.cli(partial(plan_command, spec=spec), args=rest, prog="vitkit plan")


def _print_plan(asked: Namespace) -> None:
    found, batch = find_gpu(asked.gpu), asked.batch_size
    gpus, opt, amp = asked.gpus, asked.opt, asked.amp
    if batch is None:
        batch = gpus * 256
    _check_numbers(gpus, batch, asked.epochs, asked.images)
    ways: list[Parallel] = ["ddp", "fsdp"] if asked.parallel == "both" else [asked.parallel]
    if opt == "muon" and ways == ["fsdp"] and gpus > 1:
        raise SettingError(
            "--opt muon needs whole matrices, and --parallel fsdp splits them; pass "
            "--parallel ddp or --opt adamw"
        )
    if opt == "muon" or gpus == 1:
        ways = ["ddp"]
    if amp == "auto":
        amp = "bfloat16" if found.has_bfloat16 else "float16"
    if amp == "bfloat16" and not found.has_bfloat16:
        raise SettingError(f"--amp bfloat16: {asked.gpu} has none; pass --amp float16 or off")
    run = Training(
        spec=_spec_of(asked.model, asked.img_size, asked.spec or {}),
        opt=opt,
        amp=amp,
        attention_kernel="plain" if asked.attention_kernel == "plain" else "fused",
        model_ema=asked.model_ema,
        gpus=gpus,
    )
    plan = _facts(asked.model, run, found)
    plan["schedule"] = {"batch_size": batch, "images": asked.images, "epochs": asked.epochs}
    plan["ways"], seen = [], asked.epochs * asked.images
    for way, again in itertools.product(
        ways, [True] if asked.grad_checkpointing else [False, True]
    ):
        one = replace(run, parallel=way, recompute=again)
        plan["ways"].append(estimate(one, found, batch, seen, compiled=asked.compile))
    if asked.json:
        sys.stdout.write(json_text.dumps(plan, indent=2) + "\n")
        return
    for line in (*_heading(plan, run), *_table(plan)):
        sys.stdout.write(f"{fold(line, terminal_width())}\n")


def _check_numbers(gpus: int, batch: int, epochs: int, images: int) -> None:
    """Refuse a schedule without a whole number of images for each GPU."""
    numbers = {"gpus": gpus, "batch-size": batch, "epochs": epochs, "images": images}
    for name, value in numbers.items():
        if value < 1:
            raise SettingError(f"--{name} {value}: must be 1 or more")
    below = min(batch, images) // gpus * gpus
    if batch > images:
        mend = f"pass --batch-size {below} or less" if below else f"pass --gpus {images} or less"
        raise SettingError(
            f"--batch-size {batch}: --images {images} do not fill one step of --gpus {gpus}; {mend}"
        )
    if batch % gpus:
        raise SettingError(
            f"--batch-size {batch}: must be divisible by --gpus {gpus}, as it is the images of a "
            f"step on all of them; the nearest: {below or gpus}"
        )


def _spec_of(model: str, img_size: int | None, fields: dict[str, Any]) -> ViTSpec:
    """Return the spec of a name or a checkpoint, whose weights are not read."""
    if img_size is not None:
        if img_size < 1:
            raise SettingError.about("img_size", img_size, "must be 1 or more")
        fields = fields | {"image_size": img_size}
    model = model if os.path.exists(model) else usual_name(model, table())
    # timm's names of models have neither a dot nor a slash
    if os.path.exists(model) or Path(model).suffix or "/" in model:
        from vitkit.weights.inspection import inspect

        spec = inspect(model).spec.replace(**fields)
    else:
        spec = preset(model, **fields)
    if spec.stem in ("resnet", "backbone"):
        raise SettingError(
            f"the stem {spec.stem!r} has a network before the patches, which the formulas of a "
            "plan leave out; pass a model with the stem convolution, linear or normed_linear"
        )
    return spec


def _facts(model: str, run: Training, gpu: GPU) -> dict[str, Any]:
    forward = forward_flops(run.spec)
    return {
        "model": model,
        "parameters": count_parameters(run.spec).total,
        "tokens": run.spec.num_patches + run.spec.num_prefix_tokens,
        "forward_flops": sum(forward),
        "forward_flops_by_part": forward._asdict(),
        "training_flops": training_flops(run),
        "training_flops_checkpointing": training_flops(replace(run, recompute=True)),
        "gpu": gpu.name,
        "gpus": run.gpus,
        "available_bytes": gpu.available,
        "amp": run.amp,
        "attention_kernel": run.attention_kernel,
        "opt": run.opt,
    }


def _heading(plan: dict[str, Any], run: Training) -> Iterator[str]:
    height, width = run.spec.image_size
    yield f"{plan['model']}: {plan['parameters'] / 1e6:,.2f} M parameters"
    yield f"an image: {height} x {width} pixels, {plan['tokens']:,} tokens"
    parts = {"": plan["forward_flops"]} | plan["forward_flops_by_part"]
    forward = [f"{part} {operations / 1e9:,.3f}".strip() for part, operations in parts.items()]
    yield f"GFLOP of an image, forward: {forward[0]} ({', '.join(forward[1:])})"
    training, again = plan["training_flops"], plan["training_flops_checkpointing"]
    yield f"in training: {training / 1e9:,.3f}, with checkpointing {again / 1e9:,.3f}"
    each = plan["schedule"]["batch_size"] // run.gpus
    yield f"{run.gpus} x {plan['gpu']}, {each:,} images on each in a step"
    precision, average = run.amp.replace("off", "float32"), ", EMA" * run.model_ema
    yield f"{precision}, {run.attention_kernel} attention, {run.opt}{average}"
    yield ""


def _table(plan: dict[str, Any]) -> Iterator[str]:
    """Yield the rows of the table, with a column for each way, and what does not fit."""
    ways, available = plan["ways"], f"{plan['available_bytes'] / 1e9:,.0f}"
    titles = ["checkpointing" if way["recompute"] else "no checkpointing" for way in ways]
    if plan["gpus"] > 1:
        titles = [way["parallel"].upper() + ", chkpt" * way["recompute"] for way in ways]
    rows = {"GB on each": titles}
    for part in ways[0]["memory"]:
        values = [way["memory"][part] / 1e9 for way in ways]
        if any(values):
            rows[part] = [f"{value:,.2f}" for value in values]
    rows[f"fits in {available} GB"] = ["yes" if way["fits"] else "no" for way in ways]
    rows["largest batch"] = [f"{way['largest_batch']:,}" for way in ways]
    rows["ms of a step"] = [f"{way['step']['total'] * 1e3:,.1f}" for way in ways]
    rows["images/s"] = [short_number(way["images_per_second"]) for way in ways]
    unit, parts = ("days", 1) if max(way["days"] for way in ways) >= 1 else ("hours", 24)
    epochs = f"{unit}, {plan['schedule']['epochs']:,} epochs"
    rows[epochs] = [short_number(parts * way["days"]) for way in ways]
    width = max(13, *(len(title) + 2 for title in titles))
    for label, cells in rows.items():
        yield f"{label:19}" + "".join(f"{cell:>{width}}" for cell in cells)
    yield ""
    for title, way in zip(titles, ways, strict=True):
        if not way["fits"]:
            peak, most = way["memory"]["peak"] / 1e9, way["largest_batch"]
            text = f"{title} does not fit: {peak:,.1f} GB of {available} (2 are kept free); "
            yield text + (
                f"the largest batch that does is {most:,}; for more images in a step pass "
                "--grad-accum-steps to train"
                if most
                else "not even one image for each GPU does"
            )
    yield (
        "Speed: shares of the data sheet, measured on an H100. On an H200 large steps agreed "
        "within 25 %, and small ones took 0.4 to 0.8 of the time; exchanges between GPUs are not "
        "counted; see docs/scaling.md."
    )
