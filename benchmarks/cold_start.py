"""Measure how long `vitkit predict` takes for one image with an engine that is chosen already.

    python benchmarks/cold_start.py [--rounds 7]

A ViT-Ti/16 of random weights and one photograph. Beside the command, in turn, a Python process
that only imports torch, as the command does, and the runtime: the difference is vitkit's own. A
named engine has had its trial before; for one image `auto` is torch at once, without a trial. Times
are medians with quartiles, of two turns in each round. The results are added to
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
from versus import turn_order

import vitkit

TORCH = "from vitkit.process import uncollected_imports\nwith uncollected_imports(): import torch\n"
IMPORTS = {"torch": TORCH, "openvino": f"{TORCH}import openvino",
           "onnxruntime": f"{TORCH}import onnxruntime"}  # fmt: skip


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
    spread = {key: statistics.quantiles(values, n=4) for key, values in times.items()}
    rows = {}
    for engine in ("auto", *IMPORTS):
        low, middle, high = spread[engine]
        imports = spread["import torch" if engine == "auto" else f"import {engine}"]
        beyond = middle - imports[1]
        rows[engine] = {"seconds": middle, "quartiles": [low, high], "beyond_imports": beyond,
                        "imports": imports[1], "imports_quartiles": imports[::2]}  # fmt: skip
        print(f"{engine:<12} {middle:.2f} s [{low:.2f}, {high:.2f}], {beyond:.2f} s beyond "
              "imports of {1:.2f} s [{0:.2f}, {2:.2f}]".format(*imports))  # fmt: skip
    write_results("engines-", {"date": date.today().isoformat(), "cold start": rows})


if __name__ == "__main__":
    main()
