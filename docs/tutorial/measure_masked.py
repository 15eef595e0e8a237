"""Measure pre-training without labels where few images have one."""

from __future__ import annotations

import time
from statistics import mean

from experiment import Asked, Experiment, Numbers
from masked_images import MaskedImages, pretrain
from plain_loop import (
    Images,
    Maker,
    images_become,
    make_vit,
    open_images,
    settings,
    some,
    trained,
)
from torch import Tensor

import vitkit
from vitkit.data.images.preprocess import preprocess_images
from vitkit.training.config.field_types import Settings
from vitkit.training.config.train_config import TrainConfig

LABELLED = (300, 1_000, 3_000)
"""Training images with a label; all others are seen without theirs."""
RATES = (5e-4, 1e-3, 2e-3)
TUNED_AT = 1_000
BATCH, STEPS, HELD_OUT = 100, 600, 10_000
HIDDEN_STEPS, HIDDEN_BATCH, HIDDEN_RATE = 3_000, 128, 1e-3
LONGER = 3
"""Times as many steps as the pre-trained model is fine-tuned for: training alone, for longer."""


def masked(asked: Asked) -> Numbers:
    """Accuracy with few labels: from noise, from noise for longer, and after guessing patches.

    Each way has the best of three rates, chosen with a seed that is not scored, on images that
    are not scored.
    """
    name, steps, hidden_steps = "fashion-mnist", STEPS, HIDDEN_STEPS
    sizes, tuned_at, held_out = LABELLED, TUNED_AT, HELD_OUT
    if asked.quick:
        name, steps, hidden_steps, sizes, tuned_at, held_out = "digits", 2, 2, (150,), 150, 200
    images = open_images(name, asked.data_root, held_out=held_out)
    choosing = max(asked.seeds) + 1
    begun, seconds = _pretrained((*asked.seeds, choosing), images, hidden_steps)
    ways = {"alone": steps, "alone, longer": LONGER * steps, "masked": steps}

    def one(way: str, rate: float, size: int, seed: int, part: str) -> Numbers:
        split = some(images.train, size, seed)
        make = _from(begun[seed]) if way == "masked" else make_vit
        found = trained(
            _config(rate), images, split, steps=ways[way], seed=seed, part=part, make=make
        )
        row = {"way": way, "images": size, "lr": rate, **found}
        print(f"masked, {part}: {row}", flush=True)
        return row

    tried = [one(way, rate, tuned_at, choosing, "choice") for way in ways for rate in RATES]
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
            for size in sizes for way in ways for seed in asked.seeds
        ],
    }  # fmt: skip


def _config(rate: float) -> TrainConfig:
    """The recipe with AdamW, warmed up for a tenth of the steps."""
    change: Settings = {"opt": "adamw", "lr": rate, "batch_size": BATCH}
    return settings("fashion-mnist", change, {"epochs": 10, "warmup_epochs": 1.0})


def _pretrained(
    seeds: tuple[int, ...], images: Images, steps: int
) -> tuple[dict[int, dict[str, Tensor]], list[float]]:
    """Weights of a model that has guessed patches, by seed, and the seconds of each."""
    config, begun, seconds = _config(HIDDEN_RATE), {}, []
    split = images.train
    batch_images = preprocess_images(
        [split.read(place) for place in range(len(split))], images_become(config)
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
        begun[seed] = model.state_dict()
        seconds.append(round(time.perf_counter() - start, 1))
        print(f"masked, seed {seed}: loss {mean(losses[-50:]):.4f}, {seconds[-1]} s", flush=True)
    return begun, seconds


def _from(weights: dict[str, Tensor]) -> Maker:
    """Makes the model with these weights."""

    def make(config: TrainConfig, num_classes: int, seed: int) -> vitkit.ViT:
        model = make_vit(config, num_classes, seed)
        model.load_state_dict(weights)
        return model

    return make


EXPERIMENTS = {
    "masked": Experiment(masked, "few labels, after guessing hidden patches or from noise"),
}
