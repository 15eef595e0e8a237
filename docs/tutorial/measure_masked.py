"""Measure pre-training without labels, followed by training with few labels."""

from __future__ import annotations

import time
from statistics import mean

from experiment import Experiment, Numbers, Options
from masked_images import MaskedImages, pretrain
from plain_loop import (
    Images,
    Maker,
    make_vit,
    open_images,
    preprocess_of,
    sample,
    settings,
    trained,
)
from torch import Tensor

import vitkit
from vitkit.data.images.preprocess import preprocess_images
from vitkit.training.config.meaning import Settings
from vitkit.training.config.train_config import TrainConfig

LABELLED = (300, 1_000, 3_000)
"""Numbers of labelled training images; the pre-training uses all images without labels."""
RATES = (5e-4, 1e-3, 2e-3)
TUNED_AT = 1_000
BATCH, STEPS, HELD_OUT = 100, 600, 10_000
HIDDEN_STEPS, HIDDEN_BATCH, HIDDEN_RATE = 3_000, 128, 1e-3
LONGER = 3
"""The longer training from scratch has so many times the steps of the fine-tuning."""


def masked(options: Options) -> Numbers:
    """Measure the accuracy with few labels: from scratch, from scratch for longer, pre-trained.

    The learning rate of each method is the best of three, chosen with a seed and with images that
    are not used for the scores.
    """
    name, steps, hidden_steps = "fashion-mnist", STEPS, HIDDEN_STEPS
    sizes, tuned_at, held_out = LABELLED, TUNED_AT, HELD_OUT
    if options.quick:
        name, steps, hidden_steps, sizes, tuned_at, held_out = (
            "digits",
            2,
            2,
            (150,),
            150,
            200,
        )
    images = open_images(name, options.data_root, held_out=held_out)
    choosing = max(options.seeds) + 1
    weights, seconds = _pretrained((*options.seeds, choosing), images, hidden_steps)
    ways = {"alone": steps, "alone, longer": LONGER * steps, "masked": steps}

    def one(way: str, rate: float, size: int, seed: int, part: str) -> Numbers:
        split = sample(images.train, size, seed)
        make = _from(weights[seed]) if way == "masked" else make_vit
        scores = trained(
            _config(rate),
            images,
            split,
            steps=ways[way],
            seed=seed,
            part=part,
            make=make,
        )
        row = {"way": way, "images": size, "lr": rate, **scores}
        print(f"masked, {part}: {row}", flush=True)
        return row

    tried = [
        one(way, rate, tuned_at, choosing, "choice") for way in ways for rate in RATES
    ]
    best = {row["way"]: row["lr"] for row in sorted(tried, key=lambda row: row["top1"])}
    return {
        "data": name,
        "pretrained": {"images": len(images.train), "steps": hidden_steps, "batch": HIDDEN_BATCH,
                       "lr": HIDDEN_RATE, "seconds": seconds},
        "steps": ways,
        "batch": BATCH,
        "scored_on": len(images.score),
        "rates": best,
        "tried": tried,
        "rows": [
            one(way, best[way], size, seed, "score")
            for size in sizes for way in ways for seed in options.seeds
        ],
    }  # fmt: skip


def _config(rate: float) -> TrainConfig:
    """Return the recipe with AdamW, with a warm-up of a tenth of the steps."""
    change: Settings = {"opt": "adamw", "lr": rate, "batch_size": BATCH}
    return settings("fashion-mnist", change, {"epochs": 10, "warmup_epochs": 1.0})


def _pretrained(
    seeds: tuple[int, ...], images: Images, steps: int
) -> tuple[dict[int, dict[str, Tensor]], list[float]]:
    """Pre-train a model for each seed; return the weights by seed, and the seconds of each."""
    config, weights, seconds = _config(HIDDEN_RATE), {}, []
    split = images.train
    batch_images = preprocess_images(
        [split.read(index) for index in range(len(split))], preprocess_of(config)
    )
    for seed in seeds:
        start = time.perf_counter()
        model = make_vit(config, images.num_classes, seed)
        losses = pretrain(
            MaskedImages(model),
            batch_images,
            steps=steps,
            batch=HIDDEN_BATCH,
            lr=HIDDEN_RATE,
            seed=seed,
        )
        weights[seed] = model.state_dict()
        seconds.append(round(time.perf_counter() - start, 1))
        print(
            f"masked, seed {seed}: loss {mean(losses[-50:]):.4f}, {seconds[-1]} s",
            flush=True,
        )
    return weights, seconds


def _from(weights: dict[str, Tensor]) -> Maker:
    """Return a function that creates the model with these weights."""

    def make(config: TrainConfig, num_classes: int, seed: int) -> vitkit.ViT:
        model = make_vit(config, num_classes, seed)
        model.load_state_dict(weights)
        return model

    return make


EXPERIMENTS = {
    "masked": Experiment(
        masked, "few labels, pre-trained on hidden patches or from scratch"
    ),
}
