"""The checkpoint that `vitkit explain` explains, on its device."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitkit.weights.checkpoint import Checkpoint


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
