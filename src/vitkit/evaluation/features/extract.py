"""Pooled features of a frozen model, computed once and cached on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import PIL
import safetensors.torch
import torch
from jaxtyping import Float, Int64
from safetensors import SafetensorError
from torch import Tensor

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.pixel_cache import DECODER
from vitkit.errors import OutputError
from vitkit.evaluation.evaluation_loop import predict_batches
from vitkit.evaluation.finite_outputs import refuse_not_finite
from vitkit.io.atomic import replacing
from vitkit.io.cache_folder import cache_folder
from vitkit.io.digests import weights_fingerprint
from vitkit.models.initialisation import HEADS
from vitkit.models.vit import ViT
from vitkit.spec import Preprocess
from vitkit.weights.files.safetensors_file import safetensors_writer


def extract_features(
    model: ViT,
    dataset: Dataset,
    split: str,
    preprocess: Preprocess,
    *,
    device: torch.device | None = None,
    batch_size: int = 256,
    workers: int = 0,
    cache: Path | None = None,
    log: Callable[[str], object] = len,
) -> tuple[Float[Tensor, "N E"], Int64[Tensor, "N"]]:
    """Return the pooled features of every image of a split, from the cache or computed now.

    Args:
        model: in eval mode on `device`; its head is not used.
        dataset: the images.
        split: the split's name.
        preprocess: the evaluation transform.
        device: device of the model; default the CPU.
        batch_size: images per batch.
        workers: number of loader processes.
        cache: folder of cached features; default `features` in the user's cache folder. They belong
            to the weights, the data's content, the images in the split and their preprocessing.
        log: receives a line that tells whether they were cached or computed.

    Returns:
        Features (N, E) float32 on the CPU in the split's order, and class numbers (N,).

    Raises:
        DataError: an empty split.
        CheckpointError: features that are NaN or infinite, with the number of images.
    """
    images = dataset.splits[split]
    key = _cache_key(model, dataset, split, preprocess)
    path = (cache or cache_folder() / "features") / f"{key}.safetensors"
    labels = torch.from_numpy(np.ascontiguousarray(images.labels))
    cached = _read_cached(path)
    # the key covers the images; the length is checked against a damaged file
    if cached is not None and len(cached) == len(labels):
        log(f"features of {split}: {len(cached):,} x {cached.shape[1]}, from {path}")
        return cached, labels
    batches = predict_batches(
        lambda batch: model.pooled(model.forward_features(batch)),
        images,
        preprocess,
        batch_size=batch_size,
        device=device,
        workers=workers,
    )
    # cloned: a tensor of inference mode cannot take part in training
    features = _checked(torch.cat([pooled.cpu() for pooled, _ in batches]).clone())
    content = safetensors_writer({"features": features}, {})
    try:
        with replacing(path, needed=content.size) as temporary:
            content.write(temporary)
    except OutputError as error:  # the features themselves are fine
        log(f"the features of {split} cannot be cached: {error}")
    log(f"features of {split}: {len(features):,} x {features.shape[1]}, computed")
    return features, labels


def _checked(features: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
    """Return features that are finite; others are neither cached nor used."""
    refuse_not_finite(int((~features.isfinite().all(dim=1)).sum()), len(features))
    return features


def _read_cached(path: Path) -> Tensor | None:
    try:
        return safetensors.torch.load_file(path)["features"]
    except (OSError, SafetensorError, KeyError):
        return None


def _cache_key(model: ViT, dataset: Dataset, split: str, preprocess: Preprocess) -> str:
    """Hash all that the features depend on."""
    images = dataset.splits[split]
    inputs = [
        weights_fingerprint(model.state_dict(), without=HEADS),
        model.spec.to_json() | {"num_classes": 0},  # the head plays no part
        dataset.fingerprint,
        preprocess.to_json(),
        DECODER,
        PIL.__version__,  # its decoders decide the pixels
    ]
    key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode())
    for number in range(len(images)):
        key.update(f"{images.name(number)}\n".encode(errors="surrogateescape"))
    return key.hexdigest()[:32]
