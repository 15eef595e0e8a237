"""Train the model of the page "Draw a digit" again: `python scripts/digits_checkpoint.py`.

It trains the demo's model on the digits with seed 0, in less than a minute on two free cores, and
writes docs/tutorial/checkpoints/digits.safetensors with a receipt, digits.json, beside it. The same
versions, threads and kind of processor give the same weights; others give other last digits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

import vitkit

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "docs/tutorial/checkpoints/digits.safetensors"


def processor() -> str:
    """Return the processor's name and the number of cores."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {os.cpu_count()} cores"


def train() -> dict[str, object]:
    """Train, store the checkpoint, and return its receipt."""
    start = time.perf_counter()
    # the run is named within its folder: a checkpoint stores the settings of its run
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        result = vitkit.train(
            "digits", recipe="digits", val_fraction=0.0, seed=0, output="runs/digits"
        )
        shutil.copyfile(result.best, CHECKPOINT)
    test = result.metrics["test"]
    return {
        "command": "python scripts/digits_checkpoint.py",
        "call": 'vitkit.train("digits", recipe="digits", val_fraction=0.0, seed=0)',
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "vitkit": vitkit.__version__,
        "date": date.today().isoformat(),
        "seconds": round(time.perf_counter() - start, 1),
        "seed": 0,
        "parameters": sum(p.numel() for p in vitkit.load(CHECKPOINT).model.parameters()),
        "test_images": int(test["images"]),
        "test_top1": round(test["top1"], 4),
        "test_top1_95": [round(test["top1_low"], 4), round(test["top1_high"], 4)],
        "bytes": CHECKPOINT.stat().st_size,
        "sha256": hashlib.sha256(CHECKPOINT.read_bytes()).hexdigest(),
    }


def main() -> int:
    """Write the checkpoint and its receipt."""
    CHECKPOINT.parent.mkdir(exist_ok=True)
    receipt = json.dumps(train(), indent=2)
    CHECKPOINT.with_suffix(".json").write_text(receipt + "\n", encoding="utf-8")
    print(receipt)
    return 0


if __name__ == "__main__":
    sys.exit(main())
