"""Measure distillation: a small student alone, and the same student with a teacher.

    python benchmarks/distil.py [--seeds 0 1 2] [--teacher WEIGHTS] [--output FILE]
                                [-- FLAGS]

The data are Fashion-MNIST. The teacher is the convolutional network of teacher.py; without WEIGHTS
it is trained first, and its time is not counted. Each seed is trained alone and then with the
teacher, by the same command otherwise. Seconds are those of the whole command; with a teacher they
include its forward pass in every step. Flags after -- go to every student; with --no-test among
them the scores are those of validation, for choosing settings. Results go to FILE, or to
benchmarks/results; the script does not pass or fail.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, median

import teacher as convolutional
from demo import HERE, processor, run, write_results

import vitkit

TRAIN = [sys.executable, "-m", "vitkit", "train", "fashion-mnist", "--recipe", "fashion-mnist",
         "--quiet"]  # fmt: skip
STUDENT = ["--spec.width", "32", "--spec.depth", "2", "--spec.num-heads", "2", "--spec.mlp-width",
           "64", "--epochs", "48"]  # fmt: skip
WITH_TEACHER = ["--distill-temperature", "1", "--distill-alpha", "1"]
"""Chosen on validation with seed 0: temperature 1 among 1, 2 and 4, without the labels."""


@dataclass(frozen=True)
class Trained:
    """The result of one command, and its seconds."""

    top1: float
    seconds: float


def score(weights: Path) -> float:
    """Return the test top-1, or that of validation if the test split was not read."""
    scores = vitkit.load(weights).metadata["metrics"]
    top1: float = scores.get("test", scores["val"])["top1"]
    return top1


def trained(output: Path, *flags: str) -> Trained:
    """Train by one command."""
    seconds, _, _ = run(*TRAIN, *flags, "--output", str(output))
    return Trained(score(output / "weights" / "best.safetensors"), seconds)


def spread(values: list[float]) -> dict[str, object]:
    """Return mean, range and all values."""
    return {"mean": mean(values), "range": max(values) - min(values), "each": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("flags", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, weights = Path(name), args.teacher
        if weights is None:
            weights = folder / "teacher.pt"
            convolutional.train(weights, convolutional.EPOCHS)
        known = convolutional.score(weights, "val" if "--no-test" in args.flags else "test")
        os.environ |= {convolutional.WEIGHTS: str(weights.resolve()), "PYTHONPATH": str(HERE)}
        runs = []
        for seed in args.seeds:
            flags = [*STUDENT, "--seed", str(seed), *args.flags]
            one = trained(folder / f"alone-{seed}", *flags)
            two = trained(
                folder / f"taught-{seed}", *flags, "--teacher", "teacher:trained", *WITH_TEACHER
            )
            print(f"seed {seed}: alone {one.top1:.4f} in {one.seconds:.0f} s, with teacher "
                  f"{two.top1:.4f} in {two.seconds:.0f} s", flush=True)  # fmt: skip
            runs.append((one, two))
    alone, taught = ([made[which].top1 for made in runs] for which in (0, 1))
    with_teacher = median(two.seconds / one.seconds for one, two in runs)
    print(f"teacher {known:.4f}, alone {mean(alone):.4f}, with teacher {mean(taught):.4f} "
          f"({100 * (mean(taught) - mean(alone)):+.2f} points), "
          f"{with_teacher:.2f}x the time")  # fmt: skip
    words = ["python benchmarks/distil.py", *["--"] * bool(args.flags), *args.flags]
    write_results("distil-", {
        "command": " ".join(words), "processor": processor(), "date": str(date.today()),
        "teacher": known, "alone": spread(alone), "taught": spread(taught),
        "time_ratio": with_teacher,
        "student": STUDENT, "settings": WITH_TEACHER, "flags": args.flags,
    }, args.output)  # fmt: skip


if __name__ == "__main__":
    main()
