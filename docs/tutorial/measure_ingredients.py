"""Measure each ingredient of the MNIST recipe: one is changed, everything else stays.

The trainings are small: 12 passes over 3,200 of the 54,000 images, with a quarter of the batch size.
Every variant starts from random weights, sees the same images in the same order, and is scored once,
after its last step, on images held out of the training split.
"""

from __future__ import annotations

from experiment import Experiment, Numbers, Options
from plain_loop import open_images, sample, settings, trained

from vitkit.training.config.meaning import Settings

VARIANTS: dict[str, Settings] = {
    "the recipe": {},
    "AdamW instead of Muon": {"opt": "adamw"},
    "no warm-up": {"warmup_epochs": 0.0},
    "constant rate after the warm-up": {"sched": "constant"},
    "no shifts": {"shift": 0},
    "no label smoothing": {"label_smoothing": 0.0},
    "no weight decay": {"weight_decay": 0.0},
    "class token instead of mean": {"spec": {"class_token": True, "pooling": "cls"}},
    "fixed 1-D positions": {"spec": {"positions": "sincos_1d"}},
    "patches of 4 x 4": {"spec": {"patch_size": 4}},
    "the notebook's Adam, 0.01": {
        "opt": "adam",
        "lr": 0.01,
        "beta2": 0.999,
        "weight_decay": 0.0,
    },
}
BATCH, PASSES, IMAGES, HELD_OUT = 64, 12, 3_200, 10_000
COPY: Settings = {"batch_size": BATCH, "epochs": PASSES, "warmup_epochs": 1.0}


def ingredients(options: Options) -> Numbers:
    """Measure the accuracy of every variant for every seed."""
    name, count, held_out = (
        ("digits", 256, 200) if options.quick else ("mnist", IMAGES, HELD_OUT)
    )
    images = open_images(name, options.data_root, held_out=held_out)
    split = sample(images.train, count, seed=0)
    rows = []
    for variant, change in VARIANTS.items():
        config = settings("mnist", COPY, change)
        steps = 2 if options.quick else PASSES * (count // BATCH)
        for seed in options.seeds:
            scores = trained(config, images, split, steps=steps, seed=seed)
            rows.append({"variant": variant, **scores})
            print(f"ingredients: {rows[-1]}", flush=True)
    return {
        "data": name,
        "images": len(split),
        "scored_on": len(images.score),
        "steps": steps,
        "batch": BATCH,
        "changes": VARIANTS,
        "rows": rows,
    }


EXPERIMENTS = {
    "ingredients": Experiment(
        ingredients, "what each part of the MNIST recipe is worth"
    )
}
