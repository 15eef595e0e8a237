"""Trains any module from images to logits for a number of steps: the loop of the measurements.

Order, shifts and flips of the images, the arithmetic of a step and the learning rate are those of
`vitkit train`. What is left out is all that a run writes, and the choice of its best epoch: a model
is scored once, after its last step, on images that were held out of train.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import vitkit
from vitkit.data.augmentation.crop_flip import Augmentation
from vitkit.data.loading.batch_transform import BatchTransform
from vitkit.data.loading.loader import TrainingSteps
from vitkit.data.sources.open import Split, open_dataset, stratified_split, with_validation
from vitkit.evaluation.predict import evaluate_model
from vitkit.models.attention import use_attention
from vitkit.spec import Preprocess
from vitkit.training.config.field_types import Settings
from vitkit.training.config.merging import layered
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.optimization.losses import make_loss
from vitkit.training.optimization.optimizers import configured_optimizer
from vitkit.training.optimization.precision import autocast
from vitkit.training.optimization.schedule import learning_rate
from vitkit.training.recipes import recipe_settings
from vitkit.training.step import Objective, TrainingStep

PROCESSOR = torch.device("cpu")
PRECISION = "bfloat16"
"""Of every measurement here, whatever is fastest: seeds must not differ in it."""


Maker = Callable[[TrainConfig, int, int], nn.Module]
"""A network from settings, number of classes and seed."""


@dataclass(frozen=True)
class Images:
    """The training images, and the images that are scored; the test split is not read.

    Attributes:
        train: training images.
        choice: held out, to choose a rate with.
        score: held out, to score with.
        num_classes: K.
    """

    train: Split
    choice: Split
    score: Split
    num_classes: int


def open_images(name: str, data_root: str | None, *, held_out: int) -> Images:
    """A data set's train split in three: the recipe's validation tenth to choose with, `held_out`
    others to score with, and the rest."""
    dataset = with_validation(open_dataset(name, data_root=data_root), 0.1)
    train, choice = dataset.splits["train"], dataset.splits["val"]
    share = held_out / len(train)
    rest, scored = stratified_split(train.labels, (1 - share, share), seed=1)
    return Images(train.subset(rest), choice, train.subset(scored), len(dataset.classes))


def some(split: Split, count: int, seed: int) -> Split:
    """So many images of a split, every class in its proportion; each seed takes others."""
    if count == len(split):
        return split
    share = count / len(split)
    _, taken = stratified_split(split.labels, (1 - share, share), seed)
    return split.subset(taken)


def settings(recipe: str, *changes: Settings) -> TrainConfig:
    """The settings of a recipe, with changes; the data are handed over by themselves."""
    return TrainConfig(**layered(recipe_settings(recipe), {"data": recipe}, *changes))


def make_vit(config: TrainConfig, num_classes: int, seed: int) -> vitkit.ViT:
    """The model of some settings, as noise that the seed decides."""
    torch.manual_seed(seed)
    model = vitkit.create_model(config.model, num_classes=num_classes, **config.spec)
    use_attention(model, "plain")
    return model


def images_become(config: TrainConfig) -> Preprocess:
    """The transform of some settings."""
    size = config.spec["image_size"]
    return Preprocess(image_size=size, mean=config.mean, std=config.std, fit=config.fit)


def train(
    model: nn.Module, config: TrainConfig, split: Split, *, steps: int, seed: int
) -> dict[str, float]:
    """Train a model in place.

    Args:
        model: fresh.
        config: optimizer, rate, batch, shifts, flips, loss; the warm-up is the same part of the
            steps as it is of the recipe's epochs.
        split: training images.
        steps: optimizer steps.
        seed: decides the order of the images and their changes.

    Returns:
        `seconds`, the mean `loss` of the last tenth of the steps, and how many steps were left out
        as a number was `not_finite`.
    """
    preprocess = images_become(config)
    augmentation = Augmentation(flip=config.flip, shift=config.shift)
    arriving = TrainingSteps(
        split, preprocess, augmentation, batch_size=config.batch_size, seed=seed
    )
    optimizer = configured_optimizer(model, config)
    feed = BatchTransform(preprocess, PROCESSOR, augmentation, seed=seed)
    loss = make_loss(config.loss, smoothing=config.label_smoothing)
    objective = Objective(model, loss, PRECISION, PROCESSOR)
    step = TrainingStep(objective, optimizer, feed, clip=config.clip_grad, seed=config.seed)
    warmup = round(steps * config.warmup_epochs / config.epochs)
    model.train()
    losses, left_out, start = [], 0, time.perf_counter()
    for number in range(steps):
        rate = learning_rate(
            number, config.sched, peak=config.lr, low=config.min_lr, warmup=warmup, total=steps
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        made = step(arriving[number], number)
        left_out += made.bad is not None
        losses.append(made.loss)
    last = [loss for loss in losses[-max(steps // 10, 1) :] if loss == loss]
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "loss": sum(last) / len(last) if last else float("inf"),
        "not_finite": left_out,
    }


def accuracy(model: nn.Module, config: TrainConfig, split: Split, num_classes: int) -> float:
    """The part of a split's images that the model, in eval mode, gets right."""
    model.eval()

    def forward(images: Tensor) -> Tensor:
        with autocast(PRECISION, PROCESSOR):
            logits: Tensor = model(images)
        return logits

    scores = evaluate_model(forward, split, images_become(config), num_classes=num_classes)
    return scores["top1"]


def trained(
    config: TrainConfig,
    images: Images,
    split: Split,
    *,
    steps: int,
    seed: int,
    part: str = "score",
    make: Maker = make_vit,
) -> dict[str, float]:
    """One training of what `make` gives, on `split`: `seed`, what `train` says, and `top1` on the
    images that are there to score with, or on the `part` that is there to choose with."""
    model = make(config, images.num_classes, seed)
    made = train(model, config, split, steps=steps, seed=seed)
    scored = images.choice if part == "choice" else images.score
    return {"seed": seed, "top1": accuracy(model, config, scored, images.num_classes), **made}
