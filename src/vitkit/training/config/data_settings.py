"""Settings of the data and the model: images, augmentation, architecture, weights, teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.spec import Channel, Fit, Interpolation, Resizer
from vitkit.training.config.meaning import (
    OF_AUGMENTATION,
    OF_DATA,
    OF_IMAGES,
    OF_MACHINE,
    OF_OUTPUT,
    OF_STEPS,
    OF_TRAINING,
    Aliases,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PolicyName,
    PositiveFloat,
    PositiveFraction,
    PositiveInt,
    Probability,
    Settings,
    WeightsSource,
    stored_as_text,
)


@frozen(raises=SettingError)
class DataSettings:
    """The dataset, its splits, and the evaluation transform."""

    data: Annotated[str, OF_MACHINE]
    """An image folder, a CSV or Parquet file, `wds:SHARDS.tar`, `hf://owner/name`, or a name:
    `digits`, `mnist`, `fashion-mnist`, `cifar10`, `cifar100`."""
    data_root: Annotated[str | None, Aliases(("--data-dir",)), OF_MACHINE] = None
    """Folder of named datasets such as `mnist`; for a CSV file, the folder that its paths are
    relative to."""
    cache: Annotated[str | None, OF_MACHINE] = None
    """Folder for decoded images, shared by runs, so that each image is decoded once; `auto` (or no
    value): the user's cache folder. Default: no cache."""
    # decides which images are found, so it can change the result
    follow_links: Annotated[bool, replace(OF_MACHINE, changes_result=True)] = False
    """Follow symbolic links that lead out of the image folder."""
    # may change: the data must be those of the run's start
    bad_images: Annotated[Literal["refuse", "skip"], replace(OF_DATA, resume="may change")] = (
        "refuse"
    )
    """Images that cannot be decoded when the run starts: refuse to start, or skip them."""
    ignore_extra_classes: Annotated[bool, OF_DATA] = False
    """Leave out classes of val or test that train does not have, instead of refusing the data."""
    # fixed: another split would validate on training images
    val_fraction: Annotated[Fraction, OF_DATA] = 0.1
    """Fraction of train that becomes the validation split if the data have train but no val, from 0
    to below 1. Data without any splits are always divided 70/10/20."""
    # a run keeps a copy, with which it resumes
    relabel: Annotated[str | None, replace(OF_MACHINE, resume="fixed", changes_result=True)] = None
    """A CSV file of corrected labels with the columns `path,old_class,new_class`, as the page of
    `vitkit report` exports it; the images and their folders stay as they are."""
    balance: Annotated[bool, replace(OF_TRAINING, with_auto="passed on")] = False
    """Draw every class equally often, although some have more images than others."""
    # the transform of evaluation, which a probe uses as well as training does
    mean: Annotated[Channel | None, OF_IMAGES] = None
    """Mean of each channel, for pixels in [0, 1]. Default: the pretrained weights', else 0.5."""
    std: Annotated[Channel | None, OF_IMAGES] = None
    """Standard deviation of each channel, for pixels in [0, 1]. Default: the pretrained weights',
    else 0.5."""
    interpolation: Annotated[Interpolation | None, OF_IMAGES] = None
    """Resampling filter for resizing. Default: the pretrained weights', else bicubic."""
    fit: Annotated[Fit | None, OF_IMAGES] = None
    """Resizing in evaluation: `crop` scales the shorter side to image size / crop ratio and crops
    the centre; `squash` scales each side separately; `squash-crop` squashes to image size / crop
    ratio and crops the centre. Default: the pretrained weights', else crop."""
    crop_ratio: Annotated[PositiveFraction | None, OF_IMAGES] = None
    """Fraction of the shorter side that the centre crop keeps, above 0 and up to 1. Default: the
    pretrained weights', else 0.9."""


# Settings of random changes to the training images: geometry, colour, erasing, mixing.

OF_GEOMETRY = replace(OF_STEPS, changes_images=True)
"""A probe ignores these instead of refusing them, as a recipe may have them."""
MIXING_DETAIL = replace(OF_TRAINING, only_with=("mixup", "cutmix"))
"""Details of mixup and CutMix."""


@frozen(raises=SettingError)
class AugmentationSettings:
    """Random crops, flips, policies, erasing, and mixing of images."""

    transform: Annotated[str | None, stored_as_text("transform"), OF_AUGMENTATION] = None
    """Your own function from a training image (PIL) to an image, as MODULE:FUNCTION; it is applied
    first, and its random numbers are seeded for each image and epoch."""
    flip: Annotated[Probability | None, OF_GEOMETRY] = None
    """Probability of a horizontal flip, 0 to 1. Default: 0.5; 0 for grey images where the model is
    chosen by the data, as they are often signs."""
    shift: Annotated[NonNegativeInt | None, OF_GEOMETRY] = None
    """Largest random shift up, down, left and right, in pixels; 0 turns it off. Default: 0, or an
    eighth to a fourteenth of the side where the data choose the model and are small squares of one
    size."""
    crop_scale: Annotated[PositiveFraction | None, OF_GEOMETRY] = None
    """Smallest fraction of the area that a random crop keeps (Inception crop), above 0; 1 turns it
    off. Default: 0.35, or 1 for images that are shifted by default."""
    # one value of a hundred differs, mostly by 1 of 255: far less than between two seeds
    resizer: Annotated[Resizer, replace(OF_STEPS, changes_result=False)] = "torch"
    """Library that resizes random crops: `torch`, or `pillow`, which is slower. Where crops are
    off, and in evaluation, it is always Pillow."""
    scaled_jpeg: Annotated[bool, OF_TRAINING] = False
    """Decode a JPEG at 1/2, 1/4 or 1/8 of its size where its random crop is still not enlarged:
    photographs of several megapixels load faster, and are a little less sharp. Training only."""
    aa: Annotated[PolicyName, OF_AUGMENTATION] = None
    """Augmentation policy: RandAugment such as `rand-m9-mstd0.5-inc1`, TrivialAugment `trivial`, or
    3-Augment `3`; default none."""
    color_jitter: Annotated[Probability, OF_AUGMENTATION] = 0.0
    """Largest random change of brightness, contrast and saturation, as a fraction from 0 to 1;
    applied after `aa`."""
    reprob: Annotated[Probability, OF_AUGMENTATION] = 0.0
    """Probability that a random box of an image is replaced by noise (random erasing), 0 to 1."""
    repeated_aug: Annotated[PositiveInt, OF_TRAINING] = 1
    """Augmented copies of each image per epoch (repeated augmentation). The epoch keeps its length,
    so with N copies it covers 1/N of the images."""
    mixup: Annotated[NonNegativeFloat, OF_AUGMENTATION] = 0.0
    """Alpha of mixup: images are mixed by a weight from Beta(alpha, alpha); 0 turns it off."""
    cutmix: Annotated[NonNegativeFloat, OF_AUGMENTATION] = 0.0
    """Alpha of CutMix, for the area of the pasted box; 0 turns it off. With mixup on as well, each
    batch gets one of them."""
    mixup_prob: Annotated[Probability, MIXING_DETAIL] = 1.0
    """Probability that a batch is mixed, 0 to 1."""
    # needs both, and `only_with` means any of them
    mixup_switch_prob: Annotated[Probability, OF_TRAINING] = 0.5
    """Probability of CutMix instead of mixup where both are on, 0 to 1."""
    mixup_off_epoch: Annotated[NonNegativeInt, MIXING_DETAIL] = 0
    """Epoch, counted from 0, from which batches are no longer mixed; 0 means never."""


# Settings of the model: its architecture.

DEFAULT_MODEL = "vit_tiny_patch16_224"
"""The model that settings of the model are applied to where none is named."""


@frozen(raises=SettingError)
class ModelSettings:
    """Architecture: the model, and changes to it."""

    model: Annotated[str | None, OF_DATA] = None
    """Name of a model (`vitkit models` lists them); `--spec.FIELD VALUE` changes single fields.
    Default: that of the pretrained weights; else a small ViT that suits the number and the size of
    the training images, or vit_tiny_patch16_224 for 100,000 larger images."""
    spec: Annotated[Settings, OF_IMAGES] = Field(default_factory=dict)
    """Any field of the model (`ViTSpec`), such as `--spec.patch-size 4`."""
    img_size: Annotated[PositiveInt | None, OF_IMAGES] = None
    """Image size in pixels, for square images; short for `--spec.image-size`. Default: the model's,
    or that of the images up to 64 where the model is chosen by the data."""
    progressive: Annotated[tuple[PositiveInt, ...], OF_TRAINING] = ()
    """Progressive resizing: image sizes in pixels over equal parts of the epochs, such as `128 160
    192`; evaluation uses the last one."""
    # off in evaluation mode, in which a probe computes its features
    drop_path: Annotated[Fraction | None, OF_STEPS] = None
    """Drop probability of the last block (stochastic depth), from 0 to below 1; it rises linearly
    over the blocks. Short for `--spec.drop-path`."""


# Settings of fine-tuning: the weights that a model starts from, and what of it is frozen.

CATALOGUE = "auto"
"""`pretrained` without a value: the published weights of the model."""


@frozen(raises=SettingError)
class FineTuningSettings:
    """Initial weights and frozen parts."""

    pretrained: Annotated[WeightsSource, Aliases(("--finetune",)), OF_DATA] = None
    """Initial weights: a file of any known format, a folder, a published checkpoint's name, or an
    address such as `hf://owner/name`; without a value, the published weights of --model.
    Preprocessing follows the checkpoint unless you override it."""
    # these two let a file be read; with it the result is the same
    trust_pickle: Annotated[bool, OF_OUTPUT] = False
    """Load weights stored as a pickle (`.pth`), with torch's `weights_only=True`."""
    allow_partial: Annotated[bool, OF_OUTPUT] = False
    """Accept --pretrained weights with unknown or missing tensors: leave out the unknown ones,
    initialise the missing ones at random, and list both."""
    # a resumed run takes it over, so there is nothing to compare
    start: Annotated[Settings | None, replace(OF_IMAGES, resume="not compared")] = None
    """Facts about the initial weights (path, SHA-256, spec), for `resume`."""
    freeze: Annotated[tuple[str, ...], replace(OF_TRAINING, for_pretrained=True)] = ()
    """Parameters to freeze: `backbone` (everything except the head), or names or patterns such as
    `patch_embed` or `blocks.*.attn`."""
    freeze_blocks: Annotated[NonNegativeInt, replace(OF_TRAINING, for_pretrained=True)] = 0
    """Number of first blocks to freeze, together with the embedding; 0 freezes neither."""


# Settings of distillation: the teacher, and how its answers enter the loss.

DISTILLATION_DETAIL = replace(OF_TRAINING, only_with=("teacher",))
"""Details of learning from a teacher."""


@frozen(raises=SettingError)
class DistillationSettings:
    """The teacher and its part in the loss."""

    # a path; a resumed run compares the teacher's digest instead
    teacher: Annotated[
        str | None,
        stored_as_text("teacher"),
        Aliases(("--teacher-path",)),
        replace(OF_TRAINING, resume="not compared"),
    ] = None
    """Teacher model for distillation: a checkpoint, or `package.module:function` that returns a
    model."""
    distill: Annotated[
        Literal["soft", "hard"],
        Aliases(("--distillation-type",)),
        DISTILLATION_DETAIL,
    ] = "soft"
    """Soft distillation (the teacher's probabilities) or hard distillation (its top class)."""
    distill_alpha: Annotated[
        Probability, Aliases(("--distillation-alpha",)), DISTILLATION_DETAIL
    ] = 0.5
    """Weight of the distillation loss, 0 to 1; the label loss has the rest."""
    distill_temperature: Annotated[
        PositiveFloat, Aliases(("--distillation-tau",)), DISTILLATION_DETAIL
    ] = 3.0
    """Temperature that divides the logits of teacher and student in soft distillation, above 0."""
