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
    """A folder of images, a CSV or Parquet file, `wds:SHARDS.tar`, `hf://owner/name`, or a name:
    `digits`, `mnist`, `fashion-mnist`, `cifar10`, `cifar100`."""
    data_root: Annotated[
        str | None,
        tyro.conf.arg(aliases=("--data-dir",)),
        Meaning(
            resume="not compared", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = None
    """Folder of named datasets such as `mnist`; for a CSV, the folder that its paths start from."""
    cache: Annotated[
        str | None,
        Meaning(
            resume="not compared", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = None
    """Keep the decoded images in this folder, for this run and others; `auto`: the user's own."""
    # decides which images are found, so it can change the result
    follow_links: Annotated[
        bool,
        Meaning(
            resume="not compared", changes_result=True, with_probe="used", with_auto="passed on"
        ),
    ] = False
    """Follow symbolic links that lead out of the folder of images."""
    # may change: a run keeps the list of the images that it began with
    bad_images: Annotated[
        Literal["refuse", "skip"],
        Meaning(resume="may change", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = "refuse"
    """Images that cannot be decoded: refuse to start, or leave them out. If an image goes missing
    later, the run ends, or with `skip` another image of its class takes its place."""
    ignore_extra_classes: Annotated[
        bool,
        Meaning(resume="fixed", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = False
    """Leave out classes of val or test that train does not have, instead of refusing."""
    # fixed: another cut would validate on images that were trained on
    val_fraction: Annotated[
        Fraction,
        Meaning(resume="fixed", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = 0.1
    """Part of train that becomes the validation split where the data has none."""
    balance: Annotated[
        bool,
        Meaning(resume="fixed", changes_result=True, with_probe="refused", with_auto="passed on"),
    ] = False
    """Draw every class equally often, where some have more images than others."""
    # the transform of evaluation, which a probe uses as well as training does
    mean: Annotated[
        Channel | None, Meaning(resume="fixed", changes_result=True, with_probe="used")
    ] = None
    """Mean of each channel on [0, 1]; default 0.5."""
    std: Annotated[
        Channel | None, Meaning(resume="fixed", changes_result=True, with_probe="used")
    ] = None
    """Standard deviation of each channel on [0, 1]; default 0.5."""
    interpolation: Annotated[
        Interpolation | None, Meaning(resume="fixed", changes_result=True, with_probe="used")
    ] = None
    """The resampling filter; default bicubic."""
    fit: Annotated[Fit | None, Meaning(resume="fixed", changes_result=True, with_probe="used")] = (
        None
    )
    """How images are resized outside training: `crop` (default), the shorter side to image size /
    crop ratio, then the centre; `squash`, each side by its own factor; `squash-crop`, squashed to
    image size / crop ratio, then the centre."""
    crop_ratio: Annotated[
        PositiveFraction | None, Meaning(resume="fixed", changes_result=True, with_probe="used")
    ] = None
    """Part of the shorter side that the centre crop keeps; default 0.9."""
