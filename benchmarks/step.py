"""Time a training step of vitkit and of timm, with the same weights, images and optimizer.

    python benchmarks/step.py [--model vit_small_patch16_224] [--batch 8] [--blocks 7] [--steps 2]
                              [--threads 2] [--device cpu] [--eager] [--curve STEPS]

A step is forward, cross-entropy, backward, clipping at norm 1, fused AdamW and zeroed gradients, on
random images, without drop-path. Rows: timm and vitkit, in float32 and under bfloat16 autocast,
and in float32 compiled (`--eager` leaves those out). In bfloat16 on a CPU vitkit uses its plain
attention kernel, as a run does. The script first compares the logits of the same weights. Then it
times blocks of `--steps` steps in turn, forwards and backwards (A B B A), after a warm-up that ends
compilation. It prints the median seconds of a step with quartiles, timm's eager float32 time over
it with a 95 % bootstrap interval, and the largest difference of the losses of the same steps. The
last row is timm compared with itself: the noise. A row that compiles again while it is timed ends
the script. With `--curve`, vitkit then trains so many steps on digits enlarged to the model's size
from three seeds, in float32 and in bfloat16; the script prints the difference between the two
curves of a seed, and between the seeds. It does not pass or fail.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from itertools import combinations, count, product
from statistics import median, quantiles

import numpy as np
import torch
import torch._dynamo.utils
from demo import processor, write_results
from torch import Tensor, nn
from torch.nn import functional as F
from versus import speed_ratio
from versus.machine import declare_missing_operators
from versus.training import class_labels

import vitkit
from vitkit.data.sources.open import open_dataset
from vitkit.engines.choose import sample_images
from vitkit.models.attention import use_attention

CLASSES = 1000
WARM = 3
"""Warm-up steps of each row, which are not timed."""
LARGEST_DIFFERENCE = 1e-4
"""The largest allowed difference of two logits, in float32."""


@dataclass
class Row:
    """One way to train, from the same weights, over the same batches.

    Attributes:
        model: its own copy of the weights.
        compiled: by torch.compile.
        half: under bfloat16 autocast.
        seconds: of a step, a number for each timed block.
        losses: of every step.
        compiling: seconds of the warm-up.
    """

    model: nn.Module
    compiled: bool = False
    half: bool = False
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    compiling: float = 0.0

    def __post_init__(self) -> None:
        self.model.train()
        if self.compiled:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self, images: Tensor, labels: Tensor) -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=self.half):
            logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())  # waits for the device, too


def images(number: int, batch: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return batch `number`: noise with the spectrum of photographs, and labels."""
    images = sample_images(batch, 3, (size, size), seed=number).to(device)
    return images, class_labels(batch, CLASSES, seed=number).to(device)


def same_logits(rows: dict[str, Row], images: Tensor) -> float:
    """Return the largest difference of any row's logits from those of the first row."""
    with torch.no_grad():
        plain = [row for row in rows.values() if not row.compiled and not row.half]
        made = [row.model.eval()(images).cpu() for row in plain]
    for row in rows.values():
        row.model.train()
    apart = max((one - made[0]).abs().max().item() for one in made)
    if apart > LARGEST_DIFFERENCE:
        raise SystemExit(f"the models are not the same: logits differ by {apart:.2g}")
    return apart


def measured(rows: dict[str, Row], blocks: int, steps: int, batch: Callable[[int], tuple]) -> None:
    """Warm up, then time every row's blocks in turn. Each row sees batches 0, 1, 2 ..."""
    counters = {name: count() for name in rows}
    for name, row in rows.items():
        start = time.perf_counter()
        for _ in range(WARM):
            row.step(*batch(next(counters[name])))
        row.compiling = time.perf_counter() - start
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for block in range(blocks):
        for name in list(rows)[:: 1 if block % 2 == 0 else -1]:
            given = [batch(next(counters[name])) for _ in range(steps)]
            start = time.perf_counter()
            for images, labels in given:
                rows[name].step(images, labels)
            rows[name].seconds.append((time.perf_counter() - start) / steps)
    if torch._dynamo.utils.counters["stats"]["unique_graphs"] != graphs:
        raise SystemExit("a model was compiled again while it was timed")


def make_rows(name: str, device: torch.device, eager: bool) -> dict[str, Row]:
    """Make all rows, with timm's initial weights; the last row is timm again."""
    declare_missing_operators()
    import timm

    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=CLASSES)
    weights = theirs.state_dict()

    def row(is_timm: bool, **how: bool) -> Row:
        make = timm.create_model if is_timm else vitkit.create_model
        model = make(name, num_classes=CLASSES)
        model.load_state_dict(weights)
        if not is_timm and how.get("half") and device.type == "cpu":
            use_attention(model, "plain")
        return Row(model.to(device), **how)

    rows = {"timm eager": row(True), "vitkit eager": row(False)}
    rows |= {"timm bfloat16": row(True, half=True), "vitkit bfloat16": row(False, half=True)}
    if not eager:
        rows |= {"timm compiled": row(True, compiled=True),
                 "vitkit compiled": row(False, compiled=True)}  # fmt: skip
    return rows | {"timm eager, again": row(True)}


def curves(name: str, steps: int, batch: int, device: torch.device) -> dict[str, float]:
    """Compare losses of three seeds on digits in float32 and bfloat16, means of five steps."""
    split = open_dataset("digits").splits["train"]
    digits = torch.from_numpy(np.stack([split.read(place) for place in range(len(split))]))
    labels = torch.as_tensor(np.asarray(split.labels))
    made: dict[bool, list[list[float]]] = {False: [], True: []}
    for seed, half in product(range(3), made):
        torch.manual_seed(seed)
        model = vitkit.create_model(name, num_classes=10)
        if half and device.type == "cpu":
            use_attention(model, "plain")
        row, size = Row(model.to(device), half=half), model.spec.image_size[0]
        for _ in range(steps):
            places = torch.randint(len(digits), (batch,))
            small = digits[places].permute(0, 3, 1, 2).float() / 127.5 - 1
            images = F.interpolate(small, size=size, mode="bilinear").expand(-1, 3, -1, -1)
            row.step(images.to(device), labels[places].to(device))
        made[half].append(np.reshape(row.losses[: steps // 5 * 5], (-1, 5)).mean(1).tolist())
    full, half = np.array(made[False]), np.array(made[True])
    return {
        "steps": steps,
        "apart": float(np.abs(full - half).mean()),
        "seeds_apart": float(np.mean([np.abs(a - b).mean() for a, b in combinations(full, 2)])),
        "last_float32": float(full[:, -1].mean()),
        "last_bfloat16": float(half[:, -1].mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="of a block")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--eager", action="store_true", help="without the compiled rows")
    parser.add_argument("--curve", type=int, default=0, help="steps of the two curves")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    device = torch.device(args.device)
    rows = make_rows(args.model, device, args.eager)
    size = rows["vitkit eager"].model.spec.image_size[0]
    apart = same_logits(rows, images(0, args.batch, size, device)[0])
    print(f"{args.model}, batch {args.batch}, {args.threads} threads, load "
          f"{os.getloadavg()[0]:.1f}; logits differ by {apart:.1g}", flush=True)  # fmt: skip
    measured(rows, args.blocks, args.steps,
             lambda number: images(number, args.batch, size, device))  # fmt: skip
    base, results = rows["timm eager"], {}
    for name, row in rows.items():
        low, _, high = quantiles(row.seconds, n=4)
        faster = speed_ratio(row.seconds, base.seconds)
        differ = max(abs(a - b) for a, b in zip(row.losses, base.losses, strict=True))
        results[name] = {"seconds": median(row.seconds), "quartiles": [low, high],
                         "faster": faster, "loss_difference": differ,
                         "warm_up_seconds": row.compiling}  # fmt: skip
        print(f"  {name:<18} {median(row.seconds):.3f} s [{low:.3f}, {high:.3f}]  "
              f"{faster[0]:.2f} x [{faster[1]:.2f}, {faster[2]:.2f}]  losses differ by "
              f"{differ:.1g}; warm-up {row.compiling:.0f} s")  # fmt: skip
    compared = curves(args.model, args.curve, args.batch, device) if args.curve else None
    if compared:
        print("  losses on digits: " + ", ".join(f"{k} {v:.3g}" for k, v in compared.items()))
    about = {"processor": processor(), "date": str(date.today()), "torch": torch.__version__}
    write_results("step-", {**about, "asked": vars(args), "rows": results,
                            "curves": compared})  # fmt: skip


if __name__ == "__main__":
    main()
