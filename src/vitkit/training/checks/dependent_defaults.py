"""Defaults that follow from other settings, such as a warm-up that fits into few epochs."""

from __future__ import annotations

from dataclasses import replace

from vitkit.messages import plural
from vitkit.training.checks.unused_settings import reset_unused
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.recipes import recipe_settings


def resolve_defaults(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Adjust defaults to the settings that were given; return the config and a note per change."""
    config, reset = reset_unused(config)
    config, shortened = _shorten_warmup(config)
    config, lowered = _lower_final_rate(config)
    return config, reset + shortened + lowered


def _shorten_warmup(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Shorten the recipe's warm-up to fit into the number of epochs that was given."""
    if config.epochs is None or config.warmup_epochs is None:
        return config, []
    if config.warmup_epochs < config.epochs:
        return config, []
    default = recipe_settings(config.recipe).get("warmup_epochs")
    if config.warmup_epochs != default:  # given by the user: refused later
        return config, []
    shorter = config.epochs / 10
    epochs = plural(config.epochs, "epoch")
    note = f"warmup_epochs {default:g} shortened to {shorter:g}, as the run has {epochs}"
    return replace(config, warmup_epochs=shorter), [note]


def _lower_final_rate(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Lower the default final rate below the peak rate that was given."""
    if config.lr is None or config.sched == "constant" or config.min_lr <= config.lr:
        return config, []
    default = recipe_settings(config.recipe).get("min_lr", TrainConfig.min_lr)
    if config.min_lr != default:  # as above
        return config, []
    lower = config.lr / 100
    note = f"min_lr {default:g} lowered to {lower:g}, as lr is small"
    return replace(config, min_lr=lower), [note]
