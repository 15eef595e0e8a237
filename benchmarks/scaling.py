"""Hold the formulas of `vitkit plan` against measurements; docs/scaling.md quotes the table.

    OMP_NUM_THREADS=1 python benchmarks/scaling.py [--only gpu memory steps] [--rounds 3]
                                                   [--output scaling.json]

`gpu` compares with the peak memory and the steps that `benchmarks/gpu.py` measured on an H100 and
wrote to benchmarks/results; `memory` with the bytes that autograd keeps here; `steps` with training
steps on this processor. Of several rounds of calibration and steps in turn, the fastest count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from datetime import date
from pathlib import Path

import torch

import vitkit
from vitkit.models.presets import preset
from vitkit.planning.activations import Arithmetic, image_activations
from vitkit.planning.hardware import GPUS
from vitkit.planning.measure import faster_of, kept_bytes, measured_step, processor_rates
from vitkit.planning.memory import Training, kept_copies, training_memory
from vitkit.planning.throughput import gpu_rates, step_time

RESULTS = Path(__file__).parent / "results"
NAMES = {"Ti": "vit_tiny_patch16_224", "S": "vit_small_patch16_224", "B": "vit_base_patch16_224"}
WITHIN = {"memory": 0.10, "step": 0.25}
SMALL = {
    "digits": vitkit.ViTSpec(image_size=8, patch_size=4, in_channels=1, num_classes=10, width=64,
                             depth=4, num_heads=4, mlp_width=128),
    "cifar": vitkit.ViTSpec(image_size=32, patch_size=4, num_classes=10, width=96, depth=4,
                            num_heads=3, mlp_width=192),
}  # fmt: skip
"""Models of a width that the recipes have."""
STEPS = [("digits", 128), ("cifar", 64), ("Ti", 4), ("Ti", 8), ("S", 4), ("B", 2)]
KEPT = [(name, images) for name in NAMES for images in (1, 4)]
Row = dict[str, object]


def row(kind: str, what: str, formula: float, measured: float) -> Row:
    ratio = formula / measured
    return {"kind": kind, "what": what, "formula": formula, "measured": measured, "ratio": ratio,
            "met": abs(ratio - 1) <= WITHIN[kind]}  # fmt: skip


def spec_of(name: str) -> vitkit.ViTSpec:
    return SMALL.get(name) or preset(NAMES[name])


def gpu_rows(_: int) -> list[Row]:
    """Compare with the training rows of measured GPUs: peak bytes, and seconds of a step."""
    made = []
    for path in sorted(RESULTS.glob("gpu-nvidia-*.json")):
        gpu = path.name.split("-")[2]
        rates = gpu_rates(GPUS[gpu], Arithmetic())
        results = json.loads(path.read_text(encoding="utf-8"))
        cases = []
        for name in NAMES:
            rows = results["training"][name]["rows"]
            for how in ("eager", "compiled"):
                cases.append((name, 256, False, how, rows[f"vitkit {how}"]))
        for images, rows in results["checkpointing"].items():
            cases.append(("B", int(images), False, "eager", rows["nothing recomputed"]))
            cases.append(("B", int(images), True, "eager, checkpointing", rows["block"]))
        for name, images, recompute, how, measured in cases:
            training = Training(spec=spec_of(name), recompute=recompute)
            what = f"{gpu.upper()}, {name}, {images} images, {how}"
            memory = training_memory(training, images)
            peak = memory.peak - memory.images  # measured without them
            made.append(row("memory", what, peak, measured["peak_gb"] * 1e9))
            step = step_time(training, images, rates, compiled=how == "compiled")
            made.append(row("step", what, step.total, measured["seconds"]))
    return made


def memory_rows(_: int) -> list[Row]:
    """Compare with the bytes that autograd keeps on this processor."""
    made = []
    for name, images in KEPT:
        for amp, recompute in (("off", False), ("off", True), ("bfloat16", False)):
            kernel = "fused" if amp == "off" else "plain"
            training = Training(spec=spec_of(name), arithmetic=Arithmetic(amp, kernel, False),
                                recompute=recompute)  # fmt: skip
            each = image_activations(training.spec, training.arithmetic).stored(recompute)
            formula = images * each + kept_copies(training)
            what = f"kept here, {name}, {images} images, {amp.replace('off', 'float32')}"
            what += ", checkpointing" * recompute
            made.append(row("memory", what, formula, kept_bytes(training, images)))
    return made


def step_rows(rounds: int) -> list[Row]:
    """Compare with steps on this processor, in float32."""
    made = []
    for name, images in STEPS:
        for recompute in (False, True):
            training = Training(spec=spec_of(name), arithmetic=Arithmetic("off", "fused", False),
                                recompute=recompute)  # fmt: skip
            rates = processor_rates(training, images)
            measured = measured_step(training, images)
            for _ in range(rounds - 1):
                rates = faster_of(rates, processor_rates(training, images))
                measured = min(measured, measured_step(training, images))
            what = f"step here, {name}, {images} images" + ", checkpointing" * recompute
            made.append(row("step", what, step_time(training, images, rates).total, measured))
            print(made[-1], flush=True)
    return made


PARTS = {"gpu": gpu_rows, "memory": memory_rows, "steps": step_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="Hold the formulas of a plan against facts.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("scaling.json"))
    args = parser.parse_args()
    about = {"date": str(date.today()), "python": platform.python_version(),
             "torch": torch.__version__, "threads": torch.get_num_threads(),
             "processor": platform.processor() or platform.machine(),
             "load": os.getloadavg()[0]}  # fmt: skip
    rows: list[Row] = []
    for part in args.only:
        rows += PARTS[part](args.rounds)
    text = json.dumps({"about": about, "rows": rows}, indent=1)
    args.output.write_text(text + "\n", encoding="utf-8")
    print("| what | formula | measured | ratio | target |\n| --- | --- | --- | --- | --- |")
    for one in rows:
        scale, unit = (1e-9, "GB") if one["kind"] == "memory" else (1e3, "ms")
        numbers = [f"{one[key] * scale:,.4g} {unit}" for key in ("formula", "measured")]
        target = f"{100 * WITHIN[one['kind']]:.0f} %: " + ("met" if one["met"] else "**missed**")
        print(f"| {one['what']} | {numbers[0]} | {numbers[1]} | {one['ratio']:.2f} | {target} |")


if __name__ == "__main__":
    main()
