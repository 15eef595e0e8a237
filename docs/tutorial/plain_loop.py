"""Train any module from images to logits for a number of steps: the loop of the measurements.

Order, shifts and flips of the images, the arithmetic of a step and the learning rate are those of
`vitkit train`. The loop writes no files and chooses no best epoch: a model is scored once, after
its last step, on images that were held out of the training split.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import vitkit
from vitkit.data.augmentation.pipeline import BatchTransform
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import stratified_split, with_validation
from vitkit.data.loading.crop_flip import Augmentation
from vitkit.data.loading.loader import TrainingSteps
from vitkit.data.sources.open import open_dataset
from vitkit.evaluation.loop import evaluate_outputs, predict_batches
from vitkit.models.attention import use_attention
from vitkit.spec import Preprocess
from vitkit.training.config.meaning import Settings
from vitkit.training.config.merging import layered
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.optimization.losses import make_loss
from vitkit.training.optimization.optimizers import configured_optimizer
from vitkit.training.optimization.parameters import learning_rate
from vitkit.training.optimization.precision import autocast
from vitkit.training.recipes import recipe_settings
from vitkit.training.step import Objective, TrainingStep

PROCESSOR = torch.device("cpu")
PRECISION = "bfloat16"
"""The precision of every measurement. It is fixed, so that all seeds compute in the same one."""


Maker = Callable[[TrainConfig, int, int], nn.Module]
"""A function that creates a network from settings, number of classes and seed."""


@dataclass(frozen=True)
class Images:
    """The training split in three parts; the test split is not read.

    Attributes:
        train: training images.
        choice: held out for the choice of a learning rate.
        score: held out for the scores.
        num_classes: K.
    """

    train: Split
    choice: Split
    score: Split
    num_classes: int


def open_images(name: str, data_root: str | None, *, held_out: int) -> Images:
    """Split the training split of a dataset: the recipe's validation tenth for choices, `held_out`
    other images for scores, and the rest for training."""
    dataset = with_validation(open_dataset(name, data_root=data_root), 0.1)
    train, choice = dataset.splits["train"], dataset.splits["val"]
    share = held_out / len(train)
    rest, scored = stratified_split(train.labels, (1 - share, share), seed=1)
    return Images(
        train.subset(rest), choice, train.subset(scored), len(dataset.classes)
    )


def sample(split: Split, count: int, seed: int) -> Split:
    """Return `count` images of a split, stratified by class; each seed gives other images."""
    if count == len(split):
        return split
    share = count / len(split)
    _, taken = stratified_split(split.labels, (1 - share, share), seed)
    return split.subset(taken)


def settings(recipe: str, *changes: Settings) -> TrainConfig:
    """Return the settings of a recipe with changes; the data are passed separately."""
    return TrainConfig(**layered(recipe_settings(recipe), {"data": recipe}, *changes))


def make_vit(config: TrainConfig, num_classes: int, seed: int) -> vitkit.ViT:
    """Create the model with random weights that depend on the seed only."""
    torch.manual_seed(seed)
    model = vitkit.create_model(config.model, num_classes=num_classes, **config.spec)
    use_attention(model, "plain")
    return model


def preprocess_of(config: TrainConfig) -> Preprocess:
    """Return the preprocessing of some settings."""
    size = config.spec["image_size"]
    return Preprocess(image_size=size, mean=config.mean, std=config.std, fit=config.fit)


def train(
    model: nn.Module, config: TrainConfig, split: Split, *, steps: int, seed: int
) -> dict[str, float]:
    """Train a model in place.

    Args:
        model: a model with initial weights.
        config: optimizer, rate, batch, shifts, flips, loss; the warm-up has the same share of the
            steps as of the recipe's epochs.
        split: training images.
        steps: optimizer steps.
        seed: determines the order of the images and their augmentation.

    Returns:
        `seconds`, the mean `loss` of the last tenth of the steps, and `not_finite`, the number of
        steps that were skipped because a value was not finite.
    """
    preprocess = preprocess_of(config)
    augmentation = Augmentation(flip=config.flip, shift=config.shift)
    batches = TrainingSteps(
        split, preprocess, augmentation, batch_size=config.batch_size, seed=seed
    )
    optimizer = configured_optimizer(model, config)
    feed = BatchTransform(preprocess, PROCESSOR, augmentation, seed=seed)
    loss = make_loss(config.loss, smoothing=config.label_smoothing)
    objective = Objective(model, loss, PRECISION, PROCESSOR)
    step = TrainingStep(
        objective, optimizer, feed, clip=config.clip_grad, seed=config.seed
    )
    warmup = round(steps * config.warmup_epochs / config.epochs)
    model.train()
    losses, skipped, start = [], 0, time.perf_counter()
    for number in range(steps):
        rate = learning_rate(
            number,
            config.sched,
            peak=config.lr,
            low=config.min_lr,
            warmup=warmup,
            total=steps,
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        result = step(batches[number], number)
        skipped += result.bad is not None
        losses.append(result.loss)
    last = [
        loss for loss in losses[-max(steps // 10, 1) :] if loss == loss
    ]  # without NaN
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "loss": sum(last) / len(last) if last else float("inf"),
        "not_finite": skipped,
    }


def accuracy(
    model: nn.Module, config: TrainConfig, split: Split, num_classes: int
) -> float:
    """Return the accuracy of the model in eval mode on a split."""
    model.eval()

    def forward(images: Tensor) -> Tensor:
        with autocast(PRECISION, PROCESSOR):
            logits: Tensor = model(images)
        return logits

    outputs = predict_batches(forward, split, preprocess_of(config))
    scores, _ = evaluate_outputs(outputs, num_classes)
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
    """Train the model that `make` creates; return `seed`, the results of `train`, and `top1` on the
    images for scores, or with `part="choice"` on those for choices."""
    model = make(config, images.num_classes, seed)
    results = train(model, config, split, steps=steps, seed=seed)
    held_out = images.choice if part == "choice" else images.score
    return {
        "seed": seed,
        "top1": accuracy(model, config, held_out, images.num_classes),
        **results,
    }
