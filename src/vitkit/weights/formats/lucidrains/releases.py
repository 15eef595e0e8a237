"""Releases of `vit-pytorch`, and the names and constructor arguments of each era.

Up to 0.40.2 a patch goes through one matrix, `ViT`'s blocks are wrapped (`fn`), and the last norm
is in the head, after pooling; 1.0 puts a LayerNorm on each side of that matrix; 1.4 drops the
wrapper and moves the last norm into the transformer; 1.16 takes the batch axis off tokens and
positions, and the class token out of models that pool by the mean.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from vitkit.errors import CheckpointError
from vitkit.spec import ViTSpec
from vitkit.weights.formats.format import BuiltModel, ReferenceLibrary, weights_file

ARGUMENTS_KEY = "vit_pytorch"
"""Entry of the safetensors header with the constructor's arguments, JSON."""
RELEASE_KEY = "vit_pytorch_release"
"""Entry of the safetensors header with the release that computes the model."""
OLDEST_TESTED = (1, 16, 1)
OLD_PARTS = {
    "ViT": {
        "0.fn.to_qkv": "0.to_qkv",
        "0.fn.to_out.0": "0.to_out.0",
        "1.norm": "1.net.0",
        "1.fn.net.0": "1.net.1",
        "1.fn.net.3": "1.net.4",
        "mlp_head.0": "transformer.norm",
        "mlp_head.1": "mlp_head",
    },
    "SimpleViT": {"linear_head.0": "transformer.norm", "linear_head.1": "linear_head"},
}
"""Class -> names of its parts, or a block's, before 1.4 -> their names since."""
RELEASES = {
    ("convolution", "learned", True, "cls", True): (0, 40, 2),
    ("convolution", "learned", True, "mean_all", False): (0, 40, 2),
    ("convolution", "sincos_2d", False, "mean", False): (0, 40, 2),
    ("normed_linear", "learned", True, "mean_all", False): (1, 2, 9),
    ("normed_linear", "sincos_2d", False, "mean", False): (1, 2, 9),
    ("normed_linear", "learned", True, "mean_all", True): (1, 15, 7),
    ("normed_linear", "learned", True, "cls", True): (1, 17, 3),
    ("normed_linear", "learned", False, "mean", True): (1, 17, 3),
    ("normed_linear", "sincos_2d", False, "mean", True): (1, 17, 3),
}
"""Stem, positions, class token, pooling, last norm before pooling -> the release for it."""


def release(spec: ViTSpec) -> tuple[int, int, int]:
    """Return a release whose classes compute this model, the last era's.

    Raises:
        CheckpointError: no release does.
    """
    stem = "convolution" if spec.stem == "linear" else spec.stem
    # For one token, a norm before pooling and one after it are the same.
    norm_first = spec.norm_before_pool or spec.pooling == "cls"
    key = (stem, spec.positions, spec.class_token, spec.pooling, norm_first)
    if key not in RELEASES:
        names = ("stem", "positions", "class_token", "pooling", "norm_before_pool")
        together = ", ".join(f"{name} = {getattr(spec, name)!r}" for name in names)
        raise CheckpointError(f"no release of vit-pytorch computes {together} in one model")
    return RELEASES[key]


def renamed_parts(names: Iterable[str], parts: Mapping[str, str]) -> dict[str, str]:
    """Return each name -> the same name with `parts` renamed."""
    pattern = re.compile(r"^(transformer\.layers\.\d+\.|)(.+)(?=\.(?:weight|bias)$)")
    return {
        name: pattern.sub(lambda match: match[1] + parts.get(match[2], match[2]), name)
        for name in names
    }


def constructor_arguments(spec: ViTSpec) -> dict[str, Any]:
    """Return the class and its keywords for a model, as JSON values.

    Sizes are one number for a square: JSON makes a pair a list, which the classes do not take.
    """
    # SimpleViT computes its positions and has no class token.
    is_vit = spec.positions == "learned"
    arguments: dict[str, Any] = {
        "class": "ViT" if is_vit else "SimpleViT",
        "image_size": _one_or_two(spec.image_size),
        "patch_size": _one_or_two(spec.patch_size),
        "channels": spec.in_channels,
        "dim": spec.width,
        "depth": spec.depth,
        "heads": spec.num_heads,
        "dim_head": spec.attention_width // spec.num_heads,
        "mlp_dim": spec.mlp_width,
        "num_classes": spec.num_classes,
    }
    if is_vit:
        arguments["pool"] = "cls" if spec.pooling == "cls" else "mean"
    return arguments


def _one_or_two(sides: tuple[int, int]) -> int | tuple[int, int]:
    return sides[0] if sides[0] == sides[1] else sides


def _build(path: Path, spec: ViTSpec) -> BuiltModel | None:
    """Build the model by the constructor's arguments in the file's header.

    `SimpleViT` keeps its positions beside its parameters, so they are computed once more.
    """
    if release(spec) < OLDEST_TESTED:
        return None
    library: Any = importlib.import_module("vit_pytorch")
    with safe_open(weights_file(path), framework="pt") as file:
        arguments = json.loads(file.metadata()[ARGUMENTS_KEY])
    make = getattr(library, arguments.pop("class"))
    # JSON has no tuples, and the constructor takes no lists.
    for name, value in arguments.items():
        if isinstance(value, list):
            arguments[name] = tuple(value)
    with torch.device("meta"):
        model = make(**arguments)
    if isinstance(model.pos_embedding, nn.Parameter):
        if not spec.num_classes:  # its constructor always makes a head
            model.mlp_head = nn.Identity()
    else:
        simple_vit: Any = importlib.import_module("vit_pytorch.simple_vit")
        model.pos_embedding = simple_vit.posemb_sincos_2d(*spec.grid, spec.width)
    model.load_state_dict(load_file(weights_file(path)), assign=True)
    # A block has no module of its own: it ends with the sum of its MLP's input and output.
    mlps = [mlp for _, mlp in model.transformer.layers]
    return BuiltModel(model, mlps, tokens=lambda inputs, output: inputs + output)


VIT_PYTORCH = ReferenceLibrary("vit-pytorch", OLDEST_TESTED, ("vit_pytorch",), _build)
