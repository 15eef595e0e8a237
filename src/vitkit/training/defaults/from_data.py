"""Derive the open settings from the training images: model, batch size, epochs, rate."""

from __future__ import annotations

from typing import Any

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import Split
from vitkit.frozen import field_names
from vitkit.messages import plural
from vitkit.training.config.field_types import Settings
from vitkit.training.config.run_config import USUAL, RunConfig
from vitkit.training.config.sections.model import DEFAULT_MODEL
from vitkit.training.config.train_config import TrainConfig, leaves_model_open
from vitkit.training.defaults.model_size import ImageStatistics, default_size, scratch_settings
from vitkit.training.defaults.schedule import (
    default_batch_size,
    default_epochs,
    default_warmup,
)
from vitkit.training.recipes.transfer import finetune

OF_OPTIMIZER = ("lr", "beta2")
"""Settings that belong to the optimizer of a recipe."""
OF_MODEL = ("model", "spec", "fit")
"""Settings without a default, which are chosen with the model."""


def chooses_model(config: TrainConfig) -> bool:
    """Return whether the model follows from the data.

    A student's does not: it gets the images as its teacher does.
    """
    return leaves_model_open(config) and config.probe is None and config.teacher is None


def decide_settings(
    config: TrainConfig, dataset: Dataset, processes: int = 1
) -> tuple[RunConfig, str]:
    """Derive the open settings; a pure function of settings and data.

    What a setting, a recipe or a stopped run names is never changed.

    Args:
        config: the settings.
        dataset: with its training images.
        processes: processes that share each batch.

    Returns:
        All settings, and at most one line: what was chosen, and what may be better.

    Raises:
        SettingError: an image size that no model for these images has.
    """
    train = dataset.splits["train"]
    model = _model_settings(config, train)
    settings = USUAL | model
    # config.yaml names the model even where the default one is taken
    if config.pretrained is None:
        settings.setdefault("model", DEFAULT_MODEL)
    else:
        settings["lr"] = finetune()["lr"]
        settings["batch_size"] = finetune()["batch_size"]
    if config.probe is None:
        settings |= _steps(config, len(train), settings["batch_size"], model, processes)
    elif config.epochs is not None:  # a probe makes no steps
        settings["warmup_epochs"] = default_warmup(config.epochs)
    if config.opt is not None and config.opt != settings["opt"]:
        settings |= {name: USUAL[name] for name in OF_OPTIMIZER}
    decided = RunConfig(**settings | _given(config, settings))
    return decided, _describe(config, decided, len(train))


def _given(config: TrainConfig, decided: Settings) -> dict[str, Any]:
    """Return the settings that are not left open.

    Args:
        config: the settings.
        decided: the settings that those left open get.
    """
    given = {}
    for name in field_names(TrainConfig):
        value = getattr(config, name)
        is_open = value is None and name in USUAL
        # a chosen spec includes the given fields already
        follows = name in decided and (name == "spec" or (name in OF_MODEL and not value))
        if not is_open and not follows:
            given[name] = value
    return given


def _model_settings(config: TrainConfig, train: Split) -> Settings:
    """Return the model for the training images, with its rate and augmentation, if it is open."""
    if not chooses_model(config):
        return {}
    statistics = ImageStatistics.of(train)
    size = default_size(len(train), statistics)
    if size is None:
        return {}
    named = config.spec.get("image_size")
    side = config.img_size or (named if isinstance(named, int) else None)
    recipe = scratch_settings(size, statistics, side=side)
    names = [*USUAL, "model", "spec"]
    # crops of a part of the image are the user's choice
    if config.fit is None and config.crop_ratio is None:
        names.append("fit")
    settings = {name: recipe[name] for name in names if name in recipe}
    if config.mean is not None:
        settings["spec"] |= {"in_channels": len(config.mean)}
    settings["spec"] |= config.spec
    # shards of a matrix cannot be made orthogonal
    if config.parallel == "fsdp" and settings.get("opt") not in (None, USUAL["opt"]):
        settings |= {name: USUAL[name] for name in ("opt", *OF_OPTIMIZER)}
    return settings


def _steps(
    config: TrainConfig, images: int, most: int, model: Settings, processes: int
) -> Settings:
    """Return the settings of the steps; those that are given are taken into account."""
    batch_size = config.batch_size or default_batch_size(config, images, most, processes)
    last_batch = config.last_batch or ("drop" if config.batch_size else "fill")
    epochs = config.epochs or default_epochs(
        config, images, batch_size, fill=last_batch == "fill", scratch=bool(model)
    )
    return {
        "batch_size": batch_size,
        "last_batch": last_batch,
        "epochs": epochs,
        "warmup_epochs": default_warmup(epochs),
    }


def _describe(config: TrainConfig, decided: RunConfig, images: int) -> str:
    """Return a line on the chosen settings and better alternatives; empty if none was chosen."""
    if config.probe is not None:
        return ""
    parts = []
    advice = ""
    if chooses_model(config) and decided.spec:
        spec = decided.spec
        side = config.img_size or spec["image_size"]
        if isinstance(side, list | tuple):  # height and width
            side = " x ".join(map(str, side))
        # the spec is checked later: its depth may be any value here
        blocks = "1 block" if spec["depth"] == 1 else f"{spec['depth']} blocks"
        parts.append(f"a ViT of width {spec['width']} with {blocks} at {side} px")
        advice = (
            "; --auto also tries simpler models, and --pretrained WEIGHTS is usually far better"
        )
    elif config.pretrained is not None and config.recipe is None:
        advice = "; --recipe finetune has further settings for trained weights"
    if config.batch_size is None:
        parts.append(f"batch {decided.batch_size}")
    if config.epochs is None:
        parts.append(plural(decided.epochs, "epoch"))
    if not parts:  # all settings were given
        return ""
    if config.lr is None:
        parts.append(f"lr {decided.lr:g}")
    return f"chosen for {plural(images, 'training image')}: {', '.join(parts)}{advice}"
