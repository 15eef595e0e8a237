"""Functions that join several packages: train, show_batch, compare, explain and its sheet.

The other public functions live in the package that does their work; `vitkit.__getattr__` imports
them from there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from vitkit.data.sources.open import DataSource, kept_data
from vitkit.devices import on_device, resolve_device
from vitkit.evaluation.comparison import Comparison, compare_checkpoints
from vitkit.explaining.explain import ImageExplainer, options_for
from vitkit.explaining.explanation import Explanation
from vitkit.prediction.images import AnyImage, read_any_image
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitkit.train_settings import TrainSettings
    from vitkit.training.result import TrainResult

# Training is imported in the functions that need it: an explanation must not wait for that.


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
    from vitkit.reporting.after_training import train_and_report
    from vitkit.training.setup.call import settings_of_python_call

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
    from vitkit.training.setup.first_batch import draw_first_batch

    return draw_first_batch(data, _with_recipe(settings, recipe), max_images)


def _with_recipe(settings: TrainSettings, recipe: str | Path | None) -> dict[str, Any]:
    # left out, not None: a run that is resumed keeps the recipe of its own
    if recipe is None:
        return {**settings}
    return {**settings, "recipe": recipe}


def compare(
    *checkpoints: str | Path,
    data: DataSource | None = None,
    split: str | None = None,
    data_root: str | Path | None = None,
    cache: str | Path | None = None,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 0,
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

    Returns:
        `.scores`, name -> the result of `evaluate`; `.pairs`, McNemar's exact test of each with the
        first, with a `.verdict`; `.repeats`, mean and spread of runs that differ in their seed.

    Raises:
        DataError: other classes, other images, or data that changed where vitkit made the test
            split itself.
        SettingError: fewer than two, one of them twice, or no data named and not the same in all.
        CheckpointError, DeviceError: the message names the wrong value.
    """
    from vitkit.training.config.run_kind import kind_of_run

    # an object is kept under an address while this runs; a path is its own address
    with kept_data(data) as address:
        return compare_checkpoints(
            *checkpoints,
            data=address,
            data_root=data_root,
            kind_of_run=kind_of_run,
            split=split,
            cache=cache,
            device=device,
            batch_size=batch_size,
            workers=workers,
        )


def explain(
    checkpoint: Checkpoint | str | Path,
    image: AnyImage,
    *,
    method: str = "attention",
    class_name: str | int | None = None,
    layer: int | None = None,
    head: int | None = None,
    truth: bool | None = None,
    device: str = "auto",
    **options: Any,
) -> Explanation:
    """Compute a heat map of what the model looks at in one image.

    Args:
        checkpoint: a checkpoint or its path.
        image: a path, an http(s) address, an encoded file's bytes, a PIL image, (H, W, 3) or (H, W)
            uint8 [0, 255], or an image of `find_images`.
        method: `attention`, the attention of the class token (or of the mean query, where the
            model reads the mean) over the patches; the guide to `vitkit explain` lists all.
        class_name: the class to explain, by its name or its number from 0; default the predicted
            class. The map depends on it only where the method explains a class.
        layer: encoder block, from 0; negative ones count from the end. Default the method's own.
        head: one head; default their mean.
        truth: measure the truth score of the map, hundreds of passes with some of the patches;
            default: only of models for which that takes about a second.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        **options: further options of the method; None leaves one to the method.

    Returns:
        `.heatmap` (H, W) in [0, 1], `.grid` the method's own values, `.overlay()` a PIL image,
        `.plot()` a figure, `.save(path)`, `.truth` the score of the map or None, and the class with
        its probability; no class where the model has no head.

    Raises:
        SettingError: a method, an option, a layer, a head or a class that does not exist.
        ImageError, CheckpointError, DeviceError: the message names the wrong value.
    """
    # before the weights are loaded
    options = options_for(method, {"layer": layer, "head": head, **options})
    checkpoint = as_checkpoint(checkpoint)
    pixels = read_any_image(image)
    model = on_device(checkpoint.model, resolve_device(device))
    explainer = ImageExplainer(replace(checkpoint, model=model), pixels, class_name, truth)
    return explainer.explain(method, **options)


def plot_attention_sheet(
    checkpoint: Checkpoint | str | Path, image: AnyImage, *, device: str = "auto"
) -> Figure:
    """Draw the attention map of every layer and head for one image, as rows and columns.

    Each map is that of `explain(method="attention", layer=..., head=...)`, over what the model sees
    of the image; it has its own colours, and its largest value stands below it.

    Args:
        checkpoint: as for `explain`.
        image: as for `explain`.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.

    Returns:
        A matplotlib figure; `.savefig("heads.pdf")` writes it.

    Raises:
        ImageError, CheckpointError, DeviceError: the message names the wrong value.
    """
    # imported here: matplotlib takes half a second
    from vitkit.explaining.figures import draw_attention_sheet

    checkpoint = as_checkpoint(checkpoint)
    pixels = read_any_image(image)
    model = on_device(checkpoint.model, resolve_device(device))
    return draw_attention_sheet(replace(checkpoint, model=model), pixels)
