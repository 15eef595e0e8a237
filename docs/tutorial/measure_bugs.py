"""Measure what each bug of chapter 14 costs: chapter 0's model, on digits and on clothes."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from statistics import mean

import numpy as np
import torch
from bug_variants import FOLLOW_UPS, RATES, VARIANTS, Variant
from experiment import Experiment, Numbers, Options
from torch import Tensor, nn

from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import stratified_split, with_validation
from vitkit.data.sources.open import open_dataset

STEPS, BATCH, WARMUP = 500, 32, 50
SHARES = (0.45, 0.15, 0.40)
"""Training, validation, test: the 1,797 digits are cut anew, with more images for the test."""

Part = tuple[Tensor, Tensor]
"""Images (N, 1, H, H) in [-1, 1], and their labels (N,)."""

FASHION_SIZES = {"image_size": 28, "patch_size": 4}
FASHION_PARTS = {"train": 5_000, "val": 3_000, "test": 10_000}
FASHION_VARIANTS = ("correct", "reshape", "large_normal", "one_head", "sliced_heads",
                    "joint_norm", "double_softmax", "heads_in_a_list", "no_positions",
                    "sines")  # fmt: skip
"""What is measured again with larger images: 49 patches of 4 x 4."""


@dataclass(frozen=True)
class Task:
    """Images in three parts, and the sizes of the model for them."""

    parts: dict[str, Part]
    sizes: dict[str, int]


def part_of(*splits: Split) -> Part:
    """Read all images of some splits."""
    pixels = np.stack([split.read(n) for split in splits for n in range(len(split))])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    labels = np.concatenate([split.labels for split in splits])
    return images.contiguous(), torch.from_numpy(labels)


def digits() -> Task:
    """Cut all digits into three parts, stratified by class."""
    images, labels = part_of(*open_dataset("digits").splits.values())
    cut = stratified_split(labels.numpy(), SHARES, seed=0)
    parts = {
        name: (images[indexes], labels[indexes])
        for name, indexes in zip(("train", "validation", "test"), cut, strict=True)
    }
    return Task(parts, {})


def fashion(data_root: str | None) -> Task:
    """Take a sample of Fashion-MNIST's training and validation split, and its test split."""
    splits, parts = (
        with_validation(open_dataset("fashion-mnist", data_root=data_root), 0.1).splits,
        [],
    )
    for name, count in FASHION_PARTS.items():
        split = splits[name]
        if count < len(split):
            share = count / len(split)
            _, taken = stratified_split(split.labels, (1 - share, share), seed=0)
            split = split.subset(taken)
        parts.append(part_of(split))
    names = ("train", "validation", "test")
    return Task(dict(zip(names, parts, strict=True)), FASHION_SIZES)


def rate_at(step: int, peak: float, steps: int) -> float:
    """Return the learning rate of a step: linear warm-up, then half a cosine to 0."""
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    return peak * (1 + math.cos(math.pi * (step - WARMUP) / (steps - WARMUP))) / 2


def train(
    variant: Variant, task: Task, *, rate: float, seed: int, steps: int = STEPS
) -> tuple[nn.Module, list[float]]:
    """Train a variant; the seed determines weights and order. Return model and losses."""
    torch.manual_seed(seed)
    model, (images, labels) = variant.model(**task.sizes), task.parts["train"]
    optimizer, losses = variant.optimize(model, rate), []
    epochs = range(-(-steps * BATCH // len(images)))
    order = torch.cat([torch.randperm(len(images)) for _ in epochs])
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, rate, steps)
        taken = order[step * BATCH : (step + 1) * BATCH]
        loss = variant.loss(model(images[taken]), labels[taken])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


@torch.no_grad()
def accuracy(variant: Variant, model: nn.Module, data: Part) -> float:
    """Return the accuracy of a trained variant."""
    torch.manual_seed(0)  # for dropout that is still on
    variant.prepare_to_evaluate(model)
    pairs = zip(*(values.split(1000) for values in data), strict=True)
    hits = sum(int((model(x).argmax(-1) == labels).sum()) for x, labels in pairs)
    return hits / len(data[1])


def measure(name: str, task: Task, options: Options) -> Numbers:
    """Train a variant with three rates and every seed; test it with the best rate.

    The rate is chosen by the mean accuracy on the validation images. Only the models of this rate
    see the test images.
    """
    variant, rows, models = (VARIANTS | FOLLOW_UPS)[name], [], {}
    rates, steps = RATES[variant.optimizer], STEPS
    if options.quick:
        rates, steps = rates[:1], 2
    for rate in rates:
        for seed in options.seeds:
            start = time.process_time()
            model, losses = train(variant, task, rate=rate, seed=seed, steps=steps)
            models[rate, seed] = model
            rows.append({
                "lr": rate,
                "seed": seed,
                "first_loss": losses[0],
                "last_loss": mean(losses[-max(steps // 10, 1) :]),
                "validation": accuracy(variant, model, task.parts["validation"]),
                "seconds": round(time.process_time() - start, 2),
            })  # fmt: skip
    scores = {
        rate: mean(row["validation"] for row in rows if row["lr"] == rate)
        for rate in rates
    }
    chosen = max(rates, key=lambda rate: scores[rate])
    test = [
        accuracy(variant, models[chosen, seed], task.parts["test"])
        for seed in options.seeds
    ]
    return {"variant": name, "lr": chosen, "test": test, "rows": rows}


def bugs(options: Options) -> Numbers:
    """Measure every variant on the digits."""
    return _all("digits", digits(), tuple(VARIANTS), options)


def bugs_positions(options: Options) -> Numbers:
    """Measure three of them again, with fixed positions."""
    return _all("digits", digits(), tuple(FOLLOW_UPS), options)


def bugs_fashion(options: Options) -> Numbers:
    """Measure some of them again on Fashion-MNIST, with larger images."""
    if options.quick:
        return _all("digits", digits(), FASHION_VARIANTS, options)
    return _all("fashion-mnist", fashion(options.data_root), FASHION_VARIANTS, options)


def _all(data: str, task: Task, names: tuple[str, ...], options: Options) -> Numbers:
    measured = []
    for name in names:
        measured.append(measure(name, task, options))
        print(json.dumps(measured[-1]), flush=True)
    return {
        "data": data,
        "images": {name: len(labels) for name, (_, labels) in task.parts.items()},
        "steps": 2 if options.quick else STEPS,
        "batch": BATCH,
        "variants": measured,
    }


EXPERIMENTS = {
    "bugs": Experiment(bugs, "what each bug of chapter 14 costs, on the digits"),
    "bugs-positions": Experiment(bugs_positions, "three of them with fixed positions"),
    "bugs-fashion": Experiment(bugs_fashion, "some of them on Fashion-MNIST"),
}
