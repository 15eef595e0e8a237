"""The augmentation of a run, built from its settings: the parts of `data.augmentation.pipeline`."""

from __future__ import annotations

from vitkit.data.augmentation.mixup import Mixing
from vitkit.data.augmentation.pipeline import Augmentation, BatchTransform
from vitkit.data.augmentation.user_transform import UserTransform
from vitkit.training.checks.user_code import import_transform
from vitkit.training.config.run_config import RunConfig
from vitkit.training.run_plan import Plan


def user_transform(config: RunConfig) -> UserTransform | None:
    """Return the user's own transform of training images, if there is one."""
    if config.transform is None:
        return None
    return UserTransform(import_transform(config.transform), config.transform, config.seed)


def augmentation_of(config: RunConfig) -> Augmentation:
    """Return the random changes to the training images of a run."""
    return Augmentation(
        flip=config.flip,
        shift=config.shift,
        crop_scale=config.crop_scale,
        aa=config.aa,
        color_jitter=config.color_jitter,
        reprob=config.reprob,
        resizer=config.resizer,
        scaled_jpeg=config.scaled_jpeg,
    )


def make_transform(plan: Plan) -> BatchTransform:
    """Build the transform from a batch of the run to the model's images and targets."""
    config = plan.config
    mixing = None
    if config.mixup > 0 or config.cutmix > 0:
        # in steps; 0: mixing never stops
        off = config.mixup_off_epoch * plan.steps.steps_per_epoch
        mixing = Mixing(
            num_classes=plan.spec.num_classes,
            mixup=config.mixup,
            cutmix=config.cutmix,
            prob=config.mixup_prob,
            switch_prob=config.mixup_switch_prob,
            until=off or None,
            seed=config.seed,
        )
    return BatchTransform(
        plan.preprocess, plan.device, augmentation_of(config), mixing, seed=config.seed
    )
