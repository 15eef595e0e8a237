"""vit-pytorch's ViT of the first paper, by the classes of its current release."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from vitkit.weights.formats.format import weights_file
from vitkit.weights.formats.lucidrains import ARGUMENTS_KEY, OLD_PARTS, renamed_parts

NOTE = "without the two norms around its patch projection"
"""The change of the library's model, for tables."""
NORMS = (1, 3)
"""Places in `to_patch_embedding` of the norms that releases from 1.0 on have."""


def vit_without_patch_norms(path: Path, norm_eps: float) -> nn.Module | None:
    """Return vit-pytorch's `ViT` without the two norms of its patches, with the weights of a file.

    Releases from 1.0 on have these norms, which neither the first paper nor another library has, so
    that no class of them computes a model of the others. Without them it does, and a little faster
    than as released. Its norms get the epsilon of the model, too: theirs is fixed to 1e-5. All else
    is the library's own code.

    Args:
        path: folder with a file in the format `lucidrains`, of release 0.40.2.
        norm_eps: epsilon of all norms.

    Returns:
        The model in eval mode; None for a model of another class.
    """
    library: Any = importlib.import_module("vit_pytorch")
    file = weights_file(path)
    with safe_open(file, framework="pt") as opened:
        arguments = json.loads(opened.metadata()[ARGUMENTS_KEY])
    if arguments.pop("class") != "ViT":
        return None
    for name, value in arguments.items():
        if isinstance(value, list):  # JSON has no tuples
            arguments[name] = tuple(value)
    with torch.device("meta"):
        model: Any = library.ViT(**arguments)
    for place in NORMS:
        model.to_patch_embedding[place] = nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = norm_eps
    tensors = load_file(file)
    names = renamed_parts(tensors, OLD_PARTS["ViT"])
    weights = {names[name]: tensor for name, tensor in tensors.items()}
    for part in ("weight", "bias"):
        weights[f"to_patch_embedding.2.{part}"] = weights.pop(f"to_patch_embedding.1.{part}")
    for name in ("cls_token", "pos_embedding"):
        weights[name] = weights[name].squeeze(0)  # with a batch axis before 1.16
    model.load_state_dict(weights, assign=True)
    found: nn.Module = model.eval()
    return found
