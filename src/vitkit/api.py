"""Functions that join several packages: train, show_batch and compare.

The other public functions live in the package that does their work; `vitkit.__getattr__` imports
them from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from vitkit.data.sources.open import DataSource, kept_data
from vitkit.errors import SettingError, check_type
from vitkit.io.results import check_outputs, given

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitkit.evaluation.comparison import Comparison
    from vitkit.plots.figure import NotebookFigure
    from vitkit.train_settings import TrainSettings
    from vitkit.training.config.train_config import TrainConfig
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
    with _settings_of_call(data, recipe, settings) as config:
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
    with _settings_of_call(data, recipe, settings) as config:
        return draw_batch(config, max_images)


@contextmanager
def _settings_of_call(
    data: DataSource | None, recipe: str | Path | None, settings: TrainSettings
) -> Iterator[TrainConfig]:
    """Yield the settings of a call; its objects are found by their names while the block runs."""
    from vitkit.training.config.merging import layered
    from vitkit.training.config.passed_objects import refuse_missing, with_names
    from vitkit.training.config.train_config import TrainConfig
    from vitkit.training.recipes import recipe_settings
    from vitkit.training.resume import resumed_settings

    # omitted, not None: a resumed run keeps its recipe
    texts, objects = with_names({**settings, **({} if recipe is None else {"recipe": recipe})})
    # names of objects have a meaning in this call alone
    with given(objects), kept_data(data) as address:
        if address is not None:
            texts["data"] = address
        base = recipe_settings(texts.get("recipe"))
        stored = resumed_settings(texts.get("resume"), texts.get("output"), base)
        if "data" not in texts and "data" not in stored:
            raise SettingError("data is missing; it comes first: vitkit.train(data, ...)")
        config = TrainConfig(**layered(stored, base, texts))
        refuse_missing(config)
        yield config


# What the verb and the function share.


def train_and_report(config: TrainConfig) -> tuple[TrainResult, Path | None]:
    """Train, or search with `auto`, and write the report of the run where the setting is on.

    Args:
        config: every setting.

    Returns:
        The result, and the path of the report; None without one.

    Raises:
        VitkitError: as `train` and `run_search`. A report that cannot be written is a line in the
            log.
    """
    # imported here: most runs need neither a search nor, before their end, the report
    if config.auto:
        from vitkit.training.auto import run_search

        result = run_search(config)
    else:
        from vitkit.training.train import train

        result = train(config)
    if not config.report:
        return result, None
    from vitkit.reporting.report import report_after_training

    return result, report_after_training(result, quiet=config.quiet)


def draw_batch(config: TrainConfig, max_images: int) -> NotebookFigure:
    """Draw the first images of a run with its labels; the title has the model's values.

    Args:
        config: the settings of the run.
        max_images: images to draw, of those in the first batch.

    Raises:
        UserError: wrong settings or data.
    """
    # imported here: training takes a second
    from vitkit.training.monitoring import figures
    from vitkit.training.plan import make_plan, make_transform

    if max_images < 1:
        raise SettingError.about("max_images", max_images, "must be 1 or more")
    for name in ("auto", "probe"):
        if getattr(config, name):
            raise SettingError(
                f"--show-batch draws the augmented images of a single run; leave out --{name}"
            )
    plan = make_plan(config)
    # with several micro-batches, images are mixed within each
    batch = next(plan.steps[0].parts(config.grad_accum_steps))
    fed = make_transform(plan)(batch, step=0)
    parts = config.grad_accum_steps
    return figures.batch_figure(fed, batch, plan.dataset, plan.preprocess, max_images, parts)


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
        report: an .html file to write with the models side by side.
        overwrite: let `report` replace a file.

    Returns:
        `.scores`, name -> the result of `evaluate`; `.pairs`, McNemar's exact test of each with the
        first, with a `.verdict`; `.repeats`, mean and spread of runs that differ in their seed.

    Raises:
        DataError: other classes or images, or changed data where vitkit made the test split itself.
        SettingError: fewer than two, one of them twice, or no data named and not the same in all.
        CheckpointError, DeviceError, OutputError: the message names the wrong value.
    """
    from vitkit.evaluation.comparison import compare_checkpoints
    from vitkit.reporting.comparison import write_comparison
    from vitkit.train_settings import NOT_OF_THE_KIND

    _check_paths(checkpoints)
    if report is not None:  # first, as an evaluation may take minutes
        check_outputs([Path(report)], (".html",), overwrite=overwrite, flag="--report")
    with kept_data(data) as address:  # valid inside this block, if the data are an object
        comparison = compare_checkpoints(
            *checkpoints,
            data=address,
            data_root=data_root,
            not_of_the_kind=NOT_OF_THE_KIND,
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
