"""Measure what int8 costs in accuracy: a trained model on test images, by class.

    python benchmarks/int8.py --data-root DIR

The checkpoint of the tutorial on the test images of CIFAR-10 (cifar-10-batches-bin in DIR), in
float32 by torch and in int8 by OpenVINO, calibrated on 300 images of the train split: the share of
images with the same class, top-1, and the largest fall of a class. The results are added to
benchmarks/results/engines-<processor>-<date>.json. The script does not pass or fail.
"""

from __future__ import annotations

import argparse
from datetime import date
from pathlib import Path

import numpy as np
from demo import write_results

import vitkit

CHECKPOINT = Path(__file__).parents[1] / "docs/tutorial/checkpoints/cifar10.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-root", required=True)
    args = parser.parse_args()
    options = vitkit.EngineOptions(
        engine="openvino", precision="int8", calibrate="cifar10", data_root=args.data_root,
        report=print,
    )  # fmt: skip
    plain = vitkit.evaluate(CHECKPOINT, "cifar10", data_root=args.data_root)
    quantised = vitkit.evaluate(CHECKPOINT, "cifar10", data_root=args.data_root, engine=options)
    same = plain.predicted == quantised.predicted
    falls = {
        before.name: 100 * (before.accuracy - after.accuracy)
        for before, after in zip(plain.per_class, quantised.per_class, strict=True)
    }
    first = np.arange(0, len(same), len(same) // 1000)[:1000]
    found = {
        "images": len(same),
        "same_class": float(same.mean()),
        "same_class_of_1000": float(same[first].mean()),
        "top1_float32": plain["top1"],
        "top1_int8": quantised["top1"],
        "largest_fall_of_a_class_in_points": max(falls.values()),
        "falls_in_points": falls,
    }
    for key, value in found.items():
        print(f"{key}: {value}")
    write_results("engines-", {"date": date.today().isoformat(), "int8 on CIFAR-10": found})


if __name__ == "__main__":
    main()
