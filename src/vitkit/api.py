"""Functions that join several packages: train, compare and explain.

The other public functions live in the package that does their work; `vitkit.__getattr__` imports
them from there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitkit.data.sources.open import refuse_objects
from vitkit.devices import on_device, resolve_device
from vitkit.evaluation.comparison import Comparison, compare_checkpoints
from vitkit.explaining.explain import explain_pixels, find_method
from vitkit.explaining.overlay import Explanation
from vitkit.prediction import ImageSource, Predictor, read_image
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint

if TYPE_CHECKING:
    from vitkit.training.result import TrainResult

# Training is imported in the functions that need it: an explanation must not wait for that.


def train(data: str | Path, *, recipe: str | None = None, **settings: Any) -> TrainResult:
    """Train a ViT on your images; the same settings as `vitkit train`.

    With `resume`, the settings start from those the run was started with. With `auto=True` and a
    `budget` such as `"10m"`, candidates are tried from cheap to expensive as long as the next one
    is worth it; the winner is `.best`, and `search.json` in the folder lists them all.

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
    from vitkit.training.resume import settings_of_call
    from vitkit.training.train import train as train_config

    refuse_objects(data)
    given: dict[str, Any] = {"data": str(data)}
    if recipe is not None:
        given["recipe"] = recipe
    for name, value in settings.items():
        given[name] = str(value) if isinstance(value, Path) else value
    config = settings_of_call(given)
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
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.

    Returns:
        `.heatmap` (H, W) in [0, 1], `.overlay()` a PIL image, `.save(path)`, and the prediction, an
        empty one where the model has no head.

    Raises:
        SettingError: a method, layer or head that does not exist.
        ImageError, CheckpointError, DeviceError: the message names the wrong value.
    """
    find_method(method)  # before the weights are loaded
    checkpoint = as_checkpoint(checkpoint)
    pixels = read_image(image)
    # one copy on the device, for the map and for the prediction
    model = on_device(checkpoint.model, resolve_device(device))
    checkpoint = replace(checkpoint, model=model)
    explanation = explain_pixels(checkpoint, pixels, method=method, layer=layer, head=head)
    if model.spec.num_classes == 0:
        return explanation
    predictor = Predictor.from_checkpoint(checkpoint, device=device)
    (prediction,) = predictor([pixels], top_k=1)
    return replace(explanation, label=prediction.label, probability=prediction.probability)
