"""Measure token merging (ToMe): its gain in time, and its cost in agreement and accuracy.

    OMP_NUM_THREADS=2 python benchmarks/token_merging.py [--only time agreement]
        [--engines torch openvino] [--r 8] [--blocks 6] [--data-root DIR]

`time`: a ViT-B/16 of random weights, 8 images of 224 pixels, float32, with and without merging in
each engine, in turn (A B B A); the table has the ratio of medians with a 95 % interval, and that
of multiply-adds, which bounds it. `agreement`: the checkpoint of the tutorial
(`docs/tutorial/checkpoints/cifar10.safetensors`) on the test images of CIFAR-10, with merging of r
patches a block: the share of images with the same first class as without, and top-1. It needs
cifar-10-batches-bin in the folder --data-root. The script does not pass or fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch
from demo import processor, write_results
from paired import Row, compared, in_turn, warm_up
from torch import nn

import vitkit

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from research.token_merging import compute_share, merge_tokens, tokens_per_layer  # noqa: E402

CHECKPOINT = ROOT / "docs/tutorial/checkpoints/cifar10.safetensors"
MERGED = (0, 1, 2, 4, 8)
"""Values of r for the agreement."""
BATCH = 250


def as_openvino(model: nn.Module, images: torch.Tensor, threads: int) -> Callable[[int], object]:
    """Return a call of a model that OpenVINO compiled for the CPU."""
    sys.modules["openvino_telemetry"] = None  # type: ignore[assignment]
    import openvino

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batch = {0: torch.export.Dim("batch")}
        program = torch.export.export(model, (images[:2],), dynamic_shapes=(batch,))
        converted = openvino.convert_model(program)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads,
                "NUM_STREAMS": 1}  # fmt: skip
    compiled = openvino.Core().compile_model(converted, "CPU", settings)
    return lambda _: compiled([images.numpy()])


def times(engines: list[str], r: int, blocks: int) -> dict[str, object]:
    """Time a ViT-B/16 with and without merging, in each engine."""
    torch.manual_seed(0)
    model = vitkit.create_model("vit_base_patch16_224").eval()
    models = {"plain": model, f"merge {r}": merge_tokens(model, r)}
    images = torch.randn(8, 3, 224, 224)
    threads = torch.get_num_threads()
    found: dict[str, object] = {
        "r": r,
        "threads": threads,
        "tokens": tokens_per_layer(model.spec, r),
        "multiply_adds_bound": 1 / compute_share(model, r),
    }
    for engine in engines:
        rows = {}
        for name, module in models.items():
            call = (lambda _, module=module: module(images)) if engine == "torch" else None
            rows[name] = Row(call or as_openvino(module, images, threads), warm=1)
            warm_up(rows[name])
        in_turn(rows, blocks)
        found[engine] = compared(rows)
        print(engine, found[engine], flush=True)
    return found


def agreement(data_root: Path) -> dict[str, object]:
    """Compare classes of CIFAR-10's test images with and without merging."""
    checkpoint = vitkit.load(CHECKPOINT)
    spec = checkpoint.model.spec
    classes, rows = {}, {}
    for r in MERGED:
        merged = merge_tokens(checkpoint.model.eval(), r)
        result = vitkit.evaluate(
            dataclasses.replace(checkpoint, model=merged), "cifar10", split="test",
            data_root=data_root, device="cpu", batch_size=BATCH,
        )  # fmt: skip
        classes[r] = result.predicted
        rows[str(r)] = {
            "tokens_after_last_block": tokens_per_layer(spec, r)[-1],
            "multiply_adds": compute_share(checkpoint.model, r),
            "agreement": float((classes[r] == classes[0]).mean()),
            "top1": result["top1"],
        }
        print(f"r = {r}: {rows[str(r)]}", flush=True)
    return {"images": len(classes[0]), "tokens": spec.num_patches, "depth": spec.depth, "r": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", nargs="+", choices=["time", "agreement"],
                        default=["time", "agreement"])  # fmt: skip
    parser.add_argument("--engines", nargs="+", choices=["torch", "openvino"],
                        default=["torch", "openvino"])  # fmt: skip
    parser.add_argument("--r", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--data-root", type=Path, default=Path("data"))
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results: dict[str, object] = {"processor": processor(), "date": str(date.today())}
    if "agreement" in args.only:
        results["agreement"] = agreement(args.data_root)
    if "time" in args.only:
        with torch.inference_mode():
            results["time"] = times(args.engines, args.r, args.blocks)
    write_results("token-merging-", results, args.output)


if __name__ == "__main__":
    main()
