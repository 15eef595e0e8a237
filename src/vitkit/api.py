"""Functions that join several packages: check, train, compare and explain.

The other public functions live in the package that does their work; `vitkit.__getattr__` imports
them from there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.data.checks.check import Report, check_dataset
from vitkit.data.images.preprocess import preprocess_images, viewport
from vitkit.data.sources.open import open_dataset, refuse_objects
from vitkit.devices import on_device, resolve_device
from vitkit.errors import SettingError
from vitkit.evaluation.comparison import Comparison, compare_checkpoints
from vitkit.explaining import METHODS
from vitkit.explaining.overlay import Explanation, heatmap_over
from vitkit.messages import did_you_mean
from vitkit.prediction import ImageSource, Predictor, read_image
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint

if TYPE_CHECKING:
    from vitkit.training.train import TrainResult

# Training is imported in the functions that need it: an explanation must not wait for that.


def check(
    data: str | Path,
    *,
    data_root: str | Path | None = None,
    ignore_extra_classes: bool = False,
    follow_links: bool = False,
    workers: int = 0,
) -> Report:
    """Check every image of a dataset; unchanged files are read only the first time.

    Args:
        data: as for `train`.
        data_root: the folder of named datasets.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        follow_links: follow symbolic links that lead out of the folder.
        workers: threads; 0 means one for each core.

    Returns:
        `.problems`, the images that cannot be decoded; `.findings`, all findings; `.refused`, True
        if training would refuse the data; `.as_dict()` for JSON.

    Raises:
        DataError: data that cannot be opened.
    """
    refuse_objects(data)
    dataset = open_dataset(
        data,
        data_root=data_root,
        ignore_extra_classes=ignore_extra_classes,
        follow_links=follow_links,
    )
    return check_dataset(dataset, workers=workers)


def train(data: str | Path, *, recipe: str | None = None, **settings: Any) -> TrainResult:
    """Train a ViT on your images; the same settings as `vitkit train`.

    With `resume`, the settings start from those the run was started with. With `auto=True` and a
    `budget` such as `"10m"`, candidates are tried from cheap to expensive as long as the next one
    is worth it; the winner is `.best`, and `ladder.json` in the folder lists them all.

    Args:
        data: a folder of images, a CSV or Parquet file, `wds:SHARDS.tar`, `hf://owner/name`, or
            `digits`, `mnist`, `fashion-mnist`, `cifar10`, `cifar100`.
        recipe: a recipe's name or a YAML file to start from.
        **settings: any field of `TrainConfig`, such as `epochs=10`, `output="runs/cats"`, or
            `spec={"patch_size": 4}`; a path may be a `Path`.

    Returns:
        The run folder, the paths of the best and the last weights, the metrics, why it ended.

    Raises:
        UserError: wrong settings or data, before the first step.
        NonFiniteError: the loss or the gradient is not a finite number.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1 came; everything is saved.
    """
    from vitkit.training.auto.auto import run_search
    from vitkit.training.config.merging import layered
    from vitkit.training.config.train_config import TrainConfig
    from vitkit.training.recipes import recipe_settings
    from vitkit.training.train import resumed_settings
    from vitkit.training.train import train as train_config

    refuse_objects(data)
    given: dict[str, Any] = {"data": str(data)}
    if recipe is not None:
        given["recipe"] = recipe
    for name, value in settings.items():
        given[name] = str(value) if isinstance(value, Path) else value
    of_recipe = recipe_settings(recipe)
    stored = resumed_settings(given.get("resume"), given.get("output"), of_recipe)
    # later ones take precedence
    config = TrainConfig(**layered(stored, of_recipe, given))
    return run_search(config) if config.auto else train_config(config)


def compare(
    *checkpoints: str | Path,
    data: str | Path | None = None,
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
        device: `cpu`, `cuda`, `mps`; auto takes the best there is.
        batch_size: images run at once.
        workers: loader processes.

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

    return compare_checkpoints(
        *checkpoints,
        data=data,
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
    image: ImageSource,
    *,
    method: str = "attention",
    layer: int = -1,
    head: int | None = None,
    device: str = "auto",
) -> Explanation:
    """Compute a heat map of what the model looks at in one image.

    Args:
        checkpoint: a checkpoint or its path.
        image: a path, bytes, a PIL image or a uint8 array.
        method: `attention`, the attention of the class token (or of the mean query, where the
            model reads the mean) over the patches.
        layer: encoder block; negative ones count from the end.
        head: one head; default their mean.
        device: `cpu`, `cuda`, `mps`; auto takes the best there is.

    Returns:
        `.heatmap` (H, W) in [0, 1], `.overlay()` a PIL image, `.save(path)`, and the prediction, an
        empty one where the model has no head.

    Raises:
        SettingError: a method, layer or head that does not exist.
        ImageError, CheckpointError, DeviceError: the message names the wrong value.
    """
    if method not in METHODS:
        raise SettingError(
            f"method {method!r} does not exist{did_you_mean(method, METHODS)}; "
            f"methods are {', '.join(METHODS)}"
        )
    checkpoint = as_checkpoint(checkpoint)
    pixels = read_image(image)
    model_device = resolve_device(device)
    # one copy on the device, for the map and for the prediction
    checkpoint = replace(checkpoint, model=on_device(checkpoint.model, model_device))
    images = preprocess_images([pixels], checkpoint.preprocess).to(model_device)
    (grid,) = METHODS[method](checkpoint.model, images, layer=layer, head=head)
    size = (pixels.shape[0], pixels.shape[1])
    heatmap = heatmap_over(grid, size, viewport(size, checkpoint.preprocess))
    if checkpoint.model.spec.num_classes == 0:
        return Explanation(pixels, heatmap, method=method)
    (prediction,) = Predictor.from_checkpoint(checkpoint, device=device)([pixels], top_k=1)
    return Explanation(pixels, heatmap, prediction.label, prediction.probability, method)
