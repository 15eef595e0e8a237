"""Hold the formulas of `vitkit plan` against measurements; docs/scaling.md quotes the tables.

    python benchmarks/scaling.py

Peak memory and steps are those that `benchmarks/gpu.py` measured on GPUs and wrote to
benchmarks/results; the bytes that autograd keeps for the backward pass are counted here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vitkit
from vitkit.data.augmentation.pipeline import ModelInputs
from vitkit.models.attention import use_attention
from vitkit.models.presets import preset
from vitkit.planning import (
    FULL,
    GPUS,
    HALF,
    Training,
    count_parameters,
    image_activations,
    step_time,
    training_memory,
)
from vitkit.training.optimization.losses import CrossEntropy
from vitkit.training.optimization.precision import checkpoint_gradients
from vitkit.training.step import Objective

RESULTS = Path(__file__).parent / "results"
NAMES = {"Ti": "vit_tiny_patch16_224", "S": "vit_small_patch16_224", "B": "vit_base_patch16_224"}


def gpu_cases() -> Iterator[tuple[str, str, Training, int, dict[str, Any]]]:
    """Yield GPU, model, run, images, and what was measured."""
    for path in sorted(RESULTS.glob("gpu-nvidia-*.json")):
        gpu = path.name.split("-")[2]
        results = json.loads(path.read_text(encoding="utf-8"))
        for name, model in NAMES.items():
            for how in ("eager", "compiled"):
                measured = results["training"][name]["rows"][f"vitkit {how}"]
                run = Training(spec=preset(model), compiled=how == "compiled")
                yield gpu, name, run, 256, measured
        for images, rows in results["checkpointing"].items():
            for row in ("nothing recomputed", "block"):
                run = Training(spec=preset(NAMES["B"]), recompute=row == "block")
                yield gpu, "B", run, int(images), rows[row]


def peak_without_images(run: Training, images: int) -> int:
    """Return the peak as it was measured: the images were there before."""
    memory = training_memory(run, images)
    return memory["peak"] - memory["images"]


def kept_by_formula(run: Training, images: int) -> int:
    """Return the bytes that autograd keeps by the end of the forward pass on this processor."""
    (total, block), each, depth = count_parameters(run.spec), image_activations(run), run.spec.depth
    copies = total - depth * block * run.recompute
    kept = each.outside + depth * (each.stream if run.recompute else each.block)
    # a processor's convolution in float32 keeps the images themselves, which are not counted
    if not run.mixed and run.spec.stem == "convolution":
        kept -= FULL * run.spec.in_channels * math.prod(run.spec.image_size)
    return images * kept + HALF * copies * run.mixed


def kept_bytes(run: Training, images: int) -> int:
    """Return the bytes that autograd keeps for the backward pass of a step on this processor.

    Counted by `torch.autograd.graph.saved_tensors_hooks`: the memory of all tensors that are kept,
    each piece once, without the model's own weights and the images.
    """
    model = checkpoint_gradients(vitkit.ViT(run.spec), "block" if run.recompute else None).train()
    use_attention(model, "fused")
    inputs = torch.randn(images, run.spec.in_channels, *run.spec.image_size)
    not_counted = [*model.parameters(), *model.buffers(), inputs]
    known = {tensor.untyped_storage().data_ptr() for tensor in not_counted}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage  # held, so that no other one gets its address
        return tensor

    amp = "bfloat16" if run.mixed else "off"
    objective = Objective(model, CrossEntropy(), amp, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        objective(ModelInputs(inputs, torch.zeros(images, dtype=torch.long)))
    return sum(storage.nbytes() for storage in kept.values())


def main() -> None:
    print("| what | memory, GB | ratio | time, ms | ratio |\n| --- | --- | --- | --- | --- |")
    for gpu, name, run, images, measured in gpu_cases():
        peak, real = peak_without_images(run, images) / 1e9, measured["peak_gb"]
        step = 1e3 * step_time(run, images, GPUS[gpu])["total"]
        seconds = 1e3 * measured["seconds"]
        what = f"{gpu}, {name}, {images} images" + ", compiled" * run.compiled
        what += ", checkpointing" * run.recompute
        print(f"| {what} | {peak:.2f} : {real:.2f} | {peak / real:.2f} "
              f"| {step:.1f} : {seconds:.1f} | {step / seconds:.2f} |")  # fmt: skip
    for name, model in NAMES.items():
        for images in (1, 4):
            for mixed, recompute in ((False, False), (False, True), (True, False)):
                run = Training(spec=preset(model), mixed=mixed, recompute=recompute)
                formula, real = kept_by_formula(run, images) / 1e9, kept_bytes(run, images) / 1e9
                what = f"kept here, {name}, {images} images" + ", bfloat16" * mixed
                what += ", checkpointing" * recompute
                print(f"| {what} | {formula:.3f} : {real:.3f} | {formula / real:.2f} | | |")


if __name__ == "__main__":
    main()
