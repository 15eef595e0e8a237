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


@frozen(raises=SettingError)
class ModelSettings:
    """Architecture, initial weights and frozen parts."""

    model: Annotated[
        str | None,
        Meaning(resume="fixed", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = None
    """A model's name (`vitkit models` lists them); single fields change by `--spec.FIELD VALUE`.
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
    """Image size in pixels, a square; short for `--spec.image-size`."""
    progressive: Annotated[
        tuple[PositiveInt, ...],
        Meaning(resume="fixed", changes_result=True, with_probe="refused"),
    ] = ()
    """Progressive resizing: image sizes over equal parts of the epochs, such as `128 160 192`;
    evaluation uses the last one."""
    # off in evaluation mode, in which a probe computes its features
    drop_path: Annotated[
        Fraction | None, Meaning(resume="fixed", changes_result=True, with_probe="ignored")
    ] = None
    """Stochastic depth of the last block; short for `--spec.drop-path`."""
    pretrained: Annotated[
        WeightsSource,
        tyro.conf.arg(aliases=("--finetune",)),
        Meaning(resume="fixed", changes_result=True, with_probe="used", with_auto="passed on"),
    ] = None
    """Start from weights: a file of any known format, a folder, a published checkpoint's name, an
    address such as `hf://owner/name`; without a value, the published weights of --model. Images are
    preprocessed as the weights describe it, except where a setting is given."""
    # these two let a file be read; with it the result is the same
    trust_pickle: Annotated[
        bool,
        Meaning(
            resume="may change", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = False
    """Read weights that are a pickle (`.pth`), by torch's `weights_only` reader."""
    allow_partial: Annotated[
        bool,
        Meaning(
            resume="may change", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = False
    """Go on with --pretrained weights that have unknown or missing tensors: leave out the unknown,
    give the missing random values, and list both."""
    # a resumed run takes it over, so there is nothing to compare
    start: Annotated[
        Settings | None,
        tyro.conf.Suppress,
        Meaning(resume="not compared", changes_result=True, with_probe="used"),
    ] = None
    """Facts about the weights that the run started from (path, SHA-256, spec), for `resume`."""
    freeze: Annotated[
        tuple[str, ...], Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = ()
    """Parameters that are not trained: `backbone` (all but the head), or by name or pattern, such
    as `patch_embed` or `blocks.*.attn`."""
    freeze_blocks: Annotated[
        NonNegativeInt, Meaning(resume="fixed", changes_result=True, with_probe="refused")
    ] = 0
    """Where above 0, do not train the embedding and this many first blocks."""
