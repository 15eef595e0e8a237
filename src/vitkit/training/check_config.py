"""Checks of the settings: against each other, then against the data and the model."""

from __future__ import annotations

import torch

from vitkit.data.augmentation.policies import policy
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.loading.loader import TrainingSteps
from vitkit.errors import SettingError, SpecError
from vitkit.messages import plural
from vitkit.models.initialisation import HEADS
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.training.config.sections.optimizer import OptimizerSettings
from vitkit.training.config.sections.run import RunSettings
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.distillation.teacher import check_distillation
from vitkit.training.initial_weights import Start, freeze_parts
from vitkit.training.optimization.losses import check_loss, make_loss
from vitkit.training.optimization.optimizers import check_optimizer
from vitkit.training.unused_settings import refuse_unused

ELEMENTWISE_OPTIMIZERS = ("adamw", "adam", "sgd")
"""Optimizers that update each number alone, so that a shard of a weight is enough for them."""


def check_settings(config: TrainConfig, processes: int) -> None:
    """Check all settings against each other.

    Args:
        config: the settings.
        processes: number of processes that share every batch.

    Raises:
        SettingError: settings that contradict each other, or that would be ignored.
    """
    # first, as the other messages take it for granted that a setting has an effect
    refuse_unused(config)
    _check_schedule(config)
    check_optimizer(config.opt)
    make_loss(config.loss)
    check_distillation(config)
    _check_run(config)
    _check_batch(config, processes)
    _check_sharding(config, processes)
    _check_search(config, processes)
    _check_augmentation(config, processes)
    _check_probe(config, processes)


def _check_schedule(settings: OptimizerSettings) -> None:
    if settings.sched != "constant" and settings.min_lr > settings.lr:
        raise SettingError(f"min_lr {settings.min_lr:g} is above lr {settings.lr:g}; lower it")
    if settings.warmup_epochs >= settings.epochs:
        raise SettingError(
            f"warmup_epochs {settings.warmup_epochs:g} leaves nothing of "
            f"{plural(settings.epochs, 'epoch')}; lower it below {settings.epochs}"
        )
    if settings.sched == "rsqrt" and not settings.warmup_epochs:
        raise SettingError(
            "sched rsqrt falls as the root of warm-up over step; pass --warmup-epochs above 0"
        )


def _check_run(settings: RunSettings) -> None:
    if settings.budget is not None:
        raise SettingError(f"budget {settings.budget} is for --auto; pass both, or --epochs")
    if settings.resume is not None and settings.overwrite:
        raise SettingError("--resume goes on with a run and --overwrite starts afresh; pass one")


def _check_augmentation(config: TrainConfig, processes: int) -> None:
    if config.aa is not None:
        policy(config.aa)
    # images are mixed with others of the same part, not of the whole batch
    together = config.batch_size // (config.grad_accum_steps * processes)
    if (config.mixup > 0 or config.cutmix > 0) and together < 2:
        raise SettingError(
            f"mixup and cutmix mix the images that go through the model together, and that is "
            f"{together}; raise --batch-size, or lower --grad-accum-steps {config.grad_accum_steps}"
        )
    if config.repeated_aug > 1 and config.repeated_aug >= config.batch_size:
        raise SettingError(
            f"repeated_aug {config.repeated_aug} fills a batch of {config.batch_size} with one "
            f"image; lower it, or raise --batch-size"
        )
    if config.repeated_aug > 1 and config.distill_views > 0:
        raise SettingError(
            f"distill_views {config.distill_views} has one view of an image in an epoch and "
            f"repeated_aug {config.repeated_aug}; pass one of them"
        )


def _check_batch(config: TrainConfig, processes: int) -> None:
    """Check that a batch divides into equal shares of processes and accumulation steps."""
    batch = config.batch_size
    parts = config.grad_accum_steps
    if batch % parts:
        allowed = _divisors(batch)
        raise SettingError(
            f"grad_accum_steps {parts} does not divide batch_size {batch}; take one of "
            f"{', '.join(map(str, allowed))}"
        )
    # every process has as many images in each part as any other
    shares = parts * processes
    if batch % shares:
        below = batch // shares * shares
        sizes = [below, below + shares] if below else [shares]
        allowed = _divisors(batch // parts)
        raise SettingError(
            f"batch_size {batch} does not divide by {processes} processes x {parts} accumulation "
            f"steps; take {' or '.join(map(str, sizes))}, or one of "
            f"{', '.join(map(str, allowed))} processes"
        )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _check_sharding(config: TrainConfig, processes: int) -> None:
    sharded = config.parallel == "fsdp" and processes > 1
    if sharded and config.opt not in ELEMENTWISE_OPTIMIZERS:
        raise SettingError(
            f"opt {config.opt} needs whole matrices and parallel fsdp splits them; pass --parallel "
            f"ddp or --opt adamw"
        )


def _check_search(config: TrainConfig, processes: int) -> None:
    """Check that the search for a rate or a batch size has one process, and the batch whole."""
    searches = [name for name in ("find_lr", "find_batch_size") if getattr(config, name)]
    if not searches:
        return
    if processes > 1:
        raise SettingError(
            f"{searches[0]} needs one process; find it with --devices 1, then pass what it found"
        )
    if config.teacher is not None:
        raise SettingError(
            f"{searches[0]} tries the model without its teacher, which takes time and memory of "
            f"its own; find it without --teacher, then pass what it found"
        )
    if config.find_batch_size and config.grad_accum_steps > 1:
        raise SettingError(
            "find_batch_size measures batches that go through the model in one part; leave out "
            "--grad-accum-steps"
        )


def _check_probe(config: TrainConfig, processes: int) -> None:
    if config.probe is None:
        return
    # features of random weights tell nothing about a dataset
    if config.pretrained is None:
        raise SettingError("probe needs features of trained weights; name them: --pretrained")
    if processes > 1:
        raise SettingError(f"a probe runs in one process, not in {processes}; leave out --devices")


def check_model(config: TrainConfig, spec: ViTSpec) -> None:
    """Refuse frozen parts that do not exist, nothing left to train, and impossible image sizes."""
    if config.freeze or config.freeze_blocks:
        with torch.device("meta"):
            model = ViT(spec)
            frozen = freeze_parts(model, config)
        if config.pretrained is None and all(
            name in frozen or name.partition(".")[0] in HEADS
            for name, _ in model.named_parameters()
        ):
            raise SettingError(
                f"--freeze {' '.join(config.freeze)} would train a head on features of random "
                f"weights; name trained ones with --pretrained, or leave --freeze out"
            )
    for size in config.progressive:
        try:
            spec.replace(image_size=size)
        except SpecError as error:
            raise SettingError(f"progressive: {error}") from None
    if len(config.progressive) > config.epochs:
        raise SettingError(
            f"progressive names {len(config.progressive)} sizes for "
            f"{plural(config.epochs, 'epoch')}; name fewer, or raise --epochs"
        )


def check_head(config: TrainConfig, start: Start) -> None:
    """Refuse a frozen head of zeros: no gradient passes through it."""
    if start.weights is None or not (config.freeze or config.freeze_blocks):
        return
    with torch.device("meta"):
        frozen = freeze_parts(ViT(start.spec), config)
    heads = [name for name in ("head.weight", "head_dist.weight") if name in start.weights]
    if heads and all(name in frozen and not start.weights[name].any() for name in heads):
        raise SettingError(
            f"the head is a new one of zeros and freeze {' '.join(config.freeze)} keeps it so: "
            f"nothing before it would learn; leave the head to train"
        )


def check_warmup(config: TrainConfig, steps: TrainingSteps) -> None:
    """Refuse a warm-up, counted in steps, that is the whole run or, for `rsqrt`, nothing."""
    each = steps.steps_per_epoch
    warmup, total = round(config.warmup_epochs * each), config.epochs * each
    if config.warmup_epochs and warmup >= total:
        raise SettingError(
            f"warmup_epochs {config.warmup_epochs:g} are all {plural(total, 'step')} of the run; "
            f"lower it"
        )
    if config.sched == "rsqrt" and not warmup:
        raise SettingError(
            f"sched rsqrt falls as the root of warm-up over step, and warmup_epochs "
            f"{config.warmup_epochs:g} of {plural(each, 'step')} an epoch is none; raise it to "
            f"{1 / each:.2g} or more"
        )


def check_against(config: TrainConfig, dataset: Dataset) -> None:
    """Refuse settings that contradict the data."""
    num_classes = len(dataset.classes)
    asked = config.spec.get("num_classes", num_classes)
    if asked != num_classes:
        raise SettingError(
            f"spec.num_classes {asked} contradicts the data, which has {num_classes} classes; "
            f"leave it out"
        )
    if config.probe and "val" not in dataset.splits:
        raise SettingError("a probe is judged on validation, and there is none; set val_fraction")
    if config.patience is not None and "val" not in dataset.splits:
        raise SettingError(
            f"patience {config.patience} waits for validation, and there is none; set "
            f"val_fraction, or leave patience out"
        )
    mixed = [
        f"{name} {getattr(config, name):g}" for name in ("mixup", "cutmix") if getattr(config, name)
    ]
    check_loss(config.loss, num_classes, mixed=" and ".join(mixed) or None)
