"""The functions people call. Each one wires rooms together; the work is done there."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from vitkit.data.checks import check as doctor
from vitkit.data.checks.check import Report, drop_or_refuse_unreadable
from vitkit.data.datasets.splitting import with_validation_of
from vitkit.data.images.preprocess import preprocess_images, viewport
from vitkit.data.sources import open as sources
from vitkit.data.sources.open import Dataset, Split, cached, open_dataset
from vitkit.devices import on_device, resolve_device
from vitkit.errors import DataError, SettingError, did_you_mean
from vitkit.evaluation import comparison
from vitkit.evaluation import evaluate as evaluation
from vitkit.evaluation.comparison import Comparison
from vitkit.evaluation.evaluate import Evaluation
from vitkit.explaining.attention_maps import attention_grid
from vitkit.explaining.overlay import Explanation, heatmap_over
from vitkit.models.presets import build
from vitkit.models.vit import ViT
from vitkit.prediction import ImageSource, Predictor, as_checkpoint, feature_predictor, read_image
from vitkit.training import train as session
from vitkit.training.auto import auto
from vitkit.training.config.train_config import TrainConfig, layered
from vitkit.training.recipes import recipe_settings
from vitkit.training.train import TrainResult
from vitkit.weights.catalogue import find
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.imagenet_classes import names_for_data
from vitkit.weights.load import load
from vitkit.weights.pretrained import pretrained as with_weights

EXPLAIN_METHODS = ("attention",)


def create_model(
    name: str,
    *,
    pretrained: bool | str | Path | None = False,
    trust_pickle: bool = False,
    strict: bool = True,
    **overrides: Any,
) -> ViT:
    """A ViT by name.

    Args:
        name: one of `list_models()`, such as `"vit_base_patch16_224"`; with a tag, as in
            `"vit_base_patch16_224.augreg_in1k"`, with that checkpoint's classes and image size.
        pretrained: False or None for fresh weights (torch's global generator decides them), True
            for the catalogue's (`vitkit models --pretrained` lists them), or whatever `load` takes:
            a file or folder of any known format, `hf://owner/name`.
        trust_pickle: read weights that are published as a pickle, as `load` does.
        strict: refuse weights with unknown or missing tensors, as `load` does.
        **overrides: any `ViTSpec` field, such as `num_classes=10` or `image_size=(192, 256)`. With
            weights, sizes, channels and classes are adapted as `vitkit.adapt` does it and each step
            is logged; what is not named stays as the weights were trained. What a file does not say
            (heads, activation, block, ... of bare weights) is as the name and these fields say; an
            `image_size` with as many patches as the file has positions is the size it is for.

    Returns:
        The model, with `.spec`; in training mode when fresh, in eval mode when pretrained.

    Raises:
        SettingError: no model of that name, or no published weights of it.
        SpecError: an unknown field, or a spec that cannot exist.
        CheckpointError: weights that cannot be read, or of another model.

    >>> create_model("vit_tiny_patch16_224", num_classes=10).spec.width
    192
    """
    fresh = pretrained is None or pretrained is False
    if fresh and "." in name:
        published = find(name)
        sizes = {"num_classes": published.classes, "image_size": published.image_size}
        return build(published.preset, **sizes | overrides)
    if fresh:
        return build(name, **overrides)
    return with_weights(name, pretrained or "", overrides, trust_pickle=trust_pickle, strict=strict)


def check(
    data: str | Path,
    *,
    data_root: str | Path | None = None,
    ignore_extra_classes: bool = False,
    follow_links: bool = False,
    workers: int = 0,
) -> Report:
    """What is wrong with your images: each is looked at once, unchanged files only ever once.

    Args:
        data: as for `train`.
        data_root: where to look for named data sets.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        follow_links: follow symbolic links that lead out of the folder.
        workers: threads; 0 means one for each core.

    Returns:
        `.problems`, the images that cannot be decoded; `.findings`, everything there is to say;
        `.refused`, whether training would refuse the data; `.as_dict()` for JSON.

    Raises:
        DataError: data that cannot be opened.
    """
    sources.refuse_objects(data)
    dataset = open_dataset(
        data,
        data_root=data_root,
        ignore_extra_classes=ignore_extra_classes,
        follow_links=follow_links,
    )
    return doctor.check(dataset, workers=workers)


def train(data: str | Path, *, recipe: str | None = None, **settings: Any) -> TrainResult:
    """Train a ViT on your images; the same settings as `vitkit train`.

    With `resume`, the settings start from those the run was started with. With `auto=True` and a
    `budget` such as `"10m"`, the cheapest answer comes first and the next one while it pays; the
    winner is `.best`, and `ladder.json` in the folder has them all.

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
    sources.refuse_objects(data)
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in settings.items()}
    named = recipe_settings(recipe)
    stored = session.resumed_settings(settings.get("resume"), settings.get("output"), named)
    asked = {"data": str(data)} | ({} if recipe is None else {"recipe": recipe})
    config = TrainConfig(**layered(stored, named, asked, settings))
    return auto.climb(config) if config.auto else session.train(config)


def evaluate(
    checkpoint: Checkpoint | str | Path,
    data: str | Path,
    *,
    split: str | None = None,
    data_root: str | Path | None = None,
    cache: str | Path | None = None,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 0,
) -> Evaluation:
    """How good a checkpoint is on a split of some data.

    Args:
        checkpoint: a checkpoint or its path.
        data: as for `train`. Classes are matched by name; how the images were chosen and cut for
            training (`bad_images`, `val_fraction` and the like) is read from the checkpoint.
        split: `train`, `val` or `test`; default `test`, else `val`.
        data_root: where to look for named data sets.
        cache: folder of decoded images, as for `train`; `auto` is the user's own. One that is not
            there yet is made, of all splits.
        device: where to run.
        batch_size: images run at once.
        workers: loader processes.

    Returns:
        A dict of floats: `top1`, `top{k}` with k = min(5, K), `loss` in nats, `balanced_accuracy`,
        `brier`, `ece` and `images`, which `Counts.scores` explains; `top1_low`, `top1_high` and
        the same of the balanced accuracy, intervals of 95 %; where the checkpoint has a
        `temperature`, that and the `calibrated_loss`, `calibrated_brier` and `calibrated_ece` that
        it gives. Beside them `.per_class`, `.without_images`, `.confusion` (K, K) and
        `.rows()`, a row an image.

    Raises:
        CheckpointError, DataError, DeviceError, SettingError: what is wrong, by name.
    """
    stored = as_checkpoint(checkpoint)
    sources.refuse_objects(data)
    if batch_size < 1:
        raise SettingError.about("batch_size", batch_size, "must be 1 or more")
    if workers < 0:
        raise SettingError.about("workers", workers, "must be 0 or more")
    dataset = _opened_as_in_training(stored, data, data_root, cache)
    part = _with_labels_of(stored, dataset, _choose_split(dataset, split))
    where = resolve_device(device)
    made = evaluation.outputs(
        on_device(stored.model, where),
        part,
        stored.preprocess,
        batch_size=batch_size,
        device=where,
        workers=workers,
    )
    scores, tally = evaluation.examine(made, stored.model.spec.num_classes, stored.temperature)
    names = names_for_data(stored, dataset.classes) or dataset.classes
    return Evaluation(scores, tally, part, names)


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
    """Whether one model is better than another, on the same images.

    Args:
        *checkpoints: two or more runs (their best weights) or checkpoints; the first one is
            compared with each of the others.
        data: as for `train`; default what they were trained on, where that is the same.
        split: `train`, `val` or `test`; default `test`, else `val`.
        data_root: where to look for named data sets; default where the first one's run looked.
        cache: as for `evaluate`.
        device: where to run.
        batch_size: images run at once.
        workers: loader processes.

    Returns:
        `.scores`, name -> what `evaluate` gives; `.pairs`, McNemar's exact test of each with the
        first, with a `.verdict`; `.repeats`, mean and spread of runs that differ in their seed.

    Raises:
        DataError: other classes, other images, or data that changed where vitkit cut the test
            split itself.
        SettingError: fewer than two, one of them twice, or no data named and not the same in all.
        CheckpointError, DeviceError: what is wrong, by name.
    """
    names = [str(each) for each in checkpoints]
    places = {os.path.realpath(name) for name in names}
    if len(places) != len(names) or len(names) < 2:
        raise SettingError(f"compare two or more different checkpoints, not {' and '.join(names)}")
    stored = [load(name) for name in names]
    recipes = [each.metadata.get("recipe") or {} for each in stored]
    if data is None:
        trained_on = {recipe.get("data") for recipe in recipes}
        data = trained_on.pop()
        if data is None or trained_on:
            raise SettingError("these were not all trained on one data set; name one with --data")
        data_root = data_root or recipes[0].get("data_root")
    scores = {
        name: evaluate(each, data, split=split, data_root=data_root, cache=cache, device=device,
                       batch_size=batch_size, workers=workers)
        for name, each in zip(names, stored, strict=True)
    }  # fmt: skip
    kinds = [session.kind_of_run(recipe) for recipe in recipes]
    return comparison.compare(scores, kinds, [recipe.get("seed") for recipe in recipes])


def explain(
    checkpoint: Checkpoint | str | Path,
    image: ImageSource,
    *,
    method: str = "attention",
    layer: int = -1,
    head: int | None = None,
    device: str = "auto",
) -> Explanation:
    """What the model looks at in one image.

    Args:
        checkpoint: a checkpoint or its path.
        image: a path, bytes, a PIL image or a uint8 array.
        method: `attention`, the attention of the class token (or of the mean query, where the
            model reads the mean) over the patches.
        layer: encoder block; negative ones count from the end.
        head: one head; default their mean.
        device: where to run.

    Returns:
        `.heatmap` (H, W) in [0, 1], `.overlay()` a PIL image, `.save(path)`, and the prediction, an
        empty one where the model has no head.

    Raises:
        SettingError: a method, layer or head that does not exist.
        ImageError, CheckpointError, DeviceError: what is wrong, by name.
    """
    if method not in EXPLAIN_METHODS:
        raise SettingError(
            f"method {method!r} does not exist{did_you_mean(method, EXPLAIN_METHODS)}; "
            f"methods are {', '.join(EXPLAIN_METHODS)}"
        )
    stored = as_checkpoint(checkpoint)
    pixels, where = read_image(image), resolve_device(device)
    stored = replace(stored, model=on_device(stored.model, where))
    images = preprocess_images([pixels], stored.preprocess).to(where)
    (grid,) = attention_grid(stored.model, images, layer=layer, head=head)
    size = (pixels.shape[0], pixels.shape[1])
    heatmap = heatmap_over(grid, size, viewport(size, stored.preprocess))
    if stored.model.spec.num_classes == 0:
        return Explanation(pixels, heatmap, method=method)
    (said,) = Predictor.from_checkpoint(stored, device=device)([pixels], top_k=1)
    return Explanation(pixels, heatmap, said.label, said.probability, method)


def embed(
    checkpoint: Checkpoint | str | Path,
    images: Iterable[ImageSource],
    *,
    device: str = "auto",
    batch_size: int = 64,
) -> Float[np.ndarray, "N D"]:
    """The pooled features of images, what the head reads: (N, D) float32.

    Raises:
        ImageError, CheckpointError, DeviceError: what is wrong, by name.
    """
    stored = as_checkpoint(checkpoint)
    predictor = feature_predictor(stored, device=device, batch_size=batch_size)
    return predictor.logits(images).numpy()


def _choose_split(dataset: Dataset, split: str | None) -> str:
    if split is None:
        split = "test" if "test" in dataset.splits else "val"
    if split not in dataset.splits:
        raise DataError(
            f"{dataset.name} has no split {split!r}; it has {', '.join(dataset.splits)}"
        )
    return split


def _opened_as_in_training(
    checkpoint: Checkpoint,
    data: str | Path,
    data_root: str | Path | None,
    cache: str | Path | None,
) -> Dataset:
    """The data set, opened, cleaned and cut as the checkpoint's recipe says."""
    recipe, about = checkpoint.metadata.get("recipe"), checkpoint.metadata.get("data")
    recipe = recipe if isinstance(recipe, dict) else {}
    dataset = open_dataset(
        data,
        data_root=data_root,
        ignore_extra_classes=recipe.get("ignore_extra_classes") is True,
        follow_links=recipe.get("follow_links") is True,
    )
    trained_on = about.get("fingerprint") if isinstance(about, dict) else None
    if dataset.as_before is not None and dataset.as_before.fingerprint == trained_on:
        dataset = dataset.as_before
    if cache is not None:
        dataset = cached(dataset, None if cache == "auto" else cache)
        logging.getLogger("vitkit").info("%s", dataset.notes[-1])
    fraction = recipe.get("val_fraction")
    if trained_on is not None and isinstance(fraction, float) and fraction > 0:
        dataset = with_validation_of(dataset, trained_on, fraction)
    _refuse_changed_split(trained_on, dataset)
    if recipe.get("bad_images") == "skip":
        dataset, _ = drop_or_refuse_unreadable(dataset, "skip")
    return dataset


def _refuse_changed_split(trained_on: str | None, dataset: Dataset) -> None:
    """A split that vitkit cut itself is only the same split while the images are the same."""
    if dataset.cut and trained_on not in (None, dataset.fingerprint):
        raise DataError(
            f"{dataset.name} has no test folder of its own and its images are not those the "
            f"checkpoint was trained on, so a fresh cut would test on training images; "
            f"put the images to test on in {dataset.name}/test/<class>/"
        )


def _with_labels_of(checkpoint: Checkpoint, dataset: Dataset, split: str) -> Split:
    """The split with its labels numbered as the checkpoint numbers its classes, by name."""
    part = dataset.splits[split]
    classes = names_for_data(checkpoint, dataset.classes)
    if not classes:
        if len(dataset.classes) != checkpoint.model.spec.num_classes:
            raise DataError(
                f"{dataset.name} has {len(dataset.classes)} classes, the checkpoint's head "
                f"{checkpoint.model.spec.num_classes}, and the checkpoint names none"
            )
        warnings.warn(
            "the checkpoint names no classes; taking the data's in natural order", stacklevel=3
        )
        return part
    places = {name: place for place, name in enumerate(classes)}
    unknown = [name for name in dataset.classes if name not in places]
    if unknown:
        raise DataError(
            f"{dataset.name} has classes the checkpoint does not know: {', '.join(unknown[:5])}; "
            f"it knows {', '.join(classes[:5])}{' ...' if len(classes) > 5 else ''}"
        )
    numbers = np.array([places[name] for name in dataset.classes], dtype=np.int64)
    return part.relabelled(numbers[part.labels])
