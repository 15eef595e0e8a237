"""Settings of what a run reports: curves, images, services, the terminal."""

from __future__ import annotations

from typing import Annotated

from vitkit.errors import SettingError
from vitkit.frozen import frozen
from vitkit.training.config.field_types import PositiveInt, TrackerName
from vitkit.training.config.meaning import Meaning


@frozen(raises=SettingError)
class LoggingSettings:
    """Curves, image grids, tracking services, and output on the terminal."""

    # a probe logs no steps
    log_interval: Annotated[
        PositiveInt, Meaning(resume="may change", changes_result=False, with_probe="ignored")
    ] = 50
    """Steps between two points of the TensorBoard curves and two lines of metrics.jsonl."""
    log_histograms: Annotated[
        bool, Meaning(resume="may change", changes_result=False, with_probe="used")
    ] = True
    """Write histograms of the weights to TensorBoard at the end of epochs."""
    log_examples: Annotated[
        bool, Meaning(resume="may change", changes_result=False, with_probe="used")
    ] = True
    """Write some validation images with their predictions to TensorBoard."""
    plots: Annotated[
        bool,
        Meaning(
            resume="may change", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = True
    """Draw the learning curves and the confusion matrix at the end, about a second's work; off is
    for many short runs."""
    report: Annotated[
        bool,
        Meaning(
            resume="may change", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = True
    """Write report.html at the end, a page with the results of the run for any browser; it takes
    about two seconds, and more where many mistakes are large images."""
    save_augmented_grid: Annotated[
        bool, Meaning(resume="may change", changes_result=False, with_probe="refused")
    ] = False
    """Before the first step, write the first training batch as the model sees it, with its labels,
    to augmented.png."""
    logger: Annotated[
        tuple[TrackerName, ...],
        Meaning(
            resume="may change", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = ()
    """Experiment trackers that also receive the metrics: `wandb`, `mlflow`."""
    quiet: Annotated[
        bool,
        Meaning(
            resume="not compared", changes_result=False, with_probe="used", with_auto="passed on"
        ),
    ] = False
    """Print no progress bar and no messages; train.log in the run folder has them."""
