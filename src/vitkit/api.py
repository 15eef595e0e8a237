"""Functions that join several packages: train, show_batch and compare.

The other public functions live in the package that does their work; `vitkit.__getattr__` imports
them from there.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from vitkit.data.sources.open import DataSource, kept_data
from vitkit.errors import check_type
from vitkit.evaluation.comparison import Comparison, compare_checkpoints

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitkit.train_settings import TrainSettings
    from vitkit.training.run import TrainResult

# Training is imported in the functions that need it: an explanation must not wait for it.


def train(
    data: DataSource | None = None,
    *,
    recipe: str | Path | None = None,
    **settings: Unpack[TrainSettings],
) -> TrainResult:
    """Train a ViT on your images; the same settings as `vitkit train`.

    With `resume`, the settings start from those the run was started with. With `auto=True` and a
    `budget` such as `"10m"`, candidates are tried from cheap to expensive as long as the next one
    is worth it; the winner is `.best`, and `search.json` in the folder lists them all.

    Args:
        data: a folder of images, a CSV or Parquet file, `wds:SHARDS.tar`, `hf://owner/name`,
            `digits`, `mnist`, `fashion-mnist`, `cifar10`, `cifar100`; or an object: (images,
            labels) as arrays, a list of (path, label), a map-style torch Dataset, a
            `datasets.Dataset`, or a dict of these by split, as `open_dataset` explains. To resume
            a run, pass its object again; a path or a name may be left out.
        recipe: a recipe's name or a YAML file to start from.
        **settings: any field of `TrainSettings`, such as `epochs=10`, `output="runs/cats"`, or
            `spec={"patch_size": 4}`; a path may be a `Path`.

    Returns:
        The run folder, the paths of the best and the last weights, the metrics, why it ended.

    Raises:
        UserError: wrong settings or data, before the first step; later `OutputError` for a full
            disk, `LoaderError`, or `UserCodeError` for a function of yours that raised.
        NonFiniteError: the loss or the gradient is not a finite number.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1 came; everything is saved.
    """
    from vitkit.reporting.report import train_and_report
    from vitkit.training.resume import settings_of_python_call

    with settings_of_python_call(data, _with_recipe(settings, recipe)) as config:
        # the report needs the objects among the settings, too
        result, _ = train_and_report(config)
    return result


def show_batch(
    data: DataSource,
    *,
    recipe: str | Path | None = None,
    max_images: int = 24,
    **settings: Unpack[TrainSettings],
) -> Figure:
    """Draw the first images that training would feed to the model, with their labels.

    They are cropped, flipped, augmented and mixed as in the first step of `train` with the same
    arguments; of mixed images both labels and their weights are shown. Nothing is written.

    >>> figure = show_batch("digits", recipe="digits", max_images=4)
    >>> len(figure.axes), figure.axes[0].texts[0].get_text()
    (4, '8')

    Args:
        data: as for `train`.
        recipe: as for `train`.
        max_images: images to draw, of those in the first batch; 1 or more.
        **settings: as for `train`.

    Returns:
        A matplotlib Figure; a notebook shows it, `.savefig("batch.png")` writes it.

    Raises:
        UserError: wrong settings or data, as for `train`; `auto` and `probe`, which train on no
            augmented images.
    """
    # imported here: matplotlib takes half a second, training one more
    from vitkit.training.first_batch import draw_first_batch

    return draw_first_batch(data, _with_recipe(settings, recipe), max_images)


def _with_recipe(settings: TrainSettings, recipe: str | Path | None) -> dict[str, Any]:
    # omitted, not None: a resumed run keeps its recipe
    if recipe is None:
        return {**settings}
    return {**settings, "recipe": recipe}


def _check_paths(checkpoints: tuple[str | Path, ...]) -> None:
    for one in checkpoints:
        check_type(one, (str, PathLike), "compare", "paths of runs or checkpoints")


def compare(
    *checkpoints: str | Path,
    data: DataSource | None = None,
    split: str | None = None,
    data_root: str | Path | None = None,
    cache: str | Path | None = None,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 0,
    relabel: str | Path | None = None,
    report: str | Path | None = None,
    overwrite: bool = False,
) -> Comparison:
    """Test if one model is better than another on the same images.

    Args:
        *checkpoints: two or more runs (their best weights) or checkpoints; the first one is
            compared with each of the others.
        data: as for `train`; default the training data, if it is the same for all.
        split: `train`, `val` or `test`; default `test`, else `val`.
        data_root: the folder of named datasets; default that of the first one's training.
        cache: as for `evaluate`.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        batch_size: images per batch.
        workers: number of loader processes.
        relabel: a CSV file of corrected labels, as for `evaluate`.
        report: an .html file to write with the models side by side; replaces an earlier one.
        overwrite: let `report` replace any other file that is not an input.

    Returns:
        `.scores`, name -> the result of `evaluate`; `.pairs`, McNemar's exact test of each with the
        first, with a `.verdict`; `.repeats`, mean and spread of runs that differ in their seed.

    Raises:
        DataError: other classes or images, or changed data where vitkit made the test split itself.
        SettingError: fewer than two, one of them twice, or no data named and not the same in all.
        CheckpointError, DeviceError, OutputError: the message names the wrong value.
    """
    from vitkit.reporting.comparison import check_comparison_output, write_comparison
    from vitkit.training.config.train_config import kind_of_run

    _check_paths(checkpoints)
    if report is not None:  # first, as an evaluation may take minutes
        check_comparison_output(report, checkpoints, overwrite=overwrite)
    with kept_data(data) as address:  # valid inside this block, if the data are an object
        comparison = compare_checkpoints(
            *checkpoints,
            data=address,
            data_root=data_root,
            kind_of_run=kind_of_run,
            split=split,
            cache=cache,
            device=device,
            batch_size=batch_size,
            workers=workers,
            relabel=relabel,
        )
    if report is not None:
        write_comparison(comparison, Path(report))
    return comparison
