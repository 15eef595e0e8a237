"""Settings that contradict each other or have no effect: refused, or reset where a recipe has them.

A rule is the text of its message, with the settings in braces; it begins with the flag at fault.
Rules of one kind follow from `Meaning`: what a probe refuses, what belongs to a feature that is
off or to another optimizer. Checks against the model and the data are in `training.plan`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from vitkit import errors, messages
from vitkit.training.config.meaning import fields_where, meanings
from vitkit.training.config.train_config import USUAL, TrainConfig

ELEMENTWISE_OPTIMIZERS = ("adamw", "adam", "sgd")
"""Elementwise optimizers, which can update a shard of a weight."""


class Contradiction(NamedTuple):
    """Settings that are wrong beside others.

    Attributes:
        names: the settings without effect; empty where the values are wrong.
        message: why, and how to mend it, in one line.
    """

    names: tuple[str, ...]
    message: str


class Rule(NamedTuple):
    """When settings contradict each other, the message, and the setting without effect, if any."""

    applies: Callable[[TrainConfig], object]
    message: str
    unused: str = ""


OF_THE_LOSS = (
    Rule(
        lambda c: c.bce_threshold is not None and c.loss != "bce",
        "--bce-threshold {c.bce_threshold:g} has no effect without --loss bce; add it, or leave "
        "out --bce-threshold",
        "bce_threshold",
    ),
    Rule(  # a function of the user gets logits and targets, and no smoothing
        lambda c: ":" in c.loss and c.label_smoothing and _given(c, ["label_smoothing"]),
        "--label-smoothing {c.label_smoothing:g} has no effect on your own --loss {c.loss}, which "
        "gets the labels unchanged; pass --label-smoothing 0",
        "label_smoothing",
    ),
    Rule(
        lambda c: _given(c, ["mixup_switch_prob"]) and not (c.mixup and c.cutmix),
        "--mixup-switch-prob {c.mixup_switch_prob} chooses between mixup and CutMix; add --mixup "
        "and --cutmix, or leave it out",
        "mixup_switch_prob",
    ),
)
OF_THE_STEPS = (
    Rule(
        lambda c: c.sched == "constant" and _given(c, ["min_lr"]),
        "--min-lr {c.min_lr:g} has no effect with --sched constant, which stays at --lr; leave "
        "one of them out",
        "min_lr",
    ),
    Rule(
        lambda c: c.fit == "squash" and c.crop_ratio is not None,
        "--crop-ratio {c.crop_ratio:g} has no effect with --fit squash, which crops nothing; "
        "leave one of them out, or pass --fit squash-crop",
        "crop_ratio",
    ),
    Rule(
        lambda c: c.teacher is not None and c.distill_alpha == 0,
        "--distill-alpha 0 removes the teacher from the loss; raise it, or leave out --teacher",
        "distill_alpha",
    ),
    Rule(  # the default smoothing is not refused: the user did not ask for it
        lambda c: c.teacher and c.distill_alpha == 1 and _given(c, ["label_smoothing"]),
        "--label-smoothing {c.label_smoothing:g} has no effect with --distill-alpha 1, which "
        "removes the labels from the loss; leave one of them out",
        "label_smoothing",
    ),
    Rule(
        lambda c: c.repeated_aug > 1 and not changes_images(USUAL | _without_open(c)),
        "--repeated-aug {c.repeated_aug} repeats images, but no augmentation is on; leave it out, "
        "or add --crop-scale or --aa",
        "repeated_aug",
    ),
)
WRONG_VALUES = (
    Rule(
        lambda c: c.lr is not None and c.sched != "constant" and c.min_lr > c.lr,
        "--min-lr {c.min_lr:g} is above --lr {c.lr:g}; lower it",
    ),
    Rule(
        lambda c: c.epochs and c.warmup_epochs is not None and c.warmup_epochs >= c.epochs,
        "--warmup-epochs {c.warmup_epochs:g} must be below the length of the run, {epochs}; lower "
        "it, or raise --epochs",
    ),
    Rule(
        lambda c: c.sched == "rsqrt" and c.warmup_epochs == 0,
        "--sched rsqrt needs a warm-up, as its rate falls with sqrt(warm-up / step); pass "
        "--warmup-epochs above 0",
    ),
    Rule(
        lambda c: c.epochs is not None and len(c.progressive) > c.epochs,
        "--progressive has more sizes than {epochs}; pass fewer sizes, or raise --epochs",
    ),
    Rule(
        lambda c: c.repeated_aug > 1 and c.batch_size and c.repeated_aug >= c.batch_size,
        "--repeated-aug {c.repeated_aug} fills a whole batch of {c.batch_size} with one image; "
        "lower it, or raise --batch-size",
    ),
    Rule(
        lambda c: c.distill == "hard" and _given(c, ["distill_temperature"]),
        "--distill-temperature {c.distill_temperature:g} has no effect with --distill hard, which "
        "uses only the teacher's top class; leave one of them out",
    ),
    Rule(
        lambda c: c.budget is not None,
        "--budget {c.budget} has no effect without --auto; add --auto, or set the length by "
        "--epochs",
    ),
    Rule(
        lambda c: c.resume is not None and c.overwrite,
        "--resume continues a run and --overwrite starts afresh; pass only one of them",
    ),
    Rule(  # features of random weights are meaningless
        lambda c: c.probe is not None and c.pretrained is None,
        "--probe needs the features of trained weights; pass --pretrained",
    ),
)
OF_PROCESSES = (
    Rule(
        lambda c: c.parallel == "fsdp" and (c.opt or "adamw") not in ELEMENTWISE_OPTIMIZERS,
        "--opt {c.opt} needs whole matrices, and --parallel fsdp splits them; pass --parallel ddp "
        "or --opt adamw",
    ),
    Rule(
        lambda c: c.probe is not None,
        "--probe runs in one process, not in {processes}; leave out --devices",
    ),
)


def check_contradictions(config: TrainConfig, processes: int = 1) -> None:
    """Raise `SettingError` for the first contradiction among the settings.

    Args:
        config: the settings; those that follow from the data may be open.
        processes: processes that share every batch.
    """
    more = OF_PROCESSES if processes > 1 else ()
    for found in (
        *_without_effect(config),
        *_follow(config, WRONG_VALUES + more, processes),
        *_of_batches(config, processes),
        *_of_pixels(config),
    ):
        raise errors.SettingError(found.message)


def _follow(config: TrainConfig, rules: Iterable[Rule], processes: int) -> Iterator[Contradiction]:
    epochs = messages.plural(config.epochs or 0, "epoch")
    for rule in rules:
        if rule.applies(config):
            text = rule.message.format(c=config, epochs=epochs, processes=processes)
            yield Contradiction((rule.unused,) if rule.unused else (), text)


def _without_effect(config: TrainConfig) -> Iterator[Contradiction]:
    """Yield settings that have no effect, the most general cause first."""
    if config.probe is not None:
        yield from _refused_with_probe(config)
    yield from _follow(config, OF_THE_LOSS, 1)
    yield from _of_what_is_off(config)
    if config.probe is None:  # a probe ignores the rest; the log names what it ignores
        yield from _follow(config, OF_THE_STEPS, 1)


def _refused_with_probe(config: TrainConfig) -> Iterator[Contradiction]:
    names = _given(config, fields_where(TrainConfig, with_probe="refused"))
    if names:
        listed = " and ".join(names)
        yield Contradiction(
            names,
            f"{listed} cannot be combined with --probe, which computes the features of each image "
            f"once, without augmentation; leave {listed} out",
        )


def _of_what_is_off(config: TrainConfig) -> Iterator[Contradiction]:
    """Yield details, such as `mixup_prob`, of features that are off, and of other optimizers."""
    opt = config.opt or USUAL["opt"]
    for name, meaning in meanings(TrainConfig).items():
        features, optimizers = meaning.only_with, meaning.optimizers
        if not (features or optimizers) or not _given(config, [name]):
            continue
        given = f"{messages.flag_name(name)} {getattr(config, name)}"
        if features and not any(getattr(config, feature) for feature in features):
            flags = " or ".join(map(messages.flag_name, features))
            yield Contradiction(
                (name,), f"{given} has no effect without {flags}; add {flags}, or leave it out"
            )
        if config.probe is None and optimizers and opt not in optimizers:
            yield Contradiction(
                (name,),
                f"{given} has no effect on --opt {opt} (it is for {', '.join(optimizers)}); leave "
                "it out",
            )


def _of_batches(config: TrainConfig, processes: int) -> Iterator[Contradiction]:
    """Yield a batch that does not divide into equal parts, or parts too small to mix."""
    batch, parts = config.batch_size, config.grad_accum_steps
    if batch is None:
        return
    # every process has as many images in each part as any other
    shares = parts * processes
    if batch % shares:
        below = batch // shares * shares
        sizes = f"{below} or {below + shares}" if below else f"{shares}"
        yield Contradiction(
            (),
            f"--batch-size {batch} is not divisible by {messages.plural(processes, 'process')} x "
            f"{messages.plural(parts, 'accumulation step')}; pass --batch-size {sizes}, or change "
            f"--grad-accum-steps {parts}",
        )
    # images are mixed with others of the same part, not of the whole batch
    if (config.mixup or config.cutmix) and batch // shares < 2:
        lower = ""
        if parts > 1:
            lower = f", or lower --grad-accum-steps {parts}"
        yield Contradiction(
            (),
            "--mixup and --cutmix need at least 2 images in each micro-batch, and there is "
            f"{batch // shares}; raise --batch-size{lower}",
        )


def _of_pixels(config: TrainConfig) -> Iterator[Contradiction]:
    """Yield statistics of pixels from 0 to 255: pixels are divided by 255 before."""
    for name, expected in (("mean", "from 0 to 1"), ("std", "from above 0 to 1")):
        values = getattr(config, name) or (0.5,)
        is_low = min(values) < 0 or (name == "std" and min(values) == 0)
        if is_low or max(values) > 1:
            given = " ".join(f"{value:g}" for value in values)
            hint = ""
            if not is_low:
                hint = "; for pixels of 0 to 255 divide by 255: "
                hint += " ".join(f"{value / 255:.3f}" for value in values)
            yield Contradiction((), f"--{name} {given}: expected values {expected}{hint}")


def changes_images(settings: Mapping[str, Any]) -> bool:
    """Return True if settings of a run change training images at random."""
    on = {name for name in fields_where(TrainConfig, changes_images=True) if settings.get(name)}
    if settings.get("crop_scale") == 1:  # a crop of the whole area
        on.discard("crop_scale")
    return bool(on)


def _without_open(config: TrainConfig) -> dict[str, Any]:
    """Return the settings, without those that are left open."""
    return {name: value for name, value in vars(config).items() if value is not None}


def _given(config: TrainConfig, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the names whose settings differ from their defaults."""
    changed = []
    for name in names:
        default = getattr(TrainConfig, name)
        # a decided setting may have its usual value
        if getattr(config, name) not in (default, USUAL.get(name, default)):
            changed.append(name)
    return tuple(changed)


# Defaults that follow from other settings, such as a warm-up that fits into few epochs.


def resolve_defaults(
    config: TrainConfig, recipe: Mapping[str, Any]
) -> tuple[TrainConfig, list[str]]:
    """Adjust what only the recipe has to the settings that were given.

    Args:
        config: the settings.
        recipe: the settings of its recipe; what differs from them was given by the user, and is
            refused where it has no effect.

    Returns:
        The settings, and a line for each change.
    """
    notes = []
    by_recipe = TrainConfig(**{**recipe, "data": config.data})
    names = {name for found in _without_effect(config) for name in found.names}
    names = {name for name in names if getattr(config, name) == getattr(by_recipe, name)}
    if names and recipe:
        listed = ", ".join(f"{name} {getattr(config, name)}" for name in sorted(names))
        notes.append(f"from recipe {config.recipe}, without effect here: {listed}")
        # a dataclass has its defaults as attributes of the class
        config = replace(config, **{name: getattr(TrainConfig, name) for name in names})
    epochs, warmup = config.epochs, config.warmup_epochs
    if epochs and warmup and epochs <= warmup == recipe.get("warmup_epochs"):
        config = replace(config, warmup_epochs=epochs / 10)
        notes.append(
            f"warmup_epochs {warmup:g} shortened to {epochs / 10:g}, as the run has "
            f"{messages.plural(epochs, 'epoch')}"
        )
    lr, low = config.lr, config.min_lr
    is_default = low == recipe.get("min_lr", TrainConfig.min_lr)
    if lr is not None and config.sched != "constant" and low > lr and is_default:
        config = replace(config, min_lr=lr / 100)
        notes.append(f"min_lr {low:g} lowered to {lr / 100:g}, as lr is small")
    return config, notes


def notes_on_settings(config: TrainConfig, processes: int, total_steps: int) -> list[str]:
    """Return lines on settings without effect in this run.

    Args:
        config: the settings, none of them open.
        processes: number of processes of the run.
        total_steps: optimizer steps of all epochs.
    """
    notes, epochs = [], config.epochs or 0
    names = _given(config, fields_where(TrainConfig, several_processes=True))
    if names and processes == 1:
        listed = " and ".join(f"{name} {getattr(config, name)}" for name in names)
        notes.append(f"{listed} without effect: the run has one process")
    if config.probe is None:
        end = f"the run ends after {messages.plural(epochs, 'epoch')}"
        limits = {"mixup_off_epoch": config.mixup_off_epoch, "patience": config.patience or 0}
        beyond = [f"{name} {epoch}" for name, epoch in limits.items() if epoch >= epochs]
        if beyond:
            notes.append(f"{' and '.join(beyond)} without effect: {end}")
        if (config.max_steps or 0) > total_steps:
            steps = messages.plural(total_steps, "step")
            notes.append(f"max_steps {config.max_steps} without effect: {end}, {steps}")
    else:
        ignored = [*_given(config, fields_where(TrainConfig, with_probe="ignored"))]
        if config.amp not in ("auto", "off"):
            ignored.append("amp")
        if ignored:
            notes.append(f"--probe makes no training steps: {', '.join(ignored)} without effect")
    names = _given(config, fields_where(TrainConfig, for_pretrained=True))
    if names and config.pretrained is None:
        notes.append(
            f"{' and '.join(names)} without --pretrained: the model starts from random weights"
        )
    return notes
