"""Settings of the run as a whole: its recipe, its kind, its folder."""

from __future__ import annotations

from typing import Annotated, Literal

import tyro

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import PositiveInt, RunPath
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
    """Settings to start from: the name of a recipe, or a YAML file; flags override them."""
    output: Annotated[
        RunPath,
        tyro.conf.arg(aliases=("--output-dir",)),
        Meaning(resume="not compared", changes_result=False, with_probe="used", with_auto="own"),
    ] = None
    """Run folder. Default: runs/DATA-MODEL-N."""
    overwrite: Annotated[
        bool,
        Meaning(resume="not compared", changes_result=False, with_probe="used", with_auto="own"),
    ] = False
    """If the run folder exists, rename it (nothing is deleted) and start afresh; folders that are
    not runs of vitkit, or that contain the data, are never renamed."""
    resume: Annotated[
        RunPath, Meaning(resume="not compared", changes_result=False, with_probe="used")
    ] = None
    """Continue a stopped run: its folder, or `auto` for the one at --output, if it exists."""
    save_every: Annotated[
        PositiveInt | None,
        Meaning(resume="may change", changes_result=False, with_probe="refused"),
    ] = None
    """Optimizer steps between two saved states. Default: one at the end of every epoch, but at most
    one in five seconds."""
    callbacks: Annotated[
        tuple[str, ...],
        Meaning(resume="may change", changes_result=False, with_probe="ignored"),
    ] = ()
    """Callbacks of the training loop, as MODULE:CLASS: subclasses of `vitkit.Callback`."""
    probe: Annotated[
        Literal["linear", "knn"] | None,
        Meaning(resume="fixed", changes_result=True, with_probe="used"),
    ] = None
    """Train only a linear head on features that are computed once (`linear`), or only measure the
    accuracy of k-nearest neighbours (`knn`)."""
    auto: Annotated[
        bool,
        Meaning(resume="may change", changes_result=True, with_probe="used", with_auto="own"),
    ] = False
    """Try k-NN, then a linear probe, then fine-tuning (or, without pretrained weights, a suitably
    small ViT from scratch), and stop when the next step brings no significant gain."""
    budget: Annotated[
        str | None,
        Meaning(resume="may change", changes_result=True, with_probe="used", with_auto="own"),
    ] = None
    """Time limit of `--auto`, such as 90s, 10m or 1h. Default: 10m."""
