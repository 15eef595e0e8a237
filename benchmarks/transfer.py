"""Measure pre-training: Fashion-MNIST first, then 1,000 labelled digits of MNIST at larger size.

    python benchmarks/transfer.py [--data-root DIR] [--seeds 0 1 2] [--test] [--img-size 36]
                                  [--first 'runs/{seed}/weights/best.safetensors']
                                  [--output FILE]

For each seed a model is trained on Fashion-MNIST at 28 x 28 in a long run (or `--first` names its
weights), then fine-tuned on 1,000 digits of MNIST, a hundred of each class, at a higher resolution.
The same model is trained from initial weights on the same digits at the same resolution three
times: with the same settings, with its best learning rate, and for twice as many epochs with the
best learning rate for those. All keep the epoch with the best score on a tenth of the digits.
Without `--test`, for choosing the settings below, the score is that of 10,000 other training
digits; with it, of the test split. Results go to FILE, or to benchmarks/results; the script does
not pass or fail.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from datetime import date
from pathlib import Path
from statistics import mean

import numpy as np
from demo import processor, run, write_results

import vitkit
from vitkit.data.sources.benchmarks import write_idx
from vitkit.data.sources.open import open_dataset

EACH = 100
"""Labelled digits per class."""
TRAIN = [sys.executable, "-m", "vitkit", "train"]
SPEC = ["--spec.patch-size", "4", "--spec.width", "112", "--spec.num-heads", "4",
        "--spec.mlp-width", "224", "--spec.depth", "4"]  # fmt: skip
"""0.42 M parameters; the patch size is the same at both resolutions."""
PRETRAIN = ["fashion-mnist", "--recipe", "fashion-mnist", *SPEC, "--epochs", "38", "--shift", "2",
            "--reprob", "0.25", "--no-test"]  # fmt: skip
BOTH = ["--opt", "muon", "--beta2", "0.95", "--batch-size", "50", "--warmup-epochs", "3",
        "--crop-scale", "1", "--flip", "0", "--shift", "3", "--fit", "squash"]  # fmt: skip
FINETUNE = ["--epochs", "60", "--lr", "2e-3"]
FRESH = {
    "same": ["--recipe", "mnist", *SPEC, *FINETUNE],
    "alone": ["--recipe", "mnist", *SPEC, "--epochs", "60", "--lr", "4e-3"],
    "longer": ["--recipe", "mnist", *SPEC, "--epochs", "120", "--lr", "2e-3"],
}


def few_digits(root: str | None, seed: int, test: bool, into: Path) -> None:
    """Write a data root whose MNIST has 1,000 training digits and the evaluation digits."""
    splits = open_dataset("mnist", data_root=root).splits
    train, scored = splits["train"], splits["test"]
    order = np.random.default_rng(seed).permutation(len(train))
    if not test:
        scored, order = train.subset(order[:10_000]), order[10_000:]
    labels = np.asarray(train.labels)[order]
    few = np.concatenate([order[labels == digit][:EACH] for digit in range(10)])
    (into / "mnist").mkdir(parents=True)
    for prefix, split in (("train", train.subset(few)), ("t10k", scored)):
        pixels = np.stack([split.read(place)[..., 0] for place in range(len(split))])
        write_idx(into / "mnist" / f"{prefix}-images-idx3-ubyte", pixels)
        write_idx(into / "mnist" / f"{prefix}-labels-idx1-ubyte", split.labels.astype(np.uint8))


def trained(output: Path, *flags: str) -> tuple[Path, float]:
    """Train; return the best weights and the seconds."""
    seconds, _, _ = run(*TRAIN, *flags, "--quiet", "--output", str(output))
    return output / "weights" / "best.safetensors", seconds


def score(path: Path) -> float:
    top1: float = vitkit.load(path).metadata["metrics"]["test"]["top1"]
    return top1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data-root")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--img-size", default="36")
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--first")
    parser.add_argument("--output", type=Path)
    args, flags = parser.parse_known_args()
    rows = []
    for seed in args.seeds:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            few_digits(args.data_root, seed, args.test, folder / "few")
            small = ["mnist", "--data-root", str(folder / "few"), "--seed", str(seed), *BOTH,
                     *flags]  # fmt: skip
            first, before = Path((args.first or "").format(seed=seed)), 0.0
            if args.first is None:
                first, before = trained(folder / "first", *PRETRAIN, "--seed", str(seed), *flags)
            tuned, tuning = trained(folder / "tuned", *small, *FINETUNE, "--pretrained",
                                    str(first), "--img-size", args.img_size)  # fmt: skip
            scores, seconds = {"pretrained": score(tuned)}, {"first": before, "pretrained": tuning}
            for way, settings in FRESH.items():
                made, seconds[way] = trained(folder / way, *small, *settings, "--spec.image-size",
                                             args.img_size)  # fmt: skip
                scores[way] = score(made)
            rows.append({"seed": seed, **scores, "seconds": seconds})
        print(rows[-1], flush=True)
    for way in FRESH:
        gains = [100 * (row["pretrained"] - row[way]) for row in rows]
        print(f"over {way}: {mean(gains):+.2f} points ({min(gains):+.2f} to {max(gains):+.2f})")
    words = ["python benchmarks/transfer.py --data-root DIR", *["--test"] * args.test,
             *["--first WEIGHTS"] * bool(args.first), *flags]  # fmt: skip
    scored_on = "test" if args.test else "other training digits"
    write_results("transfer-", {
        "command": " ".join(words), "processor": processor(), "date": str(date.today()),
        "scored on": scored_on,
        "img_size": args.img_size, "runs": rows, "both": BOTH, "finetune": FINETUNE, **FRESH,
        "pretrain": PRETRAIN, "flags": flags,
    }, args.output)  # fmt: skip


if __name__ == "__main__":
    main()
