"""Settings of the run as a whole: its recipe, its kind, its folder."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import PositiveInt
from vitkit.training.config.meaning import Meaning


@frozen(raises=SettingError)
class RunSettings:
    """The recipe, the run folder, resuming, and kinds of runs besides training."""

    # only its name: its settings are compared one by one
    recipe: Annotated[
        str | None,
        tyro.conf.arg(aliases=("-c", "--config")),
        Meaning(resume="not compared", changes_result=False, with_probe="used"),
    ] = None
    """Settings to start from: a recipe's name or a YAML file; flags override them."""
    output: Annotated[
        str | None,
        tyro.conf.arg(aliases=("--output-dir",)),
        Meaning(resume="not compared", changes_result=False, with_probe="used", with_auto="own"),
    ] = None
    """The run folder; by default runs/DATA-MODEL-N."""
    overwrite: Annotated[
        bool,
        Meaning(resume="not compared", changes_result=False, with_probe="used", with_auto="own"),
    ] = False
    """Put an existing run folder aside (it is renamed, not deleted) and start afresh; a folder that
    is no run of vitkit, or holds the data, is never moved."""
    resume: Annotated[
        str | None, Meaning(resume="not compared", changes_result=False, with_probe="used")
    ] = None
    """Go on with a stopped run: its folder, or `auto` for the one at --output, if there is one."""
    save_every: Annotated[
        PositiveInt | None,
        Meaning(resume="may change", changes_result=False, with_probe="refused"),
    ] = None
    """Optimizer steps between two saved states; by default one at the end of every epoch that ends
    five seconds or more after the last one."""
    probe: Annotated[
        Literal["linear", "knn"] | None,
        Meaning(resume="fixed", changes_result=True, with_probe="used"),
    ] = None
    """Train only a linear head on features that are computed once, or only measure how good the
    nearest neighbours are."""
    auto: Annotated[
        bool,
        Meaning(resume="may change", changes_result=True, with_probe="used", with_auto="own"),
    ] = False
    """Try candidates from the cheapest upwards: nearest neighbours, a linear head, fine-tuning, or
    without --pretrained a new model of a size that fits the images; stop when the next one gains
    nothing."""
    budget: Annotated[
        str | None,
        Meaning(resume="may change", changes_result=True, with_probe="used", with_auto="own"),
    ] = None
    """The time that `auto` may take: 90s, 10m (default), 1h."""
