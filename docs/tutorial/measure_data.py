"""Measure how much data a ViT needs, beside a CNN of its size; and compare positions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from experiment import Asked, Experiment, Numbers
from measured import RESULTS
from plain_loop import Images, Maker, make_vit, open_images, settings, some, trained
from small_cnn import SmallCNN
from torch import nn

from vitkit.training.config.field_types import Settings
from vitkit.training.config.train_config import TrainConfig

SIZES = (300, 1_000, 3_000, 10_000, 30_000)
RATES = (1e-3, 2e-3, 4e-3)
TUNED_AT = 3_000
"""Training images with which each network's rate is chosen, for all sizes."""
BATCH, STEPS, HELD_OUT = 100, 600, 10_000
LONG_SIZES, LONG_STEPS = (1_000, 30_000), 2_400
POSITIONS = ("none", "sincos_1d", "sincos_2d", "learned")
POSITION_STEPS, POSITION_BATCH = 250, 128
WARM_UP: Settings = {"epochs": 10, "warmup_epochs": 1.0}
"""A tenth of the steps, whatever the recipe has."""


def make_cnn(config: TrainConfig, num_classes: int, seed: int) -> nn.Module:
    """The CNN, as noise that the seed decides."""
    torch.manual_seed(seed)
    return SmallCNN(num_classes)


NETWORKS: dict[str, Maker] = {"ViT": make_vit, "CNN": make_cnn}


def data_size(asked: Asked) -> Numbers:
    """Accuracy of both networks for every number of training images and every seed.

    Both have the same loop: AdamW, the recipe's flips and shifts, warm-up and cosine, as many
    steps whatever the number of images. The rate of each is the best of three, chosen with a seed
    that is not scored, on images that are not scored.
    """
    sizes, tuned_at, steps = (SIZES, TUNED_AT, STEPS)
    images = _fashion(asked)
    if asked.quick:
        sizes, tuned_at, steps = (100, 300), 300, 2
    rates, tried = {}, []
    for network in NETWORKS:
        for rate in RATES[:2] if asked.quick else RATES:
            found = _one(network, rate, tuned_at, max(asked.seeds) + 1, steps, images, "choice")
            tried.append(found)
            print(f"data-size, choosing a rate: {found}", flush=True)
        own = [row for row in tried if row["network"] == network]
        rates[network] = max(own, key=lambda row: row["top1"])["lr"]
    parameters = {name: _parameters(make, images) for name, make in NETWORKS.items()}
    scored = _scored(sizes, rates, steps, asked.seeds, images)
    return {"parameters": parameters, "tried": tried, **scored}


def data_size_long(asked: Asked) -> Numbers:
    """The same for two numbers of images and four times as many steps, at the rates found there."""
    sizes, steps = ((100, 300), 2) if asked.quick else (LONG_SIZES, LONG_STEPS)
    rates = json.loads((RESULTS / "data-size.json").read_text())["rates"]
    return _scored(sizes, rates, steps, asked.seeds, _fashion(asked))


def _scored(
    sizes: Sequence[int],
    rates: Mapping[str, float],
    steps: int,
    seeds: Sequence[int],
    images: Images,
) -> Numbers:
    """Every network, number of images and seed, each at the network's rate."""
    rows = []
    for size in sizes:
        for network, rate in rates.items():
            for seed in seeds:
                rows.append(_one(network, rate, size, seed, steps, images, "score"))
                print(f"{steps} steps: {rows[-1]}", flush=True)
    return {
        "data": "fashion-mnist",
        "steps": steps,
        "batch": BATCH,
        "scored_on": len(images.score),
        "rates": dict(rates),
        "rows": rows,
    }


def positions(asked: Asked) -> Numbers:
    """Accuracy of the Fashion-MNIST recipe's model, cut in 7 x 7 patches, by its positions."""
    images, steps, rows = _fashion(asked), 2 if asked.quick else POSITION_STEPS, []
    for kind in POSITIONS:
        config = settings(
            "fashion-mnist",
            WARM_UP | {"batch_size": POSITION_BATCH},
            {"spec": {"patch_size": 4, "positions": kind}},
        )
        for seed in asked.seeds:
            found = trained(config, images, images.train, steps=steps, seed=seed)
            rows.append({"positions": kind, **found})
            print(f"positions: {rows[-1]}", flush=True)
    return {
        "data": "fashion-mnist",
        "steps": steps,
        "batch": POSITION_BATCH,
        "images": len(images.train),
        "scored_on": len(images.score),
        "rows": rows,
    }


def _fashion(asked: Asked) -> Images:
    name, held_out = ("digits", 200) if asked.quick else ("fashion-mnist", HELD_OUT)
    return open_images(name, asked.data_root, held_out=held_out)


def _one(
    network: str, rate: float, size: int, seed: int, steps: int, images: Images, part: str
) -> Numbers:
    config = settings("fashion-mnist", WARM_UP | {"opt": "adamw", "lr": rate, "batch_size": BATCH})
    found = trained(
        config,
        images,
        some(images.train, size, seed),
        steps=steps,
        seed=seed,
        part=part,
        make=NETWORKS[network],
    )
    return {"network": network, "images": size, "lr": rate, **found}


def _parameters(make: Maker, images: Images) -> int:
    model = make(settings("fashion-mnist"), images.num_classes, 0)
    return sum(parameter.numel() for parameter in model.parameters())


EXPERIMENTS = {
    "data-size": Experiment(data_size, "a ViT and a CNN by the number of training images"),
    "data-size-long": Experiment(data_size_long, "the same with four times the steps", seeds=(0,)),
    "positions": Experiment(positions, "none, fixed 1-D, fixed 2-D, learned"),
}
