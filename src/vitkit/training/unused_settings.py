"""Settings without effect beside the others: refused, or left out where only a recipe has them."""

from __future__ import annotations

from collections.abc import Iterator

from vitkit.errors import SettingError, plural
from vitkit.frozen import replace as replaced
from vitkit.training.config.train_config import Settings, TrainConfig
from vitkit.training.recipes import recipe_settings

SAYS_HOW = {
    ("mixup", "cutmix"): ("mixup_prob", "mixup_off_epoch"),
    ("teacher",): ("distill", "distill_alpha", "distill_temperature", "distill_views"),
    ("model_ema",): ("model_ema_decay",),
}
"""Settings that mean nothing without one of others."""
OF_OPTIMIZERS = {
    "momentum": ("sgd",),
    "beta1": ("adamw", "adam", "muon"),
    "beta2": ("adamw", "adam", "muon"),
}
"""Settings that these optimizers alone have."""
UNPROBED = (
    "aa", "color_jitter", "reprob", "repeated_aug", "mixup", "cutmix", "save_augmented_grid",
    "progressive", "balance", "model_ema", "freeze", "freeze_blocks", "layer_decay", "teacher",
    "max_steps", "save_every", "patience", "compile", "grad_checkpointing",
)  # fmt: skip
"""Settings of training that somebody asked for who asks for a probe, too, by mistake."""


def check_idle(config: TrainConfig) -> None:
    """Raise `SettingError` for the first setting that would have no effect."""
    for _, why in _idle(config):
        raise SettingError(why)


def without_idle(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """What a recipe has for something that was turned off goes with it, and that is said."""
    names = {name for several, _ in _idle(config) for name in several}
    if not names or config.recipe is None:
        return config, []
    recipe: Settings = recipe_settings(config.recipe)
    by_recipe = TrainConfig(**{**recipe, "data": config.data})
    names = {name for name in names if getattr(config, name) == getattr(by_recipe, name)}
    if not names:
        return config, []
    said = ", ".join(f"{name} {getattr(config, name)}" for name in sorted(names))
    usual = {name: getattr(TrainConfig, name) for name in names}
    return replaced(config, **usual), [f"of recipe {config.recipe}, without effect here: {said}"]


def _idle(config: TrainConfig) -> Iterator[tuple[list[str], str]]:
    """Names of settings that have no effect, and a line why."""
    if config.probe is not None and (names := _set(config, *UNPROBED)):
        listed = " and ".join(names)
        why = (f"{listed} cannot be had with probe: features are computed once, of every image "
               f"as it is in evaluation; leave {listed} out")  # fmt: skip
        yield names, why
    if config.bce_threshold is not None and config.loss != "bce":
        why = f"bce_threshold {config.bce_threshold:g} is for --loss bce; pass both"
        yield ["bce_threshold"], why
    if ":" in config.loss and config.label_smoothing and _set(config, "label_smoothing"):
        why = (f"label_smoothing {config.label_smoothing:g} is for vitkit's own losses; "
               f"{config.loss} gets labels as they are: pass --label-smoothing 0")  # fmt: skip
        yield ["label_smoothing"], why
    for owners, details in SAYS_HOW.items():
        names = _set(config, *details)
        if names and not any(getattr(config, owner) for owner in owners):
            flags = " or ".join(f"--{owner.replace('_', '-')}" for owner in owners)
            value = getattr(config, names[0])
            yield names, f"{names[0]} {value} only says how; pass {flags} with it"
    if _set(config, "mixup_switch_prob") and not (config.mixup and config.cutmix):
        why = (f"mixup_switch_prob {config.mixup_switch_prob} chooses between two; pass --mixup "
               f"and --cutmix with it")  # fmt: skip
        yield ["mixup_switch_prob"], why
    if config.probe is None:
        yield from _of_optimizers(config)
        yield from _contradicted(config)


def _contradicted(config: TrainConfig) -> Iterator[tuple[list[str], str]]:
    """Settings that a choice of another setting leaves without effect."""
    if config.sched == "constant" and _set(config, "min_lr"):
        why = (f"--min-lr {config.min_lr:g} is where a schedule ends, and --sched constant stays "
               f"at its peak; leave one out")  # fmt: skip
        yield ["min_lr"], why
    if config.fit == "squash" and config.crop_ratio is not None:
        why = (f"--crop-ratio {config.crop_ratio:g} is for --fit crop; --fit squash cuts nothing "
               f"off: leave one out, or take --fit squash-crop")  # fmt: skip
        yield ["crop_ratio"], why
    if config.teacher is not None and config.distill_alpha == 0:
        why = ("--distill-alpha 0 leaves the teacher without a part in the loss; raise it, or "
               "leave --teacher out")  # fmt: skip
        yield ["distill_alpha"], why
    if config.teacher is not None and config.distill_alpha == 1 and _set(config, "label_smoothing"):
        why = (f"--label-smoothing {config.label_smoothing:g} is for labels, and --distill-alpha 1 "
               f"leaves them without a part in the loss; leave one out")  # fmt: skip
        yield ["label_smoothing"], why
    random = (config.flip, config.shift, config.crop_scale < 1, config.aa, config.color_jitter,
              config.reprob, config.mixup, config.cutmix)  # fmt: skip
    if config.repeated_aug > 1 and not any(random):
        why = (f"--repeated-aug {config.repeated_aug} shows an image several times, and nothing "
               f"changes it at random; leave it out, or pass --crop-scale or --aa")  # fmt: skip
        yield ["repeated_aug"], why


def ends_before(config: TrainConfig, total_steps: int) -> list[str]:
    """Lines on settings that speak of a time after the end of the run.

    Args:
        config: the settings.
        total_steps: optimizer steps of all epochs.
    """
    end = f"the run ends after {plural(config.epochs, 'epoch')}"
    beyond = [
        f"{name} {value}"
        for name, value in (("mixup_off_epoch", config.mixup_off_epoch),
                            ("patience", config.patience))
        if value is not None and value >= config.epochs
    ]  # fmt: skip
    lines = [f"{' and '.join(beyond)} without effect: {end}"] if beyond else []
    if config.max_steps is not None and config.max_steps > total_steps:
        steps = plural(total_steps, "step")
        lines.append(f"max_steps {config.max_steps} without effect: {end}, {steps}")
    return lines


def for_several(config: TrainConfig, processes: int) -> list[str]:
    """A line on settings that mean something to several processes alone."""
    idle = _set(config, "parallel", "timeout") if processes == 1 else []
    names = " and ".join(f"{name} {getattr(config, name)}" for name in idle)
    return [f"{names} without effect: there is one process"] if idle else []


def _of_optimizers(config: TrainConfig) -> Iterator[tuple[list[str], str]]:
    for name in _set(config, *OF_OPTIMIZERS):
        if config.opt not in OF_OPTIMIZERS[name]:
            why = (f"{name} {getattr(config, name):g} is for {', '.join(OF_OPTIMIZERS[name])} and "
                   f"nothing to opt {config.opt}; leave it out")  # fmt: skip
            yield [name], why


def _set(config: TrainConfig, *names: str) -> list[str]:
    """Those that are not as they are by default."""
    return [name for name in names if getattr(config, name) != getattr(TrainConfig, name)]
