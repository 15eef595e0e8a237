"""Measurement of how far the maps of a method may be trusted on a model."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.devices import on_device, resolve_device
from vitkit.errors import SettingError
from vitkit.explaining.choice import choose_method, method_options
from vitkit.explaining.explain import find_class
from vitkit.explaining.truth.class_matters import MOSAICS
from vitkit.explaining.truth.maps import MapMaker, require_head
from vitkit.explaining.truth.measure import PARTS, Part, measure_truth
from vitkit.explaining.truth.report import TruthReport
from vitkit.prediction.find import Images
from vitkit.prediction.predictor import Predictor
from vitkit.spec import Preprocess
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint


def truth_report(
    checkpoint: Checkpoint | str | Path,
    images: Images,
    *,
    method: str | None = None,
    labels: Sequence[str | int] | np.ndarray | Tensor | None = None,
    parts: Collection[Part] = PARTS,
    mosaics: int = MOSAICS,
    seed: int = 0,
    device: str = "auto",
    **options: Any,
) -> TruthReport:
    """Measure how far the maps of a method may be trusted on a model, as `vitkit explain --truth`.

    Deletion, insertion and SaCo are measured on each image; the parts need several and more time.

    Args:
        checkpoint: a checkpoint or its path.
        images: as for a call of `Predictor`, all in memory; some tens, not trained on.
        method: as for `explain`; not one whose maps are colours.
        labels: the right class of each image, by name or number; default the predicted classes.
        parts: of `weights` (does the map change with them?), `class` (mosaics of four classes),
            `stability` (shift and JPEG), `fit` (can the model do without patches?) and `removal`
            (patches grey or blurred instead of dropped); default all.
        mosaics: the number of mosaics, 1 or more.
        seed: seed of everything that is random, 0 or more; the same seed gives the same numbers.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        **options: of the method; None leaves one to the method.

    Returns:
        `.lines` in words, `.as_json()` plain values, `.deletion`, `.insertion` and `.saco` the
        medians, `.scores` a `TruthScore` for each image, and an attribute for each part.

    Raises:
        SettingError: a method, an option, a part or a class that does not exist, a model without a
            head, no images, another number of labels than images, no mosaic, or a negative seed.
        ImageError, DataError, CheckpointError, DeviceError: the message names the wrong value.
    """
    labels = labels.tolist() if isinstance(labels, np.ndarray | Tensor) else labels
    # before the weights are loaded
    chosen, _ = choose_method(method, options)
    maker = MapMaker(chosen, method_options(chosen, options))
    _check(parts, mosaics, seed)
    checkpoint = as_checkpoint(checkpoint)
    require_head(checkpoint.model)  # before the images are read
    model = on_device(checkpoint.model, resolve_device(device))
    inputs = _preprocessed(checkpoint.preprocess, images).to(next(model.parameters()))
    found = [] if labels is None else [find_class(checkpoint, label) for label in labels]
    return measure_truth(
        maker.method,
        model,
        inputs,
        labels=None if labels is None else torch.tensor(found),
        options=maker.options,
        preprocess=checkpoint.preprocess,
        parts=parts,
        mosaics=mosaics,
        seed=seed,
    )


def _check(parts: Collection[str], mosaics: int, seed: int) -> None:
    for part in parts:
        if part not in PARTS:
            raise SettingError.about("parts", part, f"must be of {', '.join(PARTS)}")
    if mosaics < 1:
        raise SettingError.about("mosaics", mosaics, "must be 1 or more")
    if seed < 0:
        raise SettingError.about("seed", seed, "must be 0 or more")


def _preprocessed(preprocess: Preprocess, images: Images) -> Float[Tensor, "N C H W"]:
    """Return all images as a model gets them; a predictor reads them, and passes them on."""
    rows = Predictor(lambda batch: batch.flatten(1), preprocess).logits(images)
    return rows.unflatten(1, (len(preprocess.mean), *preprocess.image_size))
