"""Checks of the settings against each other, before anything is read."""

from __future__ import annotations

import math
from typing import Any

from vitkit.data.augmentation.policies import policy
from vitkit.errors import SettingError
from vitkit.evaluation.loop import load_metrics
from vitkit.io.results import import_setting
from vitkit.messages import flag_name, plural
from vitkit.training.config.data_settings import DataSettings, DistillationSettings
from vitkit.training.config.run_settings import OptimizerSettings, RunSettings
from vitkit.training.config.train_config import USUAL, TrainConfig
from vitkit.training.monitoring.trackers import check_trackers
from vitkit.training.optimization.losses import make_loss
from vitkit.training.optimization.optimizers import check_optimizer
from vitkit.training.setup.unused_settings import refuse_unused

ELEMENTWISE_OPTIMIZERS = ("adamw", "adam", "sgd")
"""Elementwise optimizers, which can update a shard of a weight."""


def check_settings(config: TrainConfig, processes: int, *, resumes: bool = False) -> None:
    """Check all settings against each other.

    Args:
        config: the settings.
        processes: number of processes that share every batch.
        resumes: a run is resumed; an older one may have statistics that are refused now.

    Raises:
        SettingError: settings that contradict each other, or that would be ignored.
    """
    # first, as the other messages assume that every setting has an effect
    refuse_unused(config)
    check_steps(config, processes)
    check_optimizer(config.opt or USUAL["opt"])
    make_loss(config.loss)
    _check_user_code(config)
    check_trackers(config.logger)
    _check_distillation(config)
    _check_run(config)
    _check_search(config, processes)
    _check_probe(config, processes)
    if not resumes:
        _check_normalisation(config)


def check_steps(config: TrainConfig, processes: int) -> None:
    """Check the settings of schedule, batch and augmentation that are not left open.

    Args:
        config: the settings; those that follow from the data may be open.
        processes: number of processes that share every batch.

    Raises:
        SettingError: settings that contradict each other.
    """
    _check_schedule(config)
    _check_batch(config, processes)
    _check_sharding(config, processes)
    _check_augmentation(config, processes)


def _check_normalisation(settings: DataSettings) -> None:
    """Refuse statistics of pixels from 0 to 255: pixels are divided by 255 before."""
    for name in ("mean", "std"):
        values = getattr(settings, name)
        if values is None:
            continue
        lowest, in_range = "0", min(values) >= 0
        if name == "std":  # pixels are divided by it
            lowest, in_range = "above 0", min(values) > 0
        if in_range and max(values) <= 1:
            continue
        hint = ""
        if min(values) >= 0 and max(values) <= 255:
            divided = " ".join(f"{value / 255:.3f}" for value in values)
            hint = f"; for pixels of 0 to 255 divide by 255: {divided}"
        given = " ".join(f"{value:g}" for value in values)
        raise SettingError(f"--{name} {given}: expected values from {lowest} to 1{hint}")


def _check_schedule(settings: OptimizerSettings) -> None:
    lr, epochs, warmup = settings.lr, settings.epochs, settings.warmup_epochs
    if lr is not None and settings.sched != "constant" and settings.min_lr > lr:
        raise SettingError(f"--min-lr {settings.min_lr:g} is above --lr {lr:g}; lower it")
    if warmup is not None and epochs is not None and warmup >= epochs:
        raise SettingError(
            f"--warmup-epochs {warmup:g} must be below the length of the run, "
            f"{plural(epochs, 'epoch')}; lower it, or raise --epochs"
        )
    if settings.sched == "rsqrt" and warmup == 0:
        raise SettingError(
            "--sched rsqrt needs a warm-up, as its rate falls with sqrt(warm-up / step); "
            "pass --warmup-epochs above 0"
        )


def _check_distillation(settings: DistillationSettings) -> None:
    softened = settings.distill_temperature != DistillationSettings.distill_temperature
    if settings.distill == "hard" and softened:
        raise SettingError(
            f"--distill-temperature {settings.distill_temperature:g} has no effect with --distill "
            "hard, which uses only the teacher's top class; leave one of them out"
        )


def _check_run(settings: RunSettings) -> None:
    if settings.budget is not None:
        raise SettingError(
            f"--budget {settings.budget} has no effect without --auto; add --auto, or set the "
            "length by --epochs"
        )
    if settings.resume is not None and settings.overwrite:
        raise SettingError(
            "--resume continues a run and --overwrite starts afresh; pass only one of them"
        )


def _check_augmentation(config: TrainConfig, processes: int) -> None:
    if config.aa is not None:
        policy(config.aa)
    if config.batch_size is None:
        return
    # images are mixed with others of the same part, not of the whole batch
    together = config.batch_size // (config.grad_accum_steps * processes)
    if (config.mixup > 0 or config.cutmix > 0) and together < 2:
        mend = "raise --batch-size"
        if config.grad_accum_steps > 1:
            mend += f", or lower --grad-accum-steps {config.grad_accum_steps}"
        raise SettingError(
            "--mixup and --cutmix need at least 2 images in each micro-batch, and there is "
            f"{together}; {mend}"
        )
    if config.repeated_aug > 1 and config.repeated_aug >= config.batch_size:
        raise SettingError(
            f"--repeated-aug {config.repeated_aug} fills a whole batch of {config.batch_size} "
            "with one image; lower it, or raise --batch-size"
        )


def _check_batch(settings: OptimizerSettings, processes: int) -> None:
    """Check that a batch divides into equal shares of processes and accumulation steps."""
    batch = settings.batch_size
    parts = settings.grad_accum_steps
    if batch is None:
        return
    if batch % parts:
        allowed = _divisors(batch)
        raise SettingError(
            f"--grad-accum-steps {parts} does not divide --batch-size {batch}; pass one of "
            f"{', '.join(map(str, allowed))}"
        )
    # every process has as many images in each part as any other
    shares = parts * processes
    if batch % shares:
        below = batch // shares * shares
        sizes = f"{below} or {below + shares}" if below else f"{shares}"
        allowed = _divisors(batch // parts)
        raise SettingError(
            f"--batch-size {batch} is not divisible by {processes} processes x "
            f"{plural(parts, 'accumulation step')}; pass --batch-size {sizes}, or start "
            f"one of these numbers of processes: {', '.join(map(str, allowed))}"
        )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _check_sharding(config: TrainConfig, processes: int) -> None:
    sharded = config.parallel == "fsdp" and processes > 1
    if sharded and config.opt is not None and config.opt not in ELEMENTWISE_OPTIMIZERS:
        raise SettingError(
            f"--opt {config.opt} needs whole matrices, and --parallel fsdp splits them; pass "
            "--parallel ddp or --opt adamw"
        )


def _check_search(config: TrainConfig, processes: int) -> None:
    """Check that the search for a rate or a batch size has one process and no accumulation."""
    searches = [flag_name(name) for name in ("find_lr", "find_batch_size") if getattr(config, name)]
    if not searches:
        return
    if processes > 1:
        raise SettingError(
            f"{searches[0]} runs in one process; run it with --devices "
            "1, then pass the value it finds"
        )
    if config.teacher is not None:
        raise SettingError(
            f"{searches[0]} measures the model without its teacher, which "
            "needs time and memory too; run it without --teacher, then pass the value it finds"
        )
    # a micro-batch would fit where the whole batch does not
    if config.find_batch_size and config.grad_accum_steps > 1:
        raise SettingError("--find-batch-size measures whole batches; leave out --grad-accum-steps")


def _check_probe(config: TrainConfig, processes: int) -> None:
    if config.probe is None:
        return
    # features of random weights are meaningless
    if config.pretrained is None:
        raise SettingError("--probe needs the features of trained weights; pass --pretrained")
    if processes > 1:
        raise SettingError(f"--probe runs in one process, not in {processes}; leave out --devices")


# The user's own functions among the settings: imported and checked before the run.


def _check_user_code(config: TrainConfig) -> None:
    """Import the transform, metrics and callbacks of the settings. Raises `SettingError`."""
    if config.transform is not None:
        import_transform(config.transform)
    load_metrics(config.metrics)
    # only imported: an instance could have side effects before the run is accepted
    for name in config.callbacks:
        import_setting("callbacks", name)


def import_transform(name: str) -> Any:
    """Return a transform of training images by its name. Raises `SettingError`."""
    transform = import_setting("transform", name)
    if not callable(transform) or isinstance(transform, type):
        raise SettingError(f"--transform {name} must be a function from an image to an image")
    return transform
