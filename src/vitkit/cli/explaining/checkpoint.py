"""The checkpoint that `vitkit explain` explains, on its device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitkit.models.vit import ViT
    from vitkit.weights.checkpoint import Checkpoint


def model_of_passes(checkpoint: Checkpoint, engine: str, precision: str) -> ViT | None:
    """Return the model for forward passes alone, or None for the checkpoint's own.

    Args:
        checkpoint: with the model on its device.
        engine: torch, or auto: the same model with folds and the fastest kernels.
        precision: float32 or bfloat16.
    """
    if engine == "torch" and precision == "float32":
        return None
    from vitkit.engines.inference_folds import optimized

    model: ViT = optimized(checkpoint.model, precision=precision, measure=engine == "auto")
    return model


def load_on_device(checkpoint: str, class_name: str | None, device: str) -> Checkpoint:
    """Return the checkpoint with its model on the device; `SettingError` for a wrong class."""
    from vitkit.devices import on_device, resolve_device
    from vitkit.explaining.explain import find_class
    from vitkit.weights.load import load

    loaded = load(checkpoint)
    if class_name is not None:
        find_class(loaded, class_name)  # before the first image is read
    # moved once, not for every image
    return replace(loaded, model=on_device(loaded.model, resolve_device(device)))
