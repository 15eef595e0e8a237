"""Measure vitkit on a GPU beside timm: `benchmarks/gpu.sh` runs this script.

    python benchmarks/gpu.py [--only ceilings inference ...] [--models Ti S B L] [--blocks 7]
                             [--output gpu.json] [--compile-only] [--smoke]

Both libraries have the same weights; the script ends if their logits differ. All rows of a table
are timed in turn (A B B A) with the same inputs, which rotate, and compared by the ratio of medians
with a 95 % bootstrap interval. The row "again" is the first row timed twice: the noise. Eager and
compiled rows of both libraries are shown, and vitkit's engines in bfloat16. `--compile-only` makes
one call of every compiled row, which fills torch's cache on the disk. `--smoke` takes tiny models
and works without a GPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from datetime import date
from functools import partial
from pathlib import Path

import torch
from gpu_models import (
    NAMES,
    Inference,
    Setting,
    Training,
    compile_model,
    flops,
    images,
    pair,
    same_logits,
    timm,
)
from paired import Row, compared, in_turn, run, warm_up
from torch import nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import vitkit
from vitkit.engines.engine import SingleImageGraph, build_engine

Made = dict[str, object]
Builders = dict[str, Callable[[], Row]]
SIDES = ("timm", "vitkit")
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
            "efficient": SDPBackend.EFFICIENT_ATTENTION,
            "two products": SDPBackend.MATH}  # fmt: skip
BATCHES = 3
"""Batches that a row goes through: together they are larger than the cache."""


def allocated() -> int:
    return torch.cuda.memory_allocated() if torch.cuda.is_available() else 0


def build(builders: Builders) -> tuple[dict[str, Row], dict[str, float]]:
    """Make and warm up every row; return the rows and the peak memory of each in GB.

    The memory is what a call needs with the row's weights and optimizer, without the images. A row
    whose name has a comma shares the weights of another one, and its memory is not measured.
    """
    torch._dynamo.reset()  # it compiles a function at most eight times
    rows, peaks = {}, {}
    for name, builder in builders.items():
        before = allocated()
        row = rows[name] = builder()
        warm_up(row)
        if torch.cuda.is_available() and ", " not in name and not row.wait:
            torch.cuda.reset_peak_memory_stats()
            run(row, 2)
            peaks[name] = (torch.cuda.max_memory_allocated() - before) / 1e9
    return rows, peaks


def table(
    builders: Builders, setting: Setting, about: str, batch: int, work: float = 0.0
) -> dict[str, Made]:
    """Time the rows in turn, print them, and return all that was measured of each.

    `work` is the number of operations for one image, which gives "tflops".
    """
    rows, peaks = build(builders)
    # Where each call is waited for, the processor decides, and its times vary more.
    in_turn(rows, setting.blocks * (3 if next(iter(rows.values())).wait else 1))
    made = compared(rows)
    print(about, flush=True)
    for name, found in made.items():
        found["images_per_second"] = batch / found["seconds"]
        found["peak_gb"] = peaks.get(name)
        found["tflops"] = found["images_per_second"] * work / 1e12
        lines = [f"{found['seconds'] * 1e3:9.3f} ms {found['images_per_second']:9.0f} images/s"]
        for key in ("faster", "faster_than_compiled"):
            if key in found:
                lines.append("{:.3f} x [{:.3f}, {:.3f}]".format(*found[key]))
        if peaks.get(name):
            lines.append(f"{peaks[name]:.2f} GB")
        print(f"  {name:<26} {'  '.join(lines)}", flush=True)
    rows.clear()
    free()
    return made


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def ceilings(setting: Setting, _: list[str]) -> Made:
    """Measure the matrix product in bfloat16 and the copy that nothing on this GPU exceeds."""
    side = 256 if setting.smoke else 8192
    a, b = (torch.randn(side, side, device=setting.device).bfloat16() for _ in "ab")
    product = Row(lambda _: a @ b, 5)
    source = torch.randn(side * side, device=setting.device)
    target = torch.empty_like(source)
    move = Row(lambda _: target.copy_(source), 5)
    rows = {"product": product, "copy": move}
    for row in rows.values():
        warm_up(row)
    in_turn(rows, setting.blocks)
    made = compared(rows)
    found: Made = {
        "matrix_tflops": 2 * side**3 / made["product"]["seconds"] / 1e12,
        "copy_gb_per_second": 8 * side * side / made["copy"]["seconds"] / 1e9,
    }
    print("ceilings: " + ", ".join(f"{key} {value:.0f}" for key, value in found.items()))
    return found


def rows_of(
    models: dict[str, nn.Module], make: Callable[[nn.Module], Callable], setting: Setting
) -> Builders:
    """Return timm and vitkit, eager and compiled, and timm's eager row again, in another copy."""

    def eager(side: str) -> Row:
        return Row(make(copy.deepcopy(models[side])), setting.warm())

    def compiled(side: str) -> Row:
        model = copy.deepcopy(models[side])
        compile_model(model)
        return Row(make(model), setting.warm(compiled=True))

    rows: Builders = {f"{side} eager": partial(eager, side) for side in SIDES}
    rows |= {f"{side} compiled": partial(compiled, side) for side in SIDES}
    return rows | {"timm eager again": partial(eager, "timm")}


def inference_rows(name: str, setting: Setting) -> Builders:
    models = pair(name, setting)
    ours = copy.deepcopy(models["vitkit"])
    for model in models.values():
        model.bfloat16()
    batches = [images(setting.batch(256), setting, n).bfloat16() for n in range(BATCHES)]

    def engine(kind: str) -> Row:
        made = build_engine(kind, ours, precision="bfloat16")
        return Row(Inference(made, batches), setting.warm(compiled=kind == "compile"))

    rows = rows_of(models, lambda model: Inference(model, batches), setting)
    rows["vitkit engine torch"] = partial(engine, "torch")
    if setting.device.type == "cuda":  # the smoke run compiles nothing
        rows["vitkit engine compiled"] = partial(engine, "compile")
    return rows


def inference(setting: Setting, chosen: list[str]) -> Made:
    """Time inference of 256 images with weights in bfloat16."""
    made: Made = {}
    for key in chosen:
        logits = same_logits(NAMES[key], setting)
        builders = inference_rows(NAMES[key], setting)
        work = image_flops(key, setting)
        found = table(builders, setting, f"inference of {key}, {logits}", setting.batch(256), work)
        del builders
        made[key] = {"logits": logits, "flops": work, "rows": found}
        free()
    return made


def image_flops(key: str, setting: Setting) -> float:
    with torch.device("meta"):
        model = vitkit.create_model(NAMES[key], image_size=setting.size, **setting.shape)
    return flops(model, setting.size)


def training_rows(name: str, setting: Setting) -> Builders:
    models, count = pair(name, setting), setting.batch(256)
    batches = [images(count, setting, n) for n in range(BATCHES)]
    labels = torch.arange(count, device=setting.device) % 10
    return rows_of(models, lambda model: Training(model, batches, labels), setting)


def training(setting: Setting, chosen: list[str]) -> Made:
    """Time a training step of 256 images under bfloat16 autocast."""
    made: Made = {}
    for key in [key for key in chosen if key != "L"]:
        builders = training_rows(NAMES[key], setting)
        steps: list[Training] = []

        def read(builder: Callable[[], Row] = builders["vitkit compiled"],
                 steps: list[Training] = steps) -> Row:  # fmt: skip
            row = builder()
            steps.append(row.call)
            return row

        def reading(steps: list[Training] = steps) -> Row:
            step = copy.copy(steps[0])  # the same model and optimizer
            step.reads = True
            return Row(step, setting.warm())

        builders |= {"vitkit compiled": read, "vitkit compiled, loss read": reading}
        work = 3 * image_flops(key, setting)
        found = table(builders, setting, f"training of {key}", setting.batch(256), work)
        steps.clear()
        del builders, read, reading
        made[key] = {"flops": work, "rows": found}
        free()
    return made


def latency_rows(name: str, setting: Setting) -> Builders:
    models = pair(name, setting)
    ours = copy.deepcopy(models["vitkit"])
    for model in models.values():
        model.bfloat16()
    batches = [images(1, setting, n).bfloat16() for n in range(BATCHES)]
    made: Builders = {}

    def eager(side: str) -> Row:
        return Row(Inference(models[side], batches), setting.warm(), wait=True)

    def graph(side: str) -> Row:
        forward = SingleImageGraph(models["timm"])  # vitkit's engine has it already
        if side == "vitkit":
            forward = build_engine("torch", ours, precision="bfloat16")
        with torch.inference_mode():
            for _ in range(2):  # the second image makes the graph
                forward(batches[0])
        return Row(Inference(forward, batches), setting.warm(), wait=True)

    def compiled() -> Row:
        model = copy.deepcopy(models["vitkit"])
        compile_model(model, "reduce-overhead")
        return Row(Inference(model, batches), setting.warm(compiled=True), wait=True)

    made |= {f"{side} eager": partial(eager, side) for side in SIDES}
    if setting.device.type == "cuda":
        made |= {f"{side} graph": partial(graph, side) for side in SIDES}
    return made | {"vitkit compiled": compiled, "timm eager, again": partial(eager, "timm")}


def latency(setting: Setting, chosen: list[str]) -> Made:
    """Time one image at a time; "compiled" has CUDA graphs (`mode="reduce-overhead"`)."""
    return {
        key: table(latency_rows(NAMES[key], setting), setting, f"one image, {key}", 1)
        for key in chosen if key != "L"
    }  # fmt: skip


def attention(setting: Setting, chosen: list[str]) -> Made:
    """Time vitkit's inference with each of torch's attention kernels."""
    made: Made = {}
    for key in [key for key in chosen if key in ("Ti", "B")]:
        model = pair(NAMES[key], setting)["vitkit"].bfloat16()
        batches = [images(setting.batch(256), setting, n).bfloat16() for n in range(BATCHES)]
        around = {name: partial(sdpa_kernel, kernel) for name, kernel in BACKENDS.items()}
        if setting.device.type == "cpu":
            del around["cuDNN"], around["efficient"]

        def row(how: Callable = nullcontext, model: nn.Module = model,
                batches: list = batches) -> Row:  # fmt: skip
            return Row(Inference(model, batches, how), setting.warm())

        builders: Builders = {"torch's choice": row}
        builders |= {name: partial(row, how) for name, how in around.items()}
        made[key] = table(builders | {"torch's choice again": row}, setting,
                          f"attention kernels, {key}", setting.batch(256))  # fmt: skip
        del model, batches, builders, row
        free()
    return made


def stem(setting: Setting, chosen: list[str]) -> Made:
    """Time vitkit's inference with the patches' matrix as it is, and as torch's convolution."""
    made: Made = {}
    for key in [key for key in chosen if key in ("Ti", "B")]:
        models = {name: pair(NAMES[key], setting)["vitkit"].bfloat16()
                  for name in ("as it is", "convolution", "as it is again")}  # fmt: skip
        plain = models["convolution"].patch_embed
        made_of = plain.proj
        plain.proj = nn.Conv2d(3, made_of.out_channels, made_of.kernel_size, made_of.stride)
        plain.proj.load_state_dict(made_of.state_dict())
        plain.proj.to(made_of.weight)
        batches = [images(setting.batch(256), setting, n).bfloat16() for n in range(BATCHES)]
        rows = {name: partial(Row, Inference(model, batches), setting.warm())
                for name, model in models.items()}  # fmt: skip
        made[key] = table(rows, setting, f"patches of {key}", setting.batch(256))
        del models, plain, made_of, batches, rows
        free()
    return made


def checkpointing(setting: Setting, chosen: list[str]) -> Made:
    """Time and measure training steps of vitkit's B with activation checkpointing."""
    made: Made = {}
    for size in (64, 128, 256) if "B" in chosen else ():
        count = setting.batch(size)
        batches = [images(count, setting, n) for n in range(BATCHES)]
        labels = torch.arange(count, device=setting.device) % 10
        source = pair(NAMES["B"], setting)["vitkit"]

        def row(recompute: str | None, source: nn.Module = source, batches: list = batches,
                labels: torch.Tensor = labels) -> Row:  # fmt: skip
            model = vitkit.checkpoint_gradients(copy.deepcopy(source), recompute)
            return Row(Training(model, batches, labels), setting.warm())

        names = {"nothing recomputed": None, "block": "block"}
        made[str(count)] = table({name: partial(row, how) for name, how in names.items()},
                                 setting, f"training of B, {count} images", count)  # fmt: skip
        del source, batches, labels, row
        free()
    return made


def kernels(setting: Setting, chosen: list[str]) -> Made:
    """List the kernels in which timm's and vitkit's eager rows spend their time."""
    made: Made = {}
    kinds = {"inference": inference_rows, "training": training_rows, "latency": latency_rows}
    for kind, make in kinds.items() if "B" in chosen else ():
        builders = make(NAMES["B"], setting)
        for side in SIDES:
            row = builders[f"{side} eager"]()
            warm_up(row)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                run(row, 3)
            events = [e for e in seen.key_averages() if e.device_type == DeviceType.CUDA]
            events.sort(key=lambda event: -event.self_device_time_total)
            total = sum(event.self_device_time_total for event in events) / 3e3
            count = sum(event.count for event in events) / 3
            made[f"{kind} {side}"] = {
                "ms": total, "kernels": count,
                "slowest": [[e.key[:110], e.self_device_time_total / 3e3, e.count / 3]
                            for e in events[:14]],
            }  # fmt: skip
            print(f"{side} eager, {kind} of B: {total:.2f} ms in {count:.0f} kernels", flush=True)
            for name, taken, often in made[f"{kind} {side}"]["slowest"]:
                print(f"  {taken:8.3f} ms {often:5.0f}  {name}")
            del row
            free()
        del builders
    return made


PARTS = {"ceilings": ceilings, "inference": inference, "training": training, "latency": latency,
         "kernels": kernels, "stem": stem, "attention": attention,
         "checkpointing": checkpointing}  # fmt: skip
ROWS = {"inference": inference_rows, "training": training_rows, "latency": latency_rows}


def compile_only(setting: Setting, parts: list[str], chosen: list[str]) -> None:
    """Call the compiled rows once, so that torch's cache has their kernels."""
    for part in parts:
        for key in chosen:
            for name, builder in ROWS[part](NAMES[key], setting).items():
                if "compiled" in name:
                    row = builder()
                    row.warm = 1
                    warm_up(row)
                    print(f"{part} of {key}, {name}: {row.warm_seconds:.0f} s", flush=True)


def about(device: torch.device) -> Made:
    """Return what the figures were measured with."""
    found: Made = {"date": str(date.today()), "python": platform.python_version(),
                   "torch": torch.__version__, "timm": timm.__version__}  # fmt: skip
    if device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cudnn": torch.backends.cudnn.version(),
                  "state": gpu_state()}  # fmt: skip
    return found


def gpu_state() -> str:
    """Return driver, clocks and temperature at this moment."""
    asked = "driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure vitkit and timm on a GPU.")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=[*NAMES])
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--output", type=Path, default=Path("gpu.json"))
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.smoke:
        raise SystemExit("there is no GPU here; --smoke works without one")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    setting = Setting(device, args.smoke, args.blocks)
    if args.compile_only:
        compile_only(setting, args.only, args.models)
        return
    results: Made = {"about": about(device)}
    for part in args.only:
        results[part] = PARTS[part](setting, args.models)
        args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if device.type == "cuda":
        results["state_at_the_end"] = gpu_state()
    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
