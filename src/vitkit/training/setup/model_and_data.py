"""Checks of the settings against the model and the data of the run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import Split
from vitkit.errors import SettingError, SpecError
from vitkit.evaluation.loop import check_metrics, load_metrics
from vitkit.messages import plural
from vitkit.models.interface.classifier import is_of_head
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.training.config.data_settings import FineTuningSettings
from vitkit.training.config.train_config import USUAL, RunConfig, TrainConfig
from vitkit.training.optimization.losses import check_loss
from vitkit.training.optimization.parameters import freeze_parts
from vitkit.training.recipes import recipe_settings

IMAGES_LOOKED_AT = 4
"""Training images that are read to see whether a dataset has colours."""


def check_model(config: TrainConfig, spec: ViTSpec) -> None:
    """Refuse frozen parts that do not exist, a model frozen as a whole, and impossible image sizes.

    Args:
        config: the settings.
        spec: the model; its number of classes does not matter.

    Raises:
        SettingError: names the flag.
    """
    if config.freeze or config.freeze_blocks:
        with torch.device("meta"):  # names and shapes only, without memory for the weights
            model = ViT(spec)
            frozen = freeze_parts(model, config, config.opt or USUAL["opt"])
        trains_head_alone = all(
            name in frozen or is_of_head(name) for name, _ in model.named_parameters()
        )
        if config.pretrained is None and trains_head_alone:
            raise SettingError(
                f"--freeze {' '.join(config.freeze)} would train a head on features of random "
                "weights; pass --pretrained, or leave out --freeze"
            )
    for size in config.progressive:  # the patches must divide each of them
        try:
            spec.replace(image_size=size)
        except SpecError as error:
            raise SettingError(f"--progressive {size}: {error}") from None
    if config.epochs is not None and len(config.progressive) > config.epochs:
        raise SettingError(
            f"--progressive has {len(config.progressive)} sizes, more than "
            f"{plural(config.epochs, 'epoch')}; pass fewer sizes, or raise --epochs"
        )


def check_head(
    settings: FineTuningSettings, opt: str, spec: ViTSpec, weights: Mapping[str, Tensor] | None
) -> None:
    """Refuse a frozen head of zeros: no gradient passes through it.

    Args:
        settings: name what is frozen.
        opt: the optimizer.
        spec: the model.
        weights: its initial weights; `None` for random ones, which have no such head.

    Raises:
        SettingError: the head is frozen.
    """
    if weights is None or not (settings.freeze or settings.freeze_blocks):
        return
    with torch.device("meta"):
        frozen = freeze_parts(ViT(spec), settings, opt)
    # a distilled model has two heads
    heads = [name for name in ("head.weight", "head_dist.weight") if name in weights]
    if heads and all(name in frozen and not weights[name].any() for name in heads):
        raise SettingError(
            f"--freeze {' '.join(settings.freeze)} freezes a new head of zeros, so that nothing "
            "before it would learn; do not freeze the head"
        )


def check_warmup(settings: RunConfig, steps_per_epoch: int) -> None:
    """Refuse a warm-up that covers all steps or, for `rsqrt`, has none.

    Raises:
        SettingError: names the flag.
    """
    warmup = round(settings.warmup_epochs * steps_per_epoch)
    total = settings.epochs * steps_per_epoch
    if settings.warmup_epochs and warmup >= total:
        raise SettingError(
            f"--warmup-epochs {settings.warmup_epochs:g} covers all {plural(total, 'step')} of the "
            "run; lower it"
        )
    if settings.sched == "rsqrt" and not warmup:
        raise SettingError(
            f"--sched rsqrt needs a warm-up, and --warmup-epochs {settings.warmup_epochs:g} of "
            f"{plural(steps_per_epoch, 'step')} per epoch rounds to none; raise it to "
            f"{1 / steps_per_epoch:.2g} or more"
        )


def check_data(config: TrainConfig, dataset: Dataset) -> None:
    """Refuse settings that contradict the data, and call the user's own metrics and loss once.

    Raises:
        SettingError: settings that contradict the data, or a loss that cannot be used.
        UserCodeError: a metric that raises, or does not return one number.
    """
    num_classes = len(dataset.classes)
    named = config.spec.get("num_classes", num_classes)
    if named != num_classes:
        raise SettingError(
            f"--spec.num-classes {named} contradicts the data, which have {num_classes} classes; "
            "leave it out"
        )
    if config.probe and "val" not in dataset.splits:
        raise SettingError(
            "--probe is evaluated on the validation split, and the data have none; raise "
            "--val-fraction above 0"
        )
    if config.patience is not None and "val" not in dataset.splits:
        raise SettingError(
            f"--patience {config.patience} needs a validation split, and the data have none; "
            "raise --val-fraction above 0, or leave out --patience"
        )
    check_metrics(load_metrics(config.metrics), num_classes)
    # a user's loss may not accept the probabilities that mixing makes
    mixed = [
        f"--{name} {getattr(config, name):g}"
        for name in ("mixup", "cutmix")
        if getattr(config, name)
    ]
    check_loss(config.loss, num_classes, mixed=" and ".join(mixed) or None)


def note_on_colours(config: TrainConfig, spec: ViTSpec, images: Split) -> list[str]:
    """Return at most one line, on colour images for a recipe's model with one channel.

    Args:
        config: the settings.
        spec: the model.
        images: training images; a few of them are read.
    """
    chosen = recipe_settings(config.recipe).get("spec", {}).get("in_channels")
    if chosen != 1 or spec.in_channels != 1:
        return []
    shown = range(0, len(images), -(-len(images) // IMAGES_LOOKED_AT))
    if not any(_has_colours(images.read(index)) for index in shown):
        return []
    statistics = " with three values of --mean and --std" if len(config.mean or ()) == 1 else ""
    return [
        f"warning: recipe {config.recipe} has a model of one channel, so the colour images become "
        f"grey; --spec.in-channels 3{statistics} keeps their colours"
    ]


def _has_colours(image: UInt8[np.ndarray, "H W C"]) -> bool:
    # grey files are read as RGB with three equal channels
    return bool((image != image[:, :, :1]).any())
