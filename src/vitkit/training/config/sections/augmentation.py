"""Settings of random changes to the training images: geometry, colour, erasing, mixing."""

from __future__ import annotations

from typing import Annotated

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import (
    NonNegativeFloat,
    NonNegativeInt,
    PolicyName,
    PositiveFraction,
    PositiveInt,
    Probability,
)
from vitkit.training.config.meaning import Meaning

MIXING_DETAIL = Meaning(
    resume="fixed",
    changes_result=True,
    with_probe="refused",
    only_with=("mixup", "cutmix"),
)
"""Details of mixup and CutMix."""


@frozen(raises=SettingError)
class AugmentationSettings:
    """Random crops, flips, policies, erasing, and mixing of images."""

    flip: Annotated[
        Probability, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = 0.5
    """Chance of a horizontal flip."""
    shift: Annotated[
        NonNegativeInt, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = 0
    """Largest random shift up, down, left and right, in pixels."""
    crop_scale: Annotated[
        PositiveFraction, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = 0.35
    """Smallest part of the area a random crop keeps (Inception crop); 1 turns it off."""
    aa: Annotated[
        PolicyName, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = None
    """A policy of random changes: RandAugment such as `rand-m9-mstd0.5-inc1`, TrivialAugment
    `trivial`, 3-Augment `3`."""
    color_jitter: Annotated[
        Probability, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 0.0
    """Largest random change of brightness, contrast and saturation, as a factor; after `aa`."""
    reprob: Annotated[
        Probability, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 0.0
    """Chance that a random box of an image is erased by noise."""
    repeated_aug: Annotated[
        PositiveInt, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 1
    """Views of an image in one epoch, each changed in another way; an epoch stays as long, so it
    has as many times fewer images."""
    mixup: Annotated[
        NonNegativeFloat, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 0.0
    """Alpha of mixup, of Beta(alpha, alpha); 0 is off."""
    cutmix: Annotated[
        NonNegativeFloat, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 0.0
    """Alpha of CutMix, the same; with both on, every batch has one of them."""
    mixup_prob: Annotated[Probability, MIXING_DETAIL] = 1.0
    """Chance that a batch is mixed at all."""
    mixup_switch_prob: Annotated[
        Probability, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 0.5
    """Chance of CutMix, where both are on."""
    mixup_off_epoch: Annotated[NonNegativeInt, MIXING_DETAIL] = 0
    """The epoch, counted from 0, from which on nothing is mixed; 0 for never."""
