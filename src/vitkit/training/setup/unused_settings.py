"""Settings that have no effect in combination with others: refused, or reset from a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from vitkit.errors import SettingError
from vitkit.messages import flag_name, plural
from vitkit.training.config.data_settings import AugmentationSettings
from vitkit.training.config.meaning import Settings, fields_where, meanings
from vitkit.training.config.run_settings import OptimizerSettings
from vitkit.training.config.train_config import USUAL, RunConfig, TrainConfig
from vitkit.training.recipes import RECIPES, recipe_settings


@dataclass(frozen=True)
class Unused:
    """Settings that have no effect.

    Attributes:
        names: names of the settings, one or more.
        reason: why, and how to mend it, in one line.
    """

    names: list[str]
    reason: str


def refuse_unused(config: TrainConfig) -> None:
    """Raise `SettingError` for the first setting that would have no effect."""
    for unused in _find_unused(config):
        raise SettingError(unused.reason)


def _reset_unused(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Reset settings that come from the recipe only and belong to a feature that is off."""
    names = {name for unused in _find_unused(config) for name in unused.names}
    if not names or config.recipe is None:
        return config, []
    recipe: Settings = recipe_settings(config.recipe)
    by_recipe = TrainConfig(**{**recipe, "data": config.data})
    # a value that differs from the recipe's was given by the user, and is refused later
    names = {name for name in names if getattr(config, name) == getattr(by_recipe, name)}
    if not names:
        return config, []
    listed = ", ".join(f"{name} {getattr(config, name)}" for name in sorted(names))
    # a dataclass has its defaults as attributes of the class
    defaults = {name: getattr(TrainConfig, name) for name in names}
    return replace(config, **defaults), [
        f"from recipe {config.recipe}, without effect here: {listed}"
    ]


def notes_on_settings(config: RunConfig, processes: int, steps_per_epoch: int) -> list[str]:
    """Return lines on settings without effect in this run, and on a recipe for the data.

    Args:
        config: the settings.
        processes: number of processes of the run.
        steps_per_epoch: optimizer steps of an epoch.
    """
    notes = _notes_on_processes(config, processes)
    if config.probe is None:
        notes += _notes_beyond_end(config, config.epochs * steps_per_epoch)
    notes += _notes_on_random_weights(config)
    if config.recipe is None and config.pretrained is None and config.data in RECIPES:
        notes.append(f"a recipe exists for this data: --recipe {config.data}")
    return notes


def _notes_beyond_end(config: RunConfig, total_steps: int) -> list[str]:
    """Return lines on settings that refer to a time after the end of the run.

    Args:
        config: the settings.
        total_steps: optimizer steps of all epochs.
    """
    end = f"the run ends after {plural(config.epochs, 'epoch')}"
    lines = []
    beyond = []
    for name in ("mixup_off_epoch", "patience"):
        epoch = getattr(config, name)
        if epoch is not None and epoch >= config.epochs:
            beyond.append(f"{name} {epoch}")
    if beyond:
        lines.append(f"{' and '.join(beyond)} without effect: {end}")
    if config.max_steps is not None and config.max_steps > total_steps:
        steps = plural(total_steps, "step")
        lines.append(f"max_steps {config.max_steps} without effect: {end}, {steps}")
    return lines


def _notes_on_processes(config: TrainConfig, processes: int) -> list[str]:
    """Return at most one line, on settings that need several processes in a run with one."""
    names = _set(config, fields_where(TrainConfig, several_processes=True))
    if processes > 1 or not names:
        return []
    listed = " and ".join(f"{name} {getattr(config, name)}" for name in names)
    return [f"{listed} without effect: the run has one process"]


def _notes_on_random_weights(config: TrainConfig) -> list[str]:
    """Return at most one line, on settings for trained weights where the weights are random."""
    names = _set(config, fields_where(TrainConfig, for_pretrained=True))
    if config.pretrained is not None or not names:
        return []
    return [f"{' and '.join(names)} without --pretrained: the model starts from random weights"]


def note_on_probe(config: TrainConfig) -> str | None:
    """Return a line on the settings of steps, which a probe ignores; None without any."""
    ignored = _set(config, fields_where(TrainConfig, with_probe="ignored"))
    if config.amp not in ("auto", "off"):
        ignored.append("amp")
    if not ignored:
        return None
    return f"--probe makes no training steps: {', '.join(ignored)} without effect"


def _find_unused(config: TrainConfig) -> Iterator[Unused]:
    """Yield settings that have no effect, the most general cause first."""
    if config.probe is not None:
        yield from _refused_with_probe(config)
    yield from _of_another_loss(config)
    yield from _of_features_that_are_off(config)
    if config.probe is None:  # a probe ignores the rest; the log names what it ignores
        yield from _of_another_optimizer(config)
        yield from _overruled(config)


def _refused_with_probe(config: TrainConfig) -> Iterator[Unused]:
    names = _set(config, fields_where(TrainConfig, with_probe="refused"))
    if names:
        listed = " and ".join(names)
        yield Unused(
            names,
            f"{listed} cannot be combined with --probe, which computes the features of each "
            f"image once, without augmentation; leave {listed} out",
        )


def _of_another_loss(settings: OptimizerSettings) -> Iterator[Unused]:
    if settings.bce_threshold is not None and settings.loss != "bce":
        yield Unused(
            ["bce_threshold"],
            f"--bce-threshold {settings.bce_threshold:g} has no effect without --loss bce; add "
            "it, or leave out --bce-threshold",
        )
    # a function of the user gets logits and targets, and no smoothing
    own_loss = ":" in settings.loss
    if own_loss and settings.label_smoothing and _set(settings, ["label_smoothing"]):
        yield Unused(
            ["label_smoothing"],
            f"--label-smoothing {settings.label_smoothing:g} has no effect on your own --loss "
            f"{settings.loss}, which gets the labels unchanged; pass --label-smoothing 0",
        )


def _of_features_that_are_off(config: TrainConfig) -> Iterator[Unused]:
    """Yield details, such as `mixup_prob`, of features that are off, such as `mixup`."""
    details: dict[tuple[str, ...], list[str]] = {}
    for name, meaning in meanings(TrainConfig).items():
        if meaning.only_with:
            # details of the same features are refused or reset together
            details.setdefault(meaning.only_with, []).append(name)
    for features, detail_names in details.items():
        names = _set(config, detail_names)
        if names and not any(getattr(config, feature) for feature in features):
            flags = " or ".join(map(flag_name, features))
            value = getattr(config, names[0])
            yield Unused(
                names,
                f"{flag_name(names[0])} {value} has no effect without {flags}; add "
                f"{flags}, or leave it out",
            )
    if _set(config, ["mixup_switch_prob"]) and not (config.mixup and config.cutmix):
        yield Unused(
            ["mixup_switch_prob"],
            f"--mixup-switch-prob {config.mixup_switch_prob} chooses between mixup and CutMix; "
            "add --mixup and --cutmix, or leave it out",
        )


def _of_another_optimizer(config: TrainConfig) -> Iterator[Unused]:
    opt = config.opt or USUAL["opt"]
    for name, meaning in meanings(TrainConfig).items():
        for_others = meaning.optimizers and opt not in meaning.optimizers
        if for_others and _set(config, [name]):
            optimizers = ", ".join(meaning.optimizers)
            yield Unused(
                [name],
                f"{flag_name(name)} {getattr(config, name):g} has no effect on --opt "
                f"{opt} (it is for {optimizers}); leave it out",
            )


def _overruled(config: TrainConfig) -> Iterator[Unused]:
    """Yield settings that have no effect because of the value of another setting."""
    if config.sched == "constant" and _set(config, ["min_lr"]):
        yield Unused(
            ["min_lr"],
            f"--min-lr {config.min_lr:g} has no effect with --sched constant, which stays at "
            "--lr; leave one of them out",
        )
    if config.fit == "squash" and config.crop_ratio is not None:
        yield Unused(
            ["crop_ratio"],
            f"--crop-ratio {config.crop_ratio:g} has no effect with --fit squash, which crops "
            "nothing; leave one of them out, or pass --fit squash-crop",
        )
    if config.teacher is not None and config.distill_alpha == 0:
        yield Unused(
            ["distill_alpha"],
            "--distill-alpha 0 removes the teacher from the loss; raise it, or leave out --teacher",
        )
    # the default smoothing is not refused: the user did not ask for it
    only_teacher = config.teacher is not None and config.distill_alpha == 1
    if only_teacher and _set(config, ["label_smoothing"]):
        yield Unused(
            ["label_smoothing"],
            f"--label-smoothing {config.label_smoothing:g} has no effect with --distill-alpha 1, "
            "which removes the labels from the loss; leave one of them out",
        )
    if config.repeated_aug > 1 and not _changes_images(config):
        yield Unused(
            ["repeated_aug"],
            f"--repeated-aug {config.repeated_aug} repeats images, but no augmentation is on; "
            "leave it out, or add --crop-scale or --aa",
        )


def _changes_images(settings: AugmentationSettings) -> bool:
    """Return True if training images are changed at random."""
    # a setting left open gets its usual value, or a stronger augmentation
    names = ("flip", "shift", "crop_scale")
    given = {name: getattr(settings, name) for name in names}
    decided = USUAL | {name: value for name, value in given.items() if value is not None}
    changes = (
        decided["flip"],
        decided["shift"],
        decided["crop_scale"] < 1,
        settings.transform,
        settings.aa,
        settings.color_jitter,
        settings.reprob,
        settings.mixup,
        settings.cutmix,
    )
    return any(changes)


def _set(settings: object, names: Iterable[str]) -> list[str]:
    """Return those of the names whose settings differ from their defaults."""
    defaults = type(settings)
    changed = []
    for name in names:
        default = getattr(defaults, name)
        # a decided setting may have its usual value
        if getattr(settings, name) not in (default, USUAL.get(name, default)):
            changed.append(name)
    return changed


# Defaults that follow from other settings, such as a warm-up that fits into few epochs.


def resolve_defaults(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    """Adjust defaults to the settings that were given; return the config and a note per change."""
    config, reset = _reset_unused(config)
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
