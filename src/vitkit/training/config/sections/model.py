"""Settings of the model: its architecture."""

from __future__ import annotations

from typing import Annotated

import tyro
from pydantic import Field

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import (
    Fraction,
    PositiveInt,
    Settings,
)
from vitkit.training.config.meaning import Meaning

DEFAULT_MODEL = "vit_tiny_patch16_224"
"""The model that settings of the model are applied to where none is named."""


@frozen(raises=SettingError)
class ModelSettings:
    """Architecture: the model, and changes to it."""

    model: Annotated[
        str | None,
        Meaning(resume="fixed", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = None
    """Name of a model (`vitkit models` lists them); `--spec.FIELD VALUE` changes single fields.
    Default: that of the pretrained weights; else a small ViT that suits the number and the size of
    the training images, or vit_tiny_patch16_224 for 100,000 larger images."""
    spec: Annotated[
        Settings,
        tyro.conf.Suppress,
        Meaning(resume="fixed", changes_result=True, with_probe="used"),
    ] = Field(default_factory=dict)
    """`ViTSpec` fields that differ from the model's preset."""
    img_size: Annotated[
        PositiveInt | None, Meaning(resume="fixed", changes_result=True, with_probe="used")
    ] = None
    """Image size in pixels, for square images; short for `--spec.image-size`. Default: the model's,
    or that of the images up to 64 where the model is chosen by the data."""
    progressive: Annotated[
        tuple[PositiveInt, ...],
        Meaning(resume="fixed", changes_result=True, with_probe="refused"),
    ] = ()
    """Progressive resizing: image sizes in pixels over equal parts of the epochs, such as `128 160
    192`; evaluation uses the last one."""
    # off in evaluation mode, in which a probe computes its features
    drop_path: Annotated[
        Fraction | None, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = None
    """Drop probability of the last block (stochastic depth), from 0 to below 1; it rises linearly
    over the blocks. Short for `--spec.drop-path`."""
