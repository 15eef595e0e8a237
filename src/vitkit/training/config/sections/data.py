"""Settings of the images: where they are, which are used, and how they are preprocessed."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.spec import Channel, Fit, Interpolation
from vitkit.training.config.field_types import Fraction, PositiveFraction
from vitkit.training.config.meaning import Meaning


@frozen(raises=SettingError)
class DataSettings:
    """The dataset, its splits, and the evaluation transform."""

    data: Annotated[
        str,
        tyro.conf.Suppress,
        Meaning(
            resume="not compared", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ]
    """An image folder, a CSV or Parquet file, `wds:SHARDS.tar`, `hf://owner/name`, or a name:
    `digits`, `mnist`, `fashion-mnist`, `cifar10`, `cifar100`."""
    data_root: Annotated[
        str | None,
        tyro.conf.arg(aliases=("--data-dir",)),
        Meaning(
            resume="not compared", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = None
    """Folder of named datasets such as `mnist`; for a CSV file, the folder that its paths are
    relative to."""
    cache: Annotated[
        str | None,
        Meaning(
            resume="not compared", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = None
    """Folder for decoded images, shared by runs, so that each image is decoded once; `auto` (or no
    value): the user's cache folder. Default: no cache."""
    # decides which images are found, so it can change the result
    follow_links: Annotated[
        bool,
        Meaning(
            resume="not compared", changes_result=True, with_probe="used", with_auto="passed on"
        ),
    ] = False
    """Follow symbolic links that lead out of the image folder."""
    # may change: the data must be those of the run's start
    bad_images: Annotated[
        Literal["refuse", "skip"],
        Meaning(resume="may change", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = "refuse"
    """Images that cannot be decoded when the run starts: refuse to start, or skip them."""
    ignore_extra_classes: Annotated[
        bool,
        Meaning(resume="fixed", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = False
    """Leave out classes of val or test that train does not have, instead of refusing the data."""
    # fixed: another split would validate on training images
    val_fraction: Annotated[
        Fraction,
        Meaning(resume="fixed", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = 0.1
    """Fraction of train that becomes the validation split if the data have train but no val, from 0
    to below 1. Data without any splits are always divided 70/10/20."""
    # a run keeps a copy, with which it resumes
    relabel: Annotated[
        str | None,
        Meaning(
            resume="not compared", changes_result=True, with_probe="used", with_auto="passed on"
        ),
    ] = None
    """A CSV file of corrected labels with the columns `path,old_class,new_class`, as the page of
    `vitkit report` exports it; the images and their folders stay as they are."""
    balance: Annotated[
        bool,
        Meaning(resume="fixed", changes_result=True, with_probe="refused", with_auto="passed on"),
    ] = False
    """Draw every class equally often, although some have more images than others."""
    # the transform of evaluation, which a probe uses as well as training does
    mean: Annotated[
        Channel | None, Meaning(resume="fixed", changes_result=True, with_probe="used")
    ] = None
    """Mean of each channel, for pixels in [0, 1]. Default: the pretrained weights', else 0.5."""
    std: Annotated[
        Channel | None, Meaning(resume="fixed", changes_result=True, with_probe="used")
    ] = None
    """Standard deviation of each channel, for pixels in [0, 1]. Default: the pretrained weights',
    else 0.5."""
    interpolation: Annotated[
        Interpolation | None, Meaning(resume="fixed", changes_result=True, with_probe="used")
    ] = None
    """Resampling filter for resizing. Default: the pretrained weights', else bicubic."""
    fit: Annotated[Fit | None, Meaning(resume="fixed", changes_result=True, with_probe="used")] = (
        None
    )
    """Resizing in evaluation: `crop` scales the shorter side to image size / crop ratio and crops
    the centre; `squash` scales each side separately; `squash-crop` squashes to image size / crop
    ratio and crops the centre. Default: the pretrained weights', else crop."""
    crop_ratio: Annotated[
        PositiveFraction | None, Meaning(resume="fixed", changes_result=True, with_probe="used")
    ] = None
    """Fraction of the shorter side that the centre crop keeps, above 0 and up to 1. Default: the
    pretrained weights', else 0.9."""
