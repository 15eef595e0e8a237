"""Measure how much data a ViT needs, beside a CNN of its size; and compare positions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from experiment import Experiment, Numbers, Options
from measured import RESULTS
from plain_loop import Images, Maker, make_vit, open_images, sample, settings, trained
from small_cnn import SmallCNN
from torch import nn

from vitkit.training.config.meaning import Settings
from vitkit.training.config.train_config import TrainConfig

SIZES = (300, 1_000, 3_000, 10_000, 30_000)
RATES = (1e-3, 2e-3, 4e-3)
TUNED_AT = 3_000
"""Number of training images with which each network's learning rate is chosen."""
BATCH, STEPS, HELD_OUT = 100, 600, 10_000
LONG_SIZES, LONG_STEPS = (1_000, 30_000), 2_400
POSITIONS = ("none", "sincos_1d", "sincos_2d", "learned")
POSITION_STEPS, POSITION_BATCH = 250, 128
WARM_UP: Settings = {"epochs": 10, "warmup_epochs": 1.0}
"""The warm-up is a tenth of the steps, for every recipe."""


def make_cnn(config: TrainConfig, num_classes: int, seed: int) -> nn.Module:
    """Create the CNN with random weights that depend on the seed only."""
    torch.manual_seed(seed)
    return SmallCNN(num_classes)


NETWORKS: dict[str, Maker] = {"ViT": make_vit, "CNN": make_cnn}


def data_size(options: Options) -> Numbers:
    """Measure the accuracy of both networks for every number of training images and every seed.

    Both use the same loop: AdamW, the recipe's flips and shifts, warm-up and cosine schedule, and
    the same number of steps for every number of images. The learning rate of each is the best of
    three, chosen with a seed and with images that are not used for the scores.
    """
    sizes, tuned_at, steps = (SIZES, TUNED_AT, STEPS)
    images = _fashion(options)
    if options.quick:
        sizes, tuned_at, steps = (100, 300), 300, 2
    rates, tried = {}, []
    for network in NETWORKS:
        for rate in RATES[:2] if options.quick else RATES:
            row = _one(
                network, rate, tuned_at, max(options.seeds) + 1, steps, images, "choice"
            )
            tried.append(row)
            print(f"data-size, choosing a rate: {row}", flush=True)
        own = [row for row in tried if row["network"] == network]
        rates[network] = max(own, key=lambda row: row["top1"])["lr"]
    parameters = {name: _parameters(make, images) for name, make in NETWORKS.items()}
    scored = _scored(sizes, rates, steps, options.seeds, images)
    return {"parameters": parameters, "tried": tried, **scored}


def data_size_long(options: Options) -> Numbers:
    """Measure the same with two numbers of images and four times the steps, at the same rates."""
    sizes, steps = ((100, 300), 2) if options.quick else (LONG_SIZES, LONG_STEPS)
    rates = json.loads((RESULTS / "data-size.json").read_text())["rates"]
    return _scored(sizes, rates, steps, options.seeds, _fashion(options))


def _scored(
    sizes: Sequence[int],
    rates: Mapping[str, float],
    steps: int,
    seeds: Sequence[int],
    images: Images,
) -> Numbers:
    """Train every network with every number of images and seed, at the network's rate."""
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


def positions(options: Options) -> Numbers:
    """Measure the Fashion-MNIST recipe's model with 7 x 7 patches, by its kind of positions."""
    images, steps, rows = _fashion(options), 2 if options.quick else POSITION_STEPS, []
    for kind in POSITIONS:
        config = settings(
            "fashion-mnist",
            WARM_UP | {"batch_size": POSITION_BATCH},
            {"spec": {"patch_size": 4, "positions": kind}},
        )
        for seed in options.seeds:
            scores = trained(config, images, images.train, steps=steps, seed=seed)
            rows.append({"positions": kind, **scores})
            print(f"positions: {rows[-1]}", flush=True)
    return {
        "data": "fashion-mnist",
        "steps": steps,
        "batch": POSITION_BATCH,
        "images": len(images.train),
        "scored_on": len(images.score),
        "rows": rows,
    }


def _fashion(options: Options) -> Images:
    name, held_out = ("digits", 200) if options.quick else ("fashion-mnist", HELD_OUT)
    return open_images(name, options.data_root, held_out=held_out)


def _one(
    network: str,
    rate: float,
    size: int,
    seed: int,
    steps: int,
    images: Images,
    part: str,
) -> Numbers:
    config = settings(
        "fashion-mnist", WARM_UP | {"opt": "adamw", "lr": rate, "batch_size": BATCH}
    )
    scores = trained(
        config,
        images,
        sample(images.train, size, seed),
        steps=steps,
        seed=seed,
        part=part,
        make=NETWORKS[network],
    )
    return {"network": network, "images": size, "lr": rate, **scores}


def _parameters(make: Maker, images: Images) -> int:
    model = make(settings("fashion-mnist"), images.num_classes, 0)
    return sum(parameter.numel() for parameter in model.parameters())


EXPERIMENTS = {
    "data-size": Experiment(
        data_size, "a ViT and a CNN by the number of training images"
    ),
    "data-size-long": Experiment(
        data_size_long, "the same with four times the steps", seeds=(0,)
    ),
    "positions": Experiment(positions, "none, fixed 1-D, fixed 2-D, learned"),
}
