"""What of the settings contradicts itself, said before any data are opened.

What contradicts the data or the model is for `plan` to say.
"""

from __future__ import annotations

from vitkit.data.augmentation.policies import policy
from vitkit.errors import SettingError, plural
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.distillation.teacher import check_teaching
from vitkit.training.optimization.losses import make_loss
from vitkit.training.optimization.optimizers import check_optimizer
from vitkit.training.unused_settings import check_idle

SHARDED = ("adamw", "adam", "sgd")
"""Optimizers that look at every number alone, so that a part of a weight is enough for them."""


def check_settings(config: TrainConfig, processes: int) -> None:
    """Look at all of them.

    Args:
        config: the settings.
        processes: that share every batch.

    Raises:
        SettingError: settings that cannot be had together, or that would be ignored.
    """
    check_idle(config)
    _check_alone(config)
    _check_shares(config, processes)
    _check_finding(config, processes)
    _check_augmentation(config, processes)
    _check_probe(config, processes)


def _check_alone(config: TrainConfig) -> None:
    if config.sched != "constant" and config.min_lr > config.lr:
        raise SettingError(f"min_lr {config.min_lr:g} is above lr {config.lr:g}; lower it")
    if config.warmup_epochs >= config.epochs:
        raise SettingError(
            f"warmup_epochs {config.warmup_epochs:g} leaves nothing of "
            f"{plural(config.epochs, 'epoch')}; lower it below {config.epochs}"
        )
    if config.sched == "rsqrt" and not config.warmup_epochs:
        raise SettingError(
            "sched rsqrt falls as the root of warm-up over step; pass --warmup-epochs above 0"
        )
    check_optimizer(config.opt)
    make_loss(config.loss)
    check_teaching(config)
    if config.budget is not None:
        raise SettingError(f"budget {config.budget} is for --auto; pass both, or --epochs")
    if config.resume is not None and config.overwrite:
        raise SettingError("--resume goes on with a run and --overwrite starts afresh; pass one")


def _check_augmentation(config: TrainConfig, processes: int) -> None:
    if config.aa is not None:
        policy(config.aa)
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


def _check_shares(config: TrainConfig, processes: int) -> None:
    """Every process and accumulation step must have as many images as any other."""
    batch, parts = config.batch_size, config.grad_accum_steps
    if batch % parts:
        allowed = [n for n in range(1, batch + 1) if batch % n == 0]
        raise SettingError(
            f"grad_accum_steps {parts} does not divide batch_size {batch}; take one of "
            f"{', '.join(map(str, allowed))}"
        )
    if batch % (parts * processes):
        allowed = [n for n in range(1, batch // parts + 1) if batch % (parts * n) == 0]
        below = batch // (parts * processes) * parts * processes
        sizes = [size for size in (below, below + parts * processes) if size]
        raise SettingError(
            f"batch_size {batch} does not divide by {processes} processes x {parts} accumulation "
            f"steps; take {' or '.join(map(str, sizes))}, or one of "
            f"{', '.join(map(str, allowed))} processes"
        )
    split = config.parallel == "fsdp" and processes > 1
    if split and config.opt not in SHARDED:
        raise SettingError(
            f"opt {config.opt} needs whole matrices and parallel fsdp splits them; pass --parallel "
            f"ddp or --opt adamw"
        )


def _check_finding(config: TrainConfig, processes: int) -> None:
    """What is looked for is looked for by one process, which has the whole batch at once."""
    asked = [name for name in ("find_lr", "find_batch_size") if getattr(config, name)]
    if not asked:
        return
    if processes > 1:
        raise SettingError(
            f"{asked[0]} needs one process; find it with --devices 1, then pass what it found"
        )
    if config.teacher is not None:
        raise SettingError(
            f"{asked[0]} tries the model without its teacher, which takes time and memory of its "
            f"own; find it without --teacher, then pass what it found"
        )
    if config.find_batch_size and config.grad_accum_steps > 1:
        raise SettingError(
            "find_batch_size finds what goes through the model at once; leave out "
            "--grad-accum-steps"
        )
    if config.probe is not None:
        raise SettingError(f"a probe takes no steps; leave out --{asked[0].replace('_', '-')}")


def _check_probe(config: TrainConfig, processes: int) -> None:
    """A probe needs weights, and looks at every image once, as it is in evaluation."""
    if config.probe is None:
        return
    if config.pretrained is None:
        raise SettingError("probe looks at features of trained weights; name them: --pretrained")
    if processes > 1:
        raise SettingError(f"a probe runs in one process, not in {processes}; leave out --devices")
