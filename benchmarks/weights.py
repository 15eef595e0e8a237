"""Measure checkpoints: converting ViT-B/16, inspecting a file of 2 GB.

    python benchmarks/weights.py [--only convert inspect] [--repeats 3]

Each conversion runs in its own process. The script measures the seconds of the call (without
imports) and the growth of resident memory beyond that of the imports. Both are relative to a
`copy`: reading the source and writing as much in the target's container once, by safetensors' or
numpy's functions with fsync, interleaved. The script does not pass or fail.
"""

from __future__ import annotations

import argparse
import json
import struct
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import median

import torch
from demo import processor, write_results

import vitkit

CHILD = """
import json, os, sys, time
import numpy, safetensors.torch, torch
import vitkit, vitkit.weights.convert
from pathlib import Path

def peak():
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) / 1e3

def copy(source, out):
    if source.endswith(".npz"):
        with numpy.load(source) as file:
            arrays = {name: file[name] for name in file}
        tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    else:
        tensors = safetensors.torch.load_file(source)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    if out.endswith(".npz"):
        numpy.savez(out, **arrays)
    else:
        safetensors.torch.save_file(tensors, out)
    handle = os.open(out, os.O_RDONLY)
    os.fsync(handle)

Path("/proc/self/clear_refs").write_text("5")
before, start = peak(), time.perf_counter()
source, out, to = sys.argv[1:]
if to == "copy":
    copy(source, out)
    result = {}
elif to == "inspect":
    vitkit.inspect(source)
    result = {}
else:
    report = vitkit.convert(source, out, to=to, allow_lossy=True)
    result = {"difference": report.max_difference, "proved_by": getattr(report, "proved_by", "")}
print(json.dumps({"seconds": time.perf_counter() - start, "mb": peak() - before, **result}))
"""
TARGETS = ("vitkit", "timm", "huggingface", "torchvision", "google", "jeonsworld", "deit",
           "lucidrains")  # fmt: skip
"""Formats that hold a ViT-B/16; lucidrains without the biases of query, key and value."""


def measured(source: Path, out: Path, to: str) -> dict[str, float]:
    """Run one conversion (or `copy`, `inspect`) in its own process."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, source, out, to], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{source} -> {to}: {done.stderr}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def conversions(repeats: int, origins: list[str]) -> dict[str, object]:
    """Convert from some formats to each one that holds a ViT-B/16."""
    rows: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        model = vitkit.create_model("vit_base_patch16_224")
        own = vitkit.save(folder / "own.safetensors", model, preprocess=vitkit.Preprocess())
        size = own.stat().st_size / 1e6
        sources = {"vitkit": own}
        for to in TARGETS[1:]:
            sources[to] = folder / to
            vitkit.convert(own, sources[to], to=to, allow_lossy=True)
        for origin in origins:
            source = sources[origin]
            for to in TARGETS:
                runs = [_pair(source, folder, to) for _ in range(repeats)]
                row = {
                    "seconds": median(run["seconds"] for run in runs),
                    "times_copy": median(run["seconds"] / run["copy"] for run in runs),
                    "times_size": max(run["mb"] for run in runs) / size,
                    "difference": runs[0]["difference"],
                    "proved_by": runs[0]["proved_by"],
                }
                rows[f"{origin} -> {to}"] = row
                print(f"{origin:>12} -> {to:<12} {row}", flush=True)
    return rows


def _pair(source: Path, folder: Path, to: str) -> dict[str, float]:
    ending = ".npz" if to == "google" else ".safetensors"
    whole = source if source.is_file() else next(source.glob("model.*"))
    with tempfile.TemporaryDirectory(dir=folder) as out:
        copied = measured(whole, Path(out) / f"copy{ending}", "copy")
        return measured(source, Path(out) / "made", to) | {"copy": copied["seconds"]}


def inspection(repeats: int) -> dict[str, float]:
    """Inspect a sparse file of 2 GB with timm's names: 26 blocks of width 1280, all zeros."""
    spec = vitkit.ViTSpec(width=1280, depth=26, num_heads=20, mlp_width=5120)
    with torch.device("meta"):
        tensors = vitkit.ViT(spec).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": "F32", "shape": list(tensor.shape),
            "data_offsets": [end, end := end + 4 * tensor.numel()],
        }  # fmt: skip
    text = json.dumps(header).encode()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
        runs = [measured(path, path, "inspect") for _ in range(repeats)]
        size = path.stat().st_size / 1e9
    seconds, memory = median(run["seconds"] for run in runs), max(run["mb"] for run in runs)
    return {"gigabytes": size, "seconds": seconds, "mb": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", nargs="+", choices=["convert", "inspect"],
                        default=["inspect", "convert"])  # fmt: skip
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--origins", nargs="+", choices=TARGETS, default=list(TARGETS))
    args = parser.parse_args()
    results: dict[str, object] = {"processor": processor(), "date": str(date.today())}
    if "inspect" in args.only:
        results["inspect"] = inspection(args.repeats)
        print(results["inspect"], flush=True)
    if "convert" in args.only:
        results["convert"] = conversions(args.repeats, args.origins)
    write_results("weights-", results)


if __name__ == "__main__":
    main()
