"""timm's own models of its files, to verify what vitkit writes."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vitkit.io.strict_json import read_json
from vitkit.spec import ViTSpec
from vitkit.weights.formats.format import BuiltModel, ReferenceLibrary, weights_file


def filled_timm_model(path: Path, make: Callable[[], Any]) -> BuiltModel:
    """Return a model of timm with the weights of a folder or file.

    Args:
        path: the folder or file.
        make: calls timm's constructor; it runs on the meta device.
    """
    models: Any = importlib.import_module("timm.models")
    # timm draws its initial values in the constructor, which takes seconds for a large model.
    with torch.device("meta"):
        model = make()
    model.to_empty(device="cpu")  # allocates the buffers that no file has
    model.load_state_dict(models.load_state_dict(str(weights_file(path))), assign=True)
    for module in model.modules():
        if hasattr(module, "init_non_persistent_buffers"):
            module.init_non_persistent_buffers()
    return BuiltModel(model, model.blocks)


def _build(path: Path, spec: ViTSpec) -> BuiltModel | None:
    """Build the model by `config.json`, as `timm.create_model("local-dir:FOLDER")` reads it."""
    timm: Any = importlib.import_module("timm")
    if "architecture" not in read_json(path / "config.json"):
        return None
    return filled_timm_model(path, lambda: timm.create_model(f"local-dir:{path}"))


TIMM_LIBRARY = ReferenceLibrary("timm", (1, 0, 29), ("timm",), _build)
