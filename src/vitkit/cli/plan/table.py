"""The lines and the JSON of `vitkit plan`."""

from __future__ import annotations

import json as json_text
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from vitkit.cli.printing.columns import align, fold, terminal_width
from vitkit.messages import short_number
from vitkit.planning.estimate import Schedule, Way
from vitkit.planning.flops import forward_flops, training_flops
from vitkit.planning.hardware import GB, SPARE_GB, Hardware
from vitkit.planning.memory import Training, largest_batch
from vitkit.planning.sizes import count_parameters

Measured = dict[str, tuple[float, float]]
"""What was measured -> the number of the formula, and the measured one."""


def title_of(way: Way, devices: int) -> str:
    name = "no checkpointing" if devices == 1 else way.parallel.upper()
    if way.recompute:
        return "checkpointing" if devices == 1 else f"{name}, chkpt"
    return name


def plan_as_json(
    model: str,
    training: Training,
    schedule: Schedule,
    device: Hardware,
    ways: list[Way],
    measured: Measured,
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


def plan_lines(
    model: str,
    training: Training,
    schedule: Schedule,
    device: Hardware,
    ways: list[Way],
    measured: Measured,
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
            yield fold(_too_large(way, schedule, training, device), terminal_width())
    for name, (formula, real) in measured.items():
        yield f"{name}: formula {formula:.4g}, measured {real:.4g} ({formula / real:.2f})"
    if not measured and training.arithmetic.on_gpu:
        yield "Speed: shares of the data sheet, measured on an H100. On an H200 large steps"
        yield "agreed within 25 %, and small ones took 0.4 to 0.8 of the time. Exchanges"
        yield "between GPUs were not measured; see docs/scaling.md."


def _rows(
    training: Training, schedule: Schedule, device: Hardware, ways: list[Way]
) -> list[list[str]]:
    titles = [title_of(way, training.devices) for way in ways]
    rows = [["GB on each", *titles]]
    labels = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer",
              "ema": "average (EMA)", "copies": "copies of weights", "images": "images",
              "activations": "activations", "temporary": "temporary",
              "peak": "at most at once"}  # fmt: skip
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
    rows.append(["images/s", *(short_number(way.images_per_second) for way in ways)])
    unit, of_a_day = ("days", 1) if max(way.days for way in ways) >= 1 else ("hours", 24)
    times = (short_number(of_a_day * way.days) for way in ways)
    rows.append([f"{unit}, {schedule.epochs:,} epochs", *times])
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
    name = title_of(way, training.devices)
    text = (
        f"{name} does not fit: {way.memory.peak / GB:,.1f} GB of {device.available / GB:,.0f} "
        f"({device.memory / GB:,.0f} GB, of which {SPARE_GB:.0f} are kept free); "
    )
    if not way.largest_batch:
        return text + "not even one image for each GPU does"
    text += f"the largest batch that does is {way.largest_batch:,}"
    # gradients of earlier micro-batches need room, too
    alike = replace(training, parallel=way.parallel, recompute=way.recompute)
    micro = largest_batch(alike, device.available, accumulated=True)
    if not micro:
        return text
    each = schedule.batch_size // training.devices
    # train divides a device's images into equal parts
    steps = next(n for n in range(1, each + 1) if each % n == 0 and each // n <= micro)
    return text + (
        f"; for {schedule.batch_size:,} images in a step pass --grad-accum-steps {steps} to train"
    )


def _giga(operations: int) -> str:
    return f"{operations / 1e9:,.3f}"
