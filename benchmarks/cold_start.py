"""Measure how long `vitkit predict` takes for one image with an engine that is chosen already.

    python benchmarks/cold_start.py [--rounds 7]

A ViT-Ti/16 of random weights and one photograph. Beside the command, in turn, a Python process
that only imports the runtime and torch: the difference is vitkit's own. The results are added to
benchmarks/results/engines-<processor>-<date>.json. The script does not pass or fail.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
from demo import write_results
from PIL import Image

import vitkit
from vitkit.benchmarking.statistics import turn_order

IMPORTS = {"torch": "import torch", "openvino": "import torch, openvino",
           "onnxruntime": "import torch, onnxruntime"}  # fmt: skip


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"VITKIT_CACHE": str(folder / "cache"), "ORT_DISABLE_TELEMETRY": "1"}
        model = vitkit.create_model("vit_tiny_patch16_224")
        checkpoint = str(vitkit.save(folder / "ti.safetensors", model,
                                     preprocess=vitkit.Preprocess()))  # fmt: skip
        photo = np.random.default_rng(0).integers(0, 256, (375, 500, 3), np.uint8)
        Image.fromarray(photo).save(folder / "photo.jpg")
        words = [str(Path(sys.executable).with_name("vitkit")), "predict", checkpoint,
                 str(folder / "photo.jpg")]  # fmt: skip
        commands = {"auto": words}
        for engine, line in IMPORTS.items():
            commands[f"import {engine}"] = [sys.executable, "-c", line]
            commands[engine] = [*words, "--engine", engine]
        for command in commands.values():
            seconds(command)  # the trial is made here, and files come into memory
        times: dict[str, list[float]] = {key: [] for key in commands}
        for key in turn_order(commands, args.rounds):
            times[key].append(seconds(commands[key]))
    medians = {key: statistics.median(values) for key, values in times.items()}
    rows = {}
    for engine in ("auto", *IMPORTS):
        base = medians["import torch" if engine == "auto" else f"import {engine}"]
        rows[engine] = {"seconds": medians[engine], "beyond_imports": medians[engine] - base}
        print(
            f"{engine:<12} {medians[engine]:.2f} s, {medians[engine] - base:.2f} s beyond imports"
        )
    write_results("engines-", {"date": date.today().isoformat(), "cold start": rows})


if __name__ == "__main__":
    main()
