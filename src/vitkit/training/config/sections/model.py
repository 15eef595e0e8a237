"""Settings of the model: its architecture, the weights it starts from, and what is frozen."""

from __future__ import annotations

from typing import Annotated

import tyro
from pydantic import Field

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import (
    Fraction,
    NonNegativeInt,
    PositiveInt,
    Settings,
    WeightsSource,
)
from vitkit.training.config.meaning import Meaning

DEFAULT_MODEL = "vit_tiny_patch16_224"
"""The model that is trained from random weights where none is named."""
CATALOGUE = "auto"
"""`pretrained` without a value: the published weights of the model."""


@frozen(raises=SettingError)
class ModelSettings:
    """Architecture, initial weights and frozen parts."""

    model: Annotated[
        str | None,
        Meaning(resume="fixed", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = None
    """Name of a model (`vitkit models` lists them); `--spec.FIELD VALUE` changes single fields.
    Default: that of the pretrained weights, else vit_tiny_patch16_224."""
    spec: Annotated[
        Settings,
        tyro.conf.Suppress,
        Meaning(resume="fixed", changes_result=True, with_probe="used"),
    ] = Field(default_factory=dict)
    """`ViTSpec` fields that differ from the model's preset."""
    img_size: Annotated[
        PositiveInt | None, Meaning(resume="fixed", changes_result=True, with_probe="used")
    ] = None
    """Image size in pixels, for square images; short for `--spec.image-size`. Default: the
    model's."""
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
    pretrained: Annotated[
        WeightsSource,
        tyro.conf.arg(aliases=("--finetune",)),
        Meaning(resume="fixed", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = None
    """Initial weights: a file of any known format, a folder, a published checkpoint's name, or an
    address such as `hf://owner/name`; without a value, the published weights of --model.
    Preprocessing follows the checkpoint unless you override it."""
    # these two let a file be read; with it the result is the same
    trust_pickle: Annotated[
        bool,
        Meaning(
            resume="may change", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = False
    """Load weights stored as a pickle (`.pth`), with torch's `weights_only=True`."""
    allow_partial: Annotated[
        bool,
        Meaning(
            resume="may change", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = False
    """Accept --pretrained weights with unknown or missing tensors: leave out the unknown ones,
    initialise the missing ones at random, and list both."""
    # a resumed run takes it over, so there is nothing to compare
    start: Annotated[
        Settings | None,
        tyro.conf.Suppress,
        Meaning(resume="not compared", changes_result=True, with_probe="used"),
    ] = None
    """Facts about the initial weights (path, SHA-256, spec), for `resume`."""
    freeze: Annotated[
        tuple[str, ...],
        Meaning(resume="fixed", changes_result=True, with_probe="refused", for_pretrained=True),
    ] = ()
    """Parameters to freeze: `backbone` (everything except the head), or names or patterns such as
    `patch_embed` or `blocks.*.attn`."""
    freeze_blocks: Annotated[
        NonNegativeInt,
        Meaning(resume="fixed", changes_result=True, with_probe="refused", for_pretrained=True),
    ] = 0
    """Number of first blocks to freeze, together with the embedding; 0 freezes neither."""
