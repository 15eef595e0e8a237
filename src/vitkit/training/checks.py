"""Checks of the settings against what is installed, the data and the model."""

import torch

from vitkit import errors, messages
from vitkit.data.augmentation import pipeline, policies
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import Split
from vitkit.evaluation.loop import check_metrics, load_metrics
from vitkit.io.results import import_setting
from vitkit.models.initialisation import is_of_head
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.training.config.meaning import Settings
from vitkit.training.config.train_config import USUAL, RunConfig, TrainConfig
from vitkit.training.initial_weights import InitialWeights
from vitkit.training.monitoring.trackers import check_trackers
from vitkit.training.optimization import losses, optimizers, parameters
from vitkit.training.recipes import RECIPES

IMAGES_LOOKED_AT = 4
"""Training images that are read to see whether a dataset has colours."""


def check_installed(config: TrainConfig) -> None:
    """Refuse names of things that do not exist, or cannot be imported."""
    if config.aa is not None:
        policies.policy(config.aa)
    optimizers.check_optimizer(config.opt or USUAL["opt"])
    losses.make_loss(config.loss)
    check_trackers(config.logger)
    load_metrics(config.metrics)
    user_transform(config)
    # only imported: an instance could have side effects before the run is accepted
    for name in config.callbacks:
        import_setting("callbacks", name)


def user_transform(config: TrainConfig) -> pipeline.UserTransform | None:
    """Return the user's own transform of training images, if there is one."""
    name = config.transform
    if name is None:
        return None
    transform = import_setting("transform", name)
    if not callable(transform) or isinstance(transform, type):
        raise errors.SettingError(
            f"--transform {name} must be a function from an image to an image"
        )
    return pipeline.UserTransform(transform, name, config.seed)


def check_data(config: TrainConfig, dataset: Dataset) -> None:
    """Refuse settings that contradict the data, and call the user's own metrics and loss once."""
    num_classes = len(dataset.classes)
    named = config.spec.get("num_classes", num_classes)
    if named != num_classes:
        raise errors.SettingError(
            f"--spec.num-classes {named} contradicts the data, which have {num_classes} classes; "
            "leave it out"
        )
    needs_validation = "--probe" if config.probe else "--patience" if config.patience else ""
    if needs_validation and "val" not in dataset.splits:
        raise errors.SettingError(
            f"{needs_validation} needs a validation split, and the data have none; raise "
            "--val-fraction above 0"
        )
    check_metrics(load_metrics(config.metrics), num_classes)
    # a user's loss may not accept the probabilities that mixing makes
    mixed = [f"--{n} {getattr(config, n):g}" for n in ("mixup", "cutmix") if getattr(config, n)]
    losses.check_loss(config.loss, num_classes, mixed=" and ".join(mixed) or None)


def check_model(config: RunConfig, start: InitialWeights) -> None:
    """Refuse impossible image sizes, frozen parts that do not exist, and a head without use."""
    for size in config.progressive:  # the patches must divide each of them
        try:
            start.spec.replace(image_size=size)
        except errors.SpecError as error:
            raise errors.SettingError(f"--progressive {size}: {error}") from None
    if not config.freeze and not config.freeze_blocks:
        return
    with torch.device("meta"):  # names and shapes only, without memory for the weights
        model = ViT(start.spec)
        frozen = parameters.freeze_parts(model, config, config.opt)
    problem = ""
    if config.pretrained is None and all(
        name in frozen or is_of_head(name) for name, _ in model.named_parameters()
    ):
        problem = "would train a head on features of random weights; pass --pretrained, or leave "
        problem += "out --freeze"
    # no gradient passes through a head of zeros; a distilled model has two heads
    weights = start.weights or {}
    heads = [name for name in ("head.weight", "head_dist.weight") if name in weights]
    if heads and all(name in frozen and not weights[name].any() for name in heads):
        problem = "freezes a new head of zeros, so that nothing before it would learn; do not "
        problem += "freeze the head"
    if problem:
        raise errors.SettingError(f"--freeze {' '.join(config.freeze)} {problem}")


def check_warmup(config: RunConfig, steps_per_epoch: int) -> None:
    """Refuse a warm-up that covers all steps or, for `rsqrt`, has none."""
    warmup, total = round(config.warmup_epochs * steps_per_epoch), config.epochs * steps_per_epoch
    problem = ""
    if config.warmup_epochs and warmup >= total:
        problem = f"covers all {messages.plural(total, 'step')} of the run; lower it"
    elif config.sched == "rsqrt" and not warmup:
        problem = (
            "rounds to no step, and --sched rsqrt needs a warm-up; raise it to "
            f"{1 / steps_per_epoch:.2g} or more"
        )
    if problem:
        raise errors.SettingError(f"--warmup-epochs {config.warmup_epochs:g} {problem}")


def notes_on_recipe(config: RunConfig, recipe: Settings, spec: ViTSpec, images: Split) -> list[str]:
    """Return lines on a recipe for the data, and on colours that the recipe's model loses."""
    if config.recipe is None and config.pretrained is None and config.data in RECIPES:
        return [f"a recipe exists for this data: --recipe {config.data}"]
    of_one_channel = recipe.get("spec", {}).get("in_channels") == spec.in_channels == 1
    if not of_one_channel:
        return []
    for index in range(0, len(images), -(-len(images) // IMAGES_LOOKED_AT)):
        pixels = images.read(index)
        # grey files are read as RGB with three equal channels
        if (pixels != pixels[:, :, :1]).any():
            statistics = " with three values of --mean and --std"
            return [
                f"warning: recipe {config.recipe} has a model of one channel, so the colour images "
                f"become grey; --spec.in-channels 3{statistics if config.mean else ''} keeps their "
                "colours"
            ]
    return []
