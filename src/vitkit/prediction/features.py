"""Pooled features of images, the inputs of a classifier's head."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Float

from vitkit.devices import on_device, resolve_device
from vitkit.prediction.predictor import Images, Predictor
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint


def feature_predictor(
    checkpoint: Checkpoint, *, device: str = "auto", batch_size: int = 64
) -> Predictor:
    """Create a predictor whose outputs are the pooled features, the inputs of the head: (D,).

    Args:
        checkpoint: a checkpoint; its head is not used.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        batch_size: images per batch.

    Raises:
        DeviceError: a device that does not exist here.
        SettingError: a batch size below 1.
    """
    model_device = resolve_device(device)
    model = on_device(checkpoint.model, model_device)
    dtype = next(model.parameters()).dtype
    return Predictor(
        # (B, C, H, W) -> (B, D), before the head
        lambda images: model.pooled(model.forward_features(images.to(dtype))),
        checkpoint.preprocess,
        device=model_device,
        batch_size=batch_size,
    )


def embed(
    checkpoint: Checkpoint | str | Path,
    images: Images,
    *,
    device: str = "auto",
    batch_size: int = 64,
) -> Float[np.ndarray, "N D"]:
    """Return the pooled features of images, the inputs of the head: (N, D) float32.

    Args:
        checkpoint: a checkpoint or its path.
        images: as for a call of `Predictor`.
        device: `cpu`, `cuda`, `mps`; auto picks the fastest available.
        batch_size: images per batch.

    Raises:
        ImageError, DataError, CheckpointError, DeviceError, SettingError: the message names the
            wrong value.
    """
    predictor = feature_predictor(as_checkpoint(checkpoint), device=device, batch_size=batch_size)
    return predictor.logits(images).numpy()
