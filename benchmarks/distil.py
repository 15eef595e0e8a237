"""What a teacher is worth: a small student alone, and the same student with a teacher.

    python benchmarks/distil.py [--seeds 0 1 2] [--teacher WEIGHTS] [-- FLAGS]

Fashion-MNIST. The teacher, where none is given, is the recipe's model, wider, trained longer; its
own time is told and not counted. Every seed is trained alone and then taught, by the same command
but for the teacher; the seconds are those of the whole command, and with a teacher they hold its
looking at every view. Flags after -- go to every student. Results go to benchmarks/results; nothing
here is a pass or a fail.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

from demo import run, write_results

import vitkit

TRAIN = [sys.executable, "-m", "vitkit", "train", "fashion-mnist", "--recipe", "fashion-mnist",
         "--quiet"]  # fmt: skip
TEACHER = ["--epochs", "40", "--spec.width", "192", "--spec.num-heads", "6", "--spec.mlp-width",
           "384"]  # fmt: skip
STUDENT = ["--spec.width", "64", "--spec.depth", "2", "--spec.num-heads", "4", "--spec.mlp-width",
           "128"]  # fmt: skip
TAUGHT = ["--distill-views", "2", "--distill-temperature", "2", "--distill-alpha", "0.9"]


def trained(output: Path, *flags: str) -> tuple[float, float]:
    """Test top-1 and seconds of one command."""
    seconds, _, _ = run(*TRAIN, *flags, "--output", str(output))
    metrics = vitkit.load(output / "weights" / "best.safetensors").metadata["metrics"]
    return metrics["test"]["top1"], seconds


def spread(values: list[float]) -> dict[str, object]:
    """Mean, range and each."""
    return {"mean": mean(values), "range": max(values) - min(values), "each": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--teacher")
    parser.add_argument("flags", nargs="*")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, teacher = Path(name), asked.teacher
        if teacher is None:
            top1, seconds = trained(folder / "teacher", *TEACHER)
            teacher = str(folder / "teacher" / "weights" / "best.safetensors")
            print(f"teacher: {top1:.4f} in {seconds:.0f} s")
        scores = vitkit.load(teacher).metadata["metrics"]
        known = scores.get("test", scores["val"])["top1"]
        runs = []
        for seed in asked.seeds:
            flags = [*STUDENT, "--seed", str(seed), *asked.flags]
            alone = trained(folder / f"alone-{seed}", *flags)
            taught = trained(folder / f"taught-{seed}", *flags, "--teacher", teacher, *TAUGHT)
            print(f"seed {seed}: alone {alone[0]:.4f} in {alone[1]:.0f} s, "
                  f"taught {taught[0]:.4f} in {taught[1]:.0f} s")  # fmt: skip
            runs.append((alone, taught))
    alone, taught = ([made[which][0] for made in runs] for which in (0, 1))
    ratio = median(taught[1] / alone[1] for alone, taught in runs)
    print(f"teacher {known:.4f}, alone {mean(alone):.4f}, taught {mean(taught):.4f} "
          f"({100 * (mean(taught) - mean(alone)):+.2f} points), {ratio:.2f}x the time")  # fmt: skip
    write_results("distil-", {"teacher": known, "alone": spread(alone), "taught": spread(taught),
                              "time_ratio": ratio, "student": STUDENT, "settings": TAUGHT,
                              "flags": asked.flags})  # fmt: skip


if __name__ == "__main__":
    main()
