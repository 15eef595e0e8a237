"""Settings of random changes to the training images: geometry, colour, erasing, mixing."""

from __future__ import annotations

from typing import Annotated

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.spec import Resizer
from vitkit.training.config.field_types import (
    NonNegativeFloat,
    NonNegativeInt,
    PolicyName,
    PositiveFraction,
    PositiveInt,
    Probability,
    stored_as_text,
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

    transform: Annotated[
        str | None,
        stored_as_text("transform"),
        Meaning(resume="fixed", changes_result=True, with_probe="refused"),
    ] = None
    """Your own function from a training image (PIL) to an image, as MODULE:FUNCTION; it is applied
    first, and its random numbers are seeded for each image and epoch."""
    flip: Annotated[
        Probability | None, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = None
    """Probability of a horizontal flip, 0 to 1. Default: 0.5; 0 for grey images where the model is
    chosen by the data, as they are often signs."""
    shift: Annotated[
        NonNegativeInt | None, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = None
    """Largest random shift up, down, left and right, in pixels; 0 turns it off. Default: 0, or an
    eighth to a fourteenth of the side where the data choose the model and are small squares of one
    size."""
    crop_scale: Annotated[
        PositiveFraction | None, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = None
    """Smallest fraction of the area that a random crop keeps (Inception crop), above 0; 1 turns it
    off. Default: 0.35, or 1 for images that are shifted by default."""
    # one value of a hundred differs, mostly by 1 of 255: far less than between two seeds
    resizer: Annotated[
        Resizer, Meaning(resume="fixed", changes_result=False, with_probe="ignored")
    ] = "torch"
    """Library that resizes random crops: `torch`, or `pillow`, which is slower. Where crops are
    off, and in evaluation, it is always Pillow."""
    scaled_jpeg: Annotated[
        bool, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = False
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size where its random crop is still not enlarged:
    photographs of several megapixels load faster, and are a little less sharp. Training only."""
    aa: Annotated[
        PolicyName, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = None
    """Augmentation policy: RandAugment such as `rand-m9-mstd0.5-inc1`, TrivialAugment `trivial`, or
    3-Augment `3`; default none."""
    color_jitter: Annotated[
        Probability, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 0.0
    """Largest random change of brightness, contrast and saturation, as a fraction from 0 to 1;
    applied after `aa`."""
    reprob: Annotated[
        Probability, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 0.0
    """Probability that a random box of an image is replaced by noise (random erasing), 0 to 1."""
    repeated_aug: Annotated[
        PositiveInt, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 1
    """Augmented copies of each image per epoch (repeated augmentation). The epoch keeps its length,
    so with N copies it covers 1/N of the images."""
    mixup: Annotated[
        NonNegativeFloat, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 0.0
    """Alpha of mixup: images are mixed by a weight from Beta(alpha, alpha); 0 turns it off."""
    cutmix: Annotated[
        NonNegativeFloat, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 0.0
    """Alpha of CutMix, for the area of the pasted box; 0 turns it off. With mixup on as well, each
    batch gets one of them."""
    mixup_prob: Annotated[Probability, MIXING_DETAIL] = 1.0
    """Probability that a batch is mixed, 0 to 1."""
    # needs both, and `only_with` means any of them
    mixup_switch_prob: Annotated[
        Probability, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 0.5
    """Probability of CutMix instead of mixup where both are on, 0 to 1."""
    mixup_off_epoch: Annotated[NonNegativeInt, MIXING_DETAIL] = 0
    """Epoch, counted from 0, from which batches are no longer mixed; 0 means never."""
