"""Measure distillation: a small student alone, and the same student with a teacher.

    python benchmarks/distil.py [--seeds 0 1 2] [--teacher WEIGHTS] [--output FILE]
                                [-- FLAGS]

Fashion-MNIST. The teacher is the convolutional network of teacher.py, trained there or now; its own
time is not counted. Every seed is trained alone and then taught, by the same command but for the
teacher. Seconds are those of the whole command. With a teacher they hold its looking at every view,
which is done once and kept in the run folder; the ratio is told with it and without. Flags after --
go to every student; with --no-test among them the scores are of validation, to choose settings by.
Results go to FILE, or to benchmarks/results; nothing here is a pass or a fail.
"""

from __future__ import annotations

import argparse
import os
import re
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
TAUGHT = ["--distill-views", "8", "--distill-temperature", "1", "--distill-alpha", "1"]
"""Chosen on validation with seed 0: temperature 1 among 1, 2 and 4, without the labels; 48 epochs
of 8 views, worth 0.93 points, above 24 of 4, worth 0.55."""

LOOKED = re.compile(r"teacher: view .* in (\d+) s$", re.MULTILINE)


@dataclass(frozen=True)
class Trained:
    """The result of one command: its seconds, and those of them that the teacher took."""

    top1: float
    seconds: float
    looking: float


def score(weights: Path) -> float:
    """Test top-1, or that of validation where test was not read."""
    scores = vitkit.load(weights).metadata["metrics"]
    top1: float = scores.get("test", scores["val"])["top1"]
    return top1


def trained(output: Path, *flags: str) -> Trained:
    """One command."""
    seconds, _, _ = run(*TRAIN, *flags, "--output", str(output))
    looks = LOOKED.findall((output / "train.log").read_text())
    return Trained(
        score(output / "weights" / "best.safetensors"), seconds, sum(float(look) for look in looks)
    )


def spread(values: list[float]) -> dict[str, object]:
    """Mean, range and each."""
    return {"mean": mean(values), "range": max(values) - min(values), "each": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--teacher", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("flags", nargs="*")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, weights = Path(name), asked.teacher
        if weights is None:
            weights = folder / "teacher.pt"
            convolutional.train(weights, convolutional.EPOCHS)
        known = convolutional.score(weights, "val" if "--no-test" in asked.flags else "test")
        os.environ |= {convolutional.WEIGHTS: str(weights.resolve()), "PYTHONPATH": str(HERE)}
        runs = []
        for seed in asked.seeds:
            flags = [*STUDENT, "--seed", str(seed), *asked.flags]
            one = trained(folder / f"alone-{seed}", *flags)
            two = trained(
                folder / f"taught-{seed}", *flags, "--teacher", "teacher:trained", *TAUGHT
            )
            print(f"seed {seed}: alone {one.top1:.4f} in {one.seconds:.0f} s, taught "
                  f"{two.top1:.4f} in {two.seconds:.0f} s, looking {two.looking:.0f}",
                  flush=True)  # fmt: skip
            runs.append((one, two))
    alone, taught = ([made[which].top1 for made in runs] for which in (0, 1))
    with_looks = median(two.seconds / one.seconds for one, two in runs)
    without = median((two.seconds - two.looking) / one.seconds for one, two in runs)
    print(f"teacher {known:.4f}, alone {mean(alone):.4f}, taught {mean(taught):.4f} "
          f"({100 * (mean(taught) - mean(alone)):+.2f} points), {with_looks:.2f}x the time, "
          f"{without:.2f}x with the teacher's looks kept")  # fmt: skip
    words = ["python benchmarks/distil.py", *["--"] * bool(asked.flags), *asked.flags]
    write_results("distil-", {
        "command": " ".join(words), "processor": processor(), "date": str(date.today()),
        "teacher": known, "alone": spread(alone), "taught": spread(taught),
        "time_ratio": with_looks, "time_ratio_kept": without,
        "student": STUDENT, "settings": TAUGHT, "flags": asked.flags,
    }, asked.output)  # fmt: skip


if __name__ == "__main__":
    main()
