"""`vitkit plan MODEL|CHECKPOINT`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, cast

import tyro
from tyro.conf import Positional, Suppress

from vitkit.cli.parsing.command import Command, describe_function
from vitkit.cli.parsing.fields import as_flags, take_fields
from vitkit.cli.parsing.words import read_words
from vitkit.cli.plan.request import (
    Request,
    arithmetic_of,
    check_request,
    device_of,
    measure_ways,
    spec_of,
)
from vitkit.cli.plan.table import Measured, plan_as_json, plan_lines
from vitkit.cli.printing.columns import fold, terminal_width
from vitkit.cli.train import FIELDS
from vitkit.planning.estimate import Schedule, check_batch, estimates
from vitkit.planning.memory import OptimizerName, Parallel, Training
from vitkit.planning.sizes import check_planned

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
    _print_plan(Request(**locals()))


def describe(_: Sequence[str] = ()) -> Command:
    """Describe the verb."""
    return describe_function("plan", plan_command, examples=EXAMPLES, extra=[FIELDS])


def run(arguments: list[str]) -> None:
    """Parse the arguments and print the plan."""
    rest, spec = take_fields(read_words(describe(), arguments).ordered)
    with as_flags("img_size"), as_flags(*spec, group="spec."):
        tyro.cli(partial(plan_command, spec=spec), args=rest, prog="vitkit plan")


def _print_plan(request: Request) -> None:
    check_request(request)
    check_batch(request.batch, request.gpus)
    spec = spec_of(request.model, request.img_size, request.spec or {})
    check_planned(spec)
    training = Training(
        spec=spec,
        optimizer=cast("OptimizerName", request.opt),
        arithmetic=arithmetic_of(spec, request.amp, request.attention_kernel, request.gpu),
        ema=request.model_ema,
        devices=request.gpus,
    )
    schedule = Schedule(batch_size=request.batch, images=request.images, epochs=request.epochs)
    device, rates = device_of(request.gpu, training, request.batch)
    ways: tuple[Parallel, ...] = ("ddp", "fsdp")
    if request.parallel != "both":
        ways = (cast("Parallel", request.parallel),)
    elif request.opt == "muon":
        ways = ("ddp",)  # Muon needs whole matrices
    again = (True,) if request.grad_checkpointing else (False, True)
    found = estimates(
        training, schedule, device, rates, ways=ways, recompute=again, compiled=request.compile
    )
    measured: Measured = {}
    if request.measure:
        measured = measure_ways(training, request.batch, found, rates)
    if request.json:
        text = plan_as_json(request.model, training, schedule, device, found, measured)
        sys.stdout.write(text)
        return
    width = terminal_width()
    for line in plan_lines(request.model, training, schedule, device, found, measured):
        sys.stdout.write(f"{fold(line, width)}\n")
