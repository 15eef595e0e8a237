"""Settings of fine-tuning: the weights that a model starts from, and what of it is frozen."""

from __future__ import annotations

from typing import Annotated

import tyro

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import NonNegativeInt, Settings, WeightsSource
from vitkit.training.config.meaning import Meaning

CATALOGUE = "auto"
"""`pretrained` without a value: the published weights of the model."""


@frozen(raises=SettingError)
class FineTuningSettings:
    """Initial weights and frozen parts."""

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
