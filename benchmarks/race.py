"""Measure the time to an accuracy on Fashion-MNIST: a recipe and SimpleViT in a plain loop.

    python benchmarks/race.py [--goal 0.91] [--seeds 0 1 2] [--epochs 12] [--patience 4]
                              [--threads 2] [--rates 1e-3 2e-3]

Both models have width 96, 3 blocks, 3 heads of 32 and patches of 7 x 7. vitkit runs `vitkit train
fashion-mnist --recipe fashion-mnist --epochs E` in its own process; its time includes validation.
The plain loop trains vit-pytorch's SimpleViT in float32: AdamW at a constant learning rate,
shuffled batches of 256, cross-entropy and the recipe's flips and shifts. Its time counts only its
steps, and it may take `--patience` times as long as vitkit. Both are evaluated on the same 6,000
images held out of train; the test split is not read. The loop runs at each of `--rates`, and the
fastest counts. Seeds are run in turn. The script does not pass or fail.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
from demo import processor, run, write_results
from torch import Tensor, nn
from torch.nn import functional as F
from versus.machine import declare_missing_operators

from vitkit.data.datasets.splitting import with_validation
from vitkit.data.sources.open import open_dataset

BATCH = 256
MEAN, STD = 0.2860, 0.3530


def ours(goal: float, seed: int, args: argparse.Namespace) -> dict[str, object]:
    """Train by the recipe; return the seconds to the goal, and the best accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        left = Path(folder) / "run"
        run(sys.executable, "-m", "vitkit", "train", "fashion-mnist", "--recipe", "fashion-mnist",
            "--epochs", str(args.epochs), "--seed", str(seed), "--threads", str(args.threads),
            "--no-test", "--quiet", "--output", str(left))  # fmt: skip
        rows = [json.loads(line) for line in (left / "metrics.jsonl").read_text().splitlines()]
    epochs = [row for row in rows if row["kind"] == "epoch"]
    reached = [row["seconds"] for row in epochs if row["val_top1"] >= goal]
    return {
        "seconds": reached[0] if reached else None,
        "in_all": epochs[-1]["seconds"],
        "best": max(row["val_top1"] for row in epochs),
        "images_per_s": float(np.median([row["images_per_s"] for row in epochs])),
    }


def images(
    seed: int, parts: tuple[str, ...] = ("train", "val")
) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the splits that a run uses, as floats."""
    splits = with_validation(open_dataset("fashion-mnist"), 0.1, seed).splits
    made = {}
    for name in parts:
        split = splits[name]
        pixels = np.stack([split.read(place) for place in range(len(split))])
        images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - MEAN) / STD
        made[name] = images, torch.as_tensor(np.asarray(split.labels))
    return made


def varied(images: Tensor) -> Tensor:
    """Flip half of the images, and shift each by at most a pixel."""
    flipped = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images.flip(3), images)
    padded = F.pad(flipped, (1, 1, 1, 1), value=-MEAN / STD)
    windows = padded.unfold(2, 28, 1).unfold(3, 28, 1)  # B C 3 3 28 28
    down, right = torch.randint(3, (2, len(images)))
    return windows[torch.arange(len(images)), :, down, right]


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of correct predictions."""
    chosen = torch.cat([model(part).argmax(1) for part in images.split(1000)])
    return float((chosen == labels).double().mean())


def plain_loop(
    goal: float, seed: int, rate: float, most: float, data: dict[str, tuple[Tensor, Tensor]]
) -> dict[str, object]:
    """Train SimpleViT until it reaches the goal or its time is over; return as `ours` does."""
    declare_missing_operators()  # vit-pytorch imports torchvision
    from vit_pytorch import SimpleViT

    torch.manual_seed(seed)
    model = SimpleViT(image_size=28, patch_size=7, num_classes=10, dim=96, depth=3, heads=3,
                      mlp_dim=192, channels=1, dim_head=32)  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    (images, labels), held_out = data["train"], data["val"]
    taken, best, seen = 0.0, 0.0, 0
    while taken < most:
        model.train()
        start = time.perf_counter()
        for places in torch.randperm(len(images)).split(BATCH):
            loss = F.cross_entropy(model(varied(images[places])), labels[places])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        taken, seen = taken + time.perf_counter() - start, seen + len(images)
        best = max(best, accuracy(model.eval(), *held_out))
        if best >= goal:
            break
    return {"rate": rate, "seconds": taken if best >= goal else None, "in_all": taken,
            "best": best, "images_per_s": seen / taken}  # fmt: skip


def describe(made: dict[str, object], goal: float) -> str:
    seconds = made["seconds"]
    when = f"{seconds:.0f} s" if seconds is not None else f"not in {made['in_all']:.0f} s"
    return f"{goal:.0%} {when}, best {made['best']:.4f}, {made['images_per_s']:,.0f} images/s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--goal", type=float, default=0.91)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--patience", type=float, default=4.0)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rates", nargs="+", type=float, default=[1e-3, 2e-3])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    data, results = images(0), []
    for seed in args.seeds:
        mine = ours(args.goal, seed, args)
        print(f"seed {seed}: vitkit {describe(mine, args.goal)}", flush=True)
        most = args.patience * float(mine["seconds"] or mine["in_all"])
        baselines = [plain_loop(args.goal, seed, rate, most, data) for rate in args.rates]
        for baseline in baselines:
            print(
                f"  SimpleViT at {baseline['rate']:g}: {describe(baseline, args.goal)}", flush=True
            )
        fastest = min(baselines, key=lambda run: run["seconds"] or run["in_all"] * 1e3)
        ratio = float(fastest["seconds"] or fastest["in_all"]) / float(mine["seconds"] or np.inf)
        at_least = "" if fastest["seconds"] else "at least "
        print(f"  {at_least}{ratio:.2f} times shorter")
        results.append({"seed": seed, "vitkit": mine, "peers": baselines, "ratio": ratio,
                        "reached": fastest["seconds"] is not None})  # fmt: skip
    about = {"processor": processor(), "date": str(date.today()), "torch": torch.__version__}
    write_results("race-", {**about, "asked": vars(args), "runs": results})


if __name__ == "__main__":
    main()
