"""How the settings of a run change its training pictures, and a picture of what comes of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from vitkit.data.augmentation.mixup import Mixing
from vitkit.data.loading.batch_transform import Fed, Feed
from vitkit.data.loading.loader import Batch
from vitkit.io.atomic import output_error
from vitkit.spec import Preprocess
from vitkit.training.monitoring.image_grids import Line, grid
from vitkit.training.setup import Plan

SHOWN, ACROSS = 32, 8
"""Pictures in the grid of what the model is fed, and in a row of it."""
GREY = "#6e7781"


def make_feed(plan: Plan) -> Feed:
    """What brings a batch of the run to the model."""
    config, mixing = plan.config, None
    if config.mixup > 0 or config.cutmix > 0:
        off = config.mixup_off_epoch * plan.steps.steps_per_epoch
        mixing = Mixing(
            num_classes=plan.spec.num_classes,
            mixup=config.mixup,
            cutmix=config.cutmix,
            prob=config.mixup_prob,
            switch_prob=config.mixup_switch_prob,
            until=off or None,
            seed=config.seed,
        )
    return Feed(plan.preprocess, plan.device, plan.steps.augmentation, mixing, seed=config.seed)


def save_augmented_grid(path: Path, plan: Plan) -> None:
    """Write a picture of the first pictures of the first step, as the model is fed them.

    Raises:
        OutputError: the file cannot be written.
    """
    batch = next(plan.steps[0].parts(plan.config.grad_accum_steps))
    sheet = augmented_grid(make_feed(plan)(batch, step=0), batch, plan.preprocess,
                           plan.dataset.classes)  # fmt: skip
    try:
        Image.fromarray(sheet).save(path)
    except OSError as error:
        raise output_error(path, error) from error


def augmented_grid(
    fed: Fed, batch: Batch, preprocess: Preprocess, classes: tuple[str, ...]
) -> UInt8[np.ndarray, "H W 3"]:
    """Pictures as they are fed, over their labels and, where two are mixed, the share of each.

    Args:
        fed: what became of the batch.
        batch: whose labels they are.
        preprocess: mean and std, which are undone.
        classes: their names.
    """
    mean, std = (np.array(values)[:, None, None] for values in (preprocess.mean, preprocess.std))
    images = fed.images[:SHOWN].cpu().numpy() * std + mean
    pixels = np.rint(images.clip(0, 1) * 255).astype(np.uint8).transpose(0, 2, 3, 1)
    labels = [classes[int(label)] for label in batch.labels]
    if fed.mixture is None:
        return grid(pixels, [[Line(label)] for label in labels[:SHOWN]], ACROSS)
    own = fed.mixture.weight
    captions = [
        [Line(label, f"{own:.0%}"), Line(partner, f"{1 - own:.0%}", GREY)]
        for label, partner in zip(labels[:SHOWN], labels[::-1], strict=False)
    ]
    return grid(pixels, captions, ACROSS)
