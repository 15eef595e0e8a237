"""Make checkpoints/cifar10.safetensors and its receipt cifar10.json from a finished run.

    vitkit train cifar10 --recipe cifar10-small --epochs 10 --data-root DIR --output RUN
    python docs/tutorial/publish_cifar10.py RUN

The run's settings name folders of the machine it ran on; the file that is published keeps all other
settings, the scores, the classes, the preprocessing and the temperature. The weights do not change.
The receipt says how the file was made, how long it took, and what the model scores.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

import vitkit
from vitkit.training.config.merging import read_yaml

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent / "benchmarks")]

from demo import processor  # noqa: E402

CHECKPOINT = HERE / "checkpoints" / "cifar10.safetensors"
OF_A_MACHINE = ("data_root", "output", "cache", "overwrite", "resume")
"""Settings that name folders, or how the command was called."""
OF_THE_FILE = ("format_version", "spec", "preprocess", "classes", "versions", "sha256")
"""Parts of the metadata that `vitkit.save` writes itself."""
THRESHOLDS = (0.0, 0.5, 0.7, 0.9)
DATA = {
    "data": "CIFAR-10, 60,000 labelled images of 32 x 32 pixels in ten classes",
    "data_source": "A. Krizhevsky: Learning Multiple Layers of Features from Tiny Images, 2009, "
    "https://www.cs.toronto.edu/~kriz/cifar.html",
    "data_licence": "the page states none and asks for a citation; no image of it is in the file",
    "licence": "Apache-2.0",
}


def main() -> None:
    run = Path(sys.argv[1])
    settings = read_yaml(run / "config.yaml")
    best = vitkit.load(run / "weights" / "best.safetensors")
    metadata = {k: v for k, v in best.metadata.items() if k not in OF_THE_FILE}
    metadata["recipe"] = {
        k: v for k, v in metadata["recipe"].items() if k not in OF_A_MACHINE
    }
    CHECKPOINT.parent.mkdir(exist_ok=True)
    vitkit.save(
        CHECKPOINT,
        best.model,
        preprocess=best.preprocess,
        classes=best.classes,
        **metadata | {"licence": DATA["licence"]},
    )
    receipt = about(run, settings, best) | scores(run) | DATA
    CHECKPOINT.with_suffix(".json").write_text(json.dumps(receipt, indent=1) + "\n")
    print(
        f"{CHECKPOINT.name}: {CHECKPOINT.stat().st_size:,} bytes, {receipt['sha256']}"
    )


def about(run: Path, settings: Any, best: vitkit.Checkpoint) -> dict[str, Any]:
    """Return how the file was made."""
    command = f"vitkit train {settings['data']} --recipe {settings['recipe']}"
    return {
        "file": CHECKPOINT.name,
        "sha256": hashlib.sha256(CHECKPOINT.read_bytes()).hexdigest(),
        "bytes": CHECKPOINT.stat().st_size,
        "parameters": sum(p.numel() for p in best.model.parameters()),
        "command": f"{command} --epochs {settings['epochs']} --seed {settings['seed']} "
        "--data-root DIR --output RUN",
        "published_by": "python docs/tutorial/publish_cifar10.py RUN",
        "processor": processor(),
        "threads": settings["threads"],
        "precision": settings["amp"],
        "torch": torch.__version__,
        "date": (run / "train.log").read_text()[: len("2026-01-01")],
        "seed": settings["seed"],
        "epochs": settings["epochs"],
    }


def scores(run: Path) -> dict[str, Any]:
    """Return the accuracies with their intervals, and what a threshold would do."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    best = max(epochs, key=lambda row: row["val_top1"])
    (test,) = [row for row in rows if row["kind"] == "test"]
    with (run / "predictions.csv").open(newline="") as file:
        predictions = list(csv.DictReader(file))
    thresholds = []
    for threshold in THRESHOLDS:
        kept = [row for row in predictions if float(row["probability"]) >= threshold]
        right = sum(row["label"] == row["predicted"] for row in kept)
        thresholds.append({
            "threshold": threshold,
            "answered": len(kept) / len(predictions),
            "right": right / len(kept),
        })  # fmt: skip
    return {
        "seconds": round(epochs[-1]["seconds"]),
        "best_epoch": best["epoch"],
        "val_top1": best["val_top1"],
        "val_images": 5000,
        "test_top1": test["test_top1"],
        "test_top1_95": [
            round(test["test_top1_low"], 4),
            round(test["test_top1_high"], 4),
        ],
        "test_images": test["test_images"],
        "thresholds_on_test": thresholds,
        "epochs_measured": [
            {key: row[key] for key in ("epoch", "train_loss", "val_top1", "seconds")}
            for row in epochs
        ],
    }


if __name__ == "__main__":
    main()
