"""lucidrains' `vit-pytorch`: `state_dict()` files of `ViT` and `SimpleViT`, of every era.

Up to 0.40.2 a patch goes through one matrix, `ViT`'s blocks are wrapped (`fn`), and the last norm
stands in the head, after pooling; 1.0 puts a LayerNorm on each side of that matrix; 1.4 drops the
wrapper and moves the last norm into the transformer; 1.16 takes the batch axis off tokens and
positions, and the class token out of models that pool by the mean. A model is written for the last
release that computes it, named in the safetensors header (`vit_pytorch_release`) beside the
constructor's arguments (`vit_pytorch`, JSON). Files of theirs say nothing of head width, of pooling
before 1.16, or of pixels.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from einops import rearrange

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.io.strict_json import parse
from vitkit.spec import ViTSpec
from vitkit.weights.converting.fold import Capabilities
from vitkit.weights.files.open import Header, Source
from vitkit.weights.formats.format import (
    CODE,
    PLAIN,
    SINGLE,
    Bundle,
    Format,
    Inferred,
    safetensors_file,
)
from vitkit.weights.formats.infer_spec import HALF, depth_of, finish, image_size
from vitkit.weights.formats.key_table import Parts, Table, Transform, row

PATCHES, LAYER, OURS = "to_patch_embedding.", "transformer.layers.{i}.", "blocks.{i}."
HEAD_WIDTH = 64
"""The constructor's default of `dim_head`."""
POOLED_FIRST = "last norm after pooling, as in vit-pytorch before 1.4"
OLD_PARTS = {
    "ViT": {
        "0.fn.to_qkv": "0.to_qkv", "0.fn.to_out.0": "0.to_out.0", "1.norm": "1.net.0",
        "1.fn.net.0": "1.net.1", "1.fn.net.3": "1.net.4", "mlp_head.0": "transformer.norm",
        "mlp_head.1": "mlp_head",
    },
    "SimpleViT": {"linear_head.0": "transformer.norm", "linear_head.1": "linear_head"},
}  # fmt: skip
"""Class -> its parts, or a block's, before 1.4 and what they are called since."""
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
"""Stem, positions, class token, pooling, whether the last norm comes first -> who computes it."""


def detect(header: Header) -> bool:
    """Patches go through `to_patch_embedding`, blocks are pairs in `transformer.layers`."""
    names, block = header.shapes, LAYER.format(i=0)
    return f"{PATCHES}1.weight" in names and any(name.startswith(f"{block}0.") for name in names)


def prepare(source: Source) -> Source:
    """The names before 1.4 become those since."""
    names = _renamed(source, OLD_PARTS["ViT"] | OLD_PARTS["SimpleViT"])
    notes = [POOLED_FIRST] if {"mlp_head.0.weight", "linear_head.0.weight"} & names.keys() else []
    return source.renamed(names, *notes)


def _renamed(names: Iterable[str], parts: Mapping[str, str]) -> dict[str, str]:
    """Each name and what it becomes where `parts` are called otherwise."""
    part = re.compile(r"^(transformer\.layers\.\d+\.|)(.+)(?=\.(?:weight|bias)$)")
    return {name: part.sub(lambda m: m[1] + parts.get(m[2], m[2]), name) for name in names}


def infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Sizes follow from shapes; the width of a head, pooling and pixels are as usual or told."""
    shapes = header.shapes
    simple, normed = "pos_embedding" not in shapes, f"{PATCHES}3.weight" in shapes
    class_token = not simple and shapes["cls_token"][-2] > 0
    told = {**_told(header, class_token), **overrides}
    width, values = shapes[f"{PATCHES}{2 if normed else 1}.weight"]
    channels, patch = _patch(values, told)
    block = LAYER.format(i=0)
    if not simple and f"{block}0.to_out.0.weight" not in shapes:
        told = {"num_heads": 1, **told}
    warnings = ["mean and std 0.5 are a guess: such files say nothing of how images are scaled"]
    size = told.get("image_size")
    if not simple:
        size = image_size(shapes["pos_embedding"][-2], int(class_token), patch, size)
    elif size is None:
        size = tuple(256 // side * side for side in patch)
        warnings.append(f"image_size {size} is a guess; say image_size= if it is another")
    pooling = told.get("pooling", "cls" if class_token else "mean")
    fields = {
        "image_size": size, "patch_size": patch, "in_channels": channels,
        "num_classes": shapes.get("linear_head.weight" if simple else "mlp_head.weight", (0,))[0],
        "width": width, "depth": depth_of(shapes, r"transformer\.layers\.(\d+)\."),
        **_heads(shapes[f"{block}0.to_qkv.weight"][0] // 3, width, told),
        "mlp_width": shapes[f"{block}1.net.1.weight"][0],
        "stem": "normed_linear" if normed else "convolution",
        "class_token": class_token, "positions": "sincos_2d" if simple else "learned",
        "norm_eps": 1e-5, "qkv_bias": False, "pooling": pooling,
        "norm_before_pool": pooling == "cls" or POOLED_FIRST not in header.notes,
    }  # fmt: skip
    usual = ["num_heads", "head_width", "norm_eps", "activation", "position_resampling",
             "image_size", "patch_size", "in_channels", "preprocess"]  # fmt: skip
    usual += ["pooling"] if class_token else []
    stored = told | {name: fields[name] for name in ("num_heads", "head_width") if name in told}
    return finish(fields, stored, HALF, usual=usual, warnings=tuple(warnings))


def _told(header: Header, class_token: bool) -> dict[str, Any]:
    """What our own files say of what shapes leave open."""
    try:
        arguments = dict(parse(header.metadata.get("vit_pytorch", "{}")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the header's vit_pytorch is no JSON object: {error}") from None
    ours = {"image_size": "image_size", "patch_size": "patch_size", "channels": "in_channels",
            "heads": "num_heads", "dim_head": "head_width", "pool": "pooling"}  # fmt: skip
    told = {ours[name]: value for name, value in arguments.items() if name in ours}
    if class_token and told.get("pooling") == "mean":
        told["pooling"] = "mean_all"
    return {name: tuple(v) if isinstance(v, list) else v for name, v in told.items()}


def _patch(values: int, told: Mapping[str, Any]) -> tuple[int, tuple[int, int]]:
    """Channels and patch (P, P) of a patch of so many values; 3 P^2 is never a square itself."""
    asked = told.get("patch_size")
    for channels in (told["in_channels"],) if "in_channels" in told else (3, 1):
        patch = asked or math.isqrt(values // channels)
        height, width = (patch, patch) if isinstance(patch, int) else patch
        if channels * height * width == values:
            return channels, (height, width)
    raise CheckpointError(
        f"{values} values a patch are not {asked or 'a square'} of 1 or 3 channels; say patch_size"
    )


def _heads(inner: int, width: int, told: Mapping[str, Any]) -> dict[str, Any]:
    """num_heads and head_width for all heads side by side; the latter is None at the default."""
    heads, head_width = told.get("num_heads"), told.get("head_width")
    head_width = head_width or (inner // heads if heads else HEAD_WIDTH)
    heads = heads or inner // head_width
    if heads * head_width != inner or not inner:
        raise CheckpointError(
            f"the heads are {inner} wide together, which {head_width} a head does not divide into "
            f"{heads}; say num_heads"
        )
    return {"num_heads": heads, "head_width": None if inner == width else head_width}


def release(spec: ViTSpec) -> tuple[int, int, int]:
    """A release whose classes compute this model, the last era's; `CheckpointError` for none."""
    stem = "convolution" if spec.stem == "linear" else spec.stem
    first = spec.norm_before_pool or spec.pooling == "cls"
    found = RELEASES.get((stem, spec.positions, spec.class_token, spec.pooling, first))
    if found is None:
        said = ("stem", "positions", "class_token", "pooling", "norm_before_pool")
        together = ", ".join(f"{name} = {getattr(spec, name)!r}" for name in said)
        raise CheckpointError(f"no release of vit-pytorch computes {together} in one model")
    return found


def _reordered(pattern: str, parts: Parts, spec: ViTSpec) -> Parts:
    (rows, columns), channels = spec.patch_size, spec.in_channels
    return (rearrange(parts[0], pattern, P=rows, Q=columns, C=channels),)


def _ordered(ours: str) -> Transform:
    """A patch's values, which theirs have by (row, column, channel), to our order and back."""
    there, back = f"... (P Q C) -> {ours}", f"{ours} -> ... (P Q C)"
    return Transform(partial(_reordered, there), partial(_reordered, back))


FLAT, KERNEL = _ordered("... (C P Q)"), _ordered("... C P Q")
BATCHED = Transform(
    lambda parts, spec: (parts[0].reshape(1, -1, spec.width),),
    lambda parts, spec: parts if release(spec) < (1, 16) else (parts[0][0],),
)
"""Tokens and positions with a batch axis, as theirs have it before 1.16."""
NO_TOKENS = Transform(lambda parts, spec: (), lambda parts, spec: (torch.zeros(0, spec.width),))
"""The class token (0, D) of models that pool by the mean."""


def _projection(kept: int) -> Transform:
    """The output projection, of which theirs has weight and bias, or the weight, or neither."""
    why = (
        "attn.proj is no identity, and ViT has none where its one head is as wide as the tokens",
        "attn.proj.bias is not zero, and SimpleViT's to_out has no bias",
    )

    def whole(parts: Parts, spec: ViTSpec) -> Parts:
        return (*parts, *(torch.eye(spec.width), torch.zeros(spec.width))[kept:])

    def back(parts: Parts, spec: ViTSpec) -> Parts:
        if not all(map(torch.equal, parts, whole(parts[:kept], spec))):
            raise CheckpointError(why[kept])
        return parts[:kept]

    return Transform(whole, back)


def table(spec: ViTSpec) -> Table:
    """By the names since 1.4; without positions in the file it is a `SimpleViT`.

    Raises:
        CheckpointError: what its classes never compute.
    """
    simple, normed = spec.positions != "learned", spec.stem == "normed_linear"
    if spec.class_token and spec.pooling == "mean":
        raise CheckpointError("with a class token its mean is of all tokens: pooling 'mean_all'")
    matrix, head, second, to_out = 2 if normed else 1, "mlp_head", 4, ["0.weight", "0.bias"]
    if simple:
        head, second, to_out = "linear_head", 3, ["weight"]
    elif (spec.num_heads, spec.attention_width) == (1, spec.width):
        to_out = []
    projection = [f"{OURS}attn.proj.weight", f"{OURS}attn.proj.bias"]
    return Table((
        row("pos_embedding", "pos_embed", BATCHED),
        row("cls_token", "cls_token", BATCHED),
        *([] if simple or spec.class_token else [row("cls_token", (), NO_TOKENS)]),
        row(f"{PATCHES}1.{{p}}", "patch_embed.norm_patches.{p}", FLAT),
        row(f"{PATCHES}{matrix}.weight", "patch_embed.proj.weight", FLAT if normed else KERNEL),
        row(f"{PATCHES}{matrix}.bias", "patch_embed.proj.bias"),
        row(f"{PATCHES}3.{{p}}", "patch_embed.norm.{p}"),
        row(f"{LAYER}0.norm.{{p}}", f"{OURS}norm1.{{p}}"),
        row(f"{LAYER}0.to_qkv.weight", f"{OURS}attn.qkv.weight"),
        row([f"{LAYER}0.to_out.{p}" for p in to_out], projection, _projection(len(to_out))),
        row(f"{LAYER}1.net.0.{{p}}", f"{OURS}norm2.{{p}}"),
        row(f"{LAYER}1.net.1.{{p}}", f"{OURS}mlp.fc1.{{p}}"),
        row(f"{LAYER}1.net.{second}.{{p}}", f"{OURS}mlp.fc2.{{p}}"),
        row("transformer.norm.{p}", "norm.{p}"),
        row("transformer.norm.{p}", "fc_norm.{p}"),
        row(f"{head}.{{p}}", "head.{p}"),
    ))  # fmt: skip


FIXED: dict[str, Any] = {
    **{name: values for name, values in PLAIN.items() if name != "head_width"},
    **SINGLE, "norm_eps": (1e-5,), "qkv_bias": (False,), "representation_width": (None,),
}  # fmt: skip
"""What all of its classes compute; any value of the fields that no class names fits."""
HOLDS: tuple[Capabilities, ...] = tuple(
    {
        **FIXED, "stem": (stem, "linear") if stem == "convolution" else (stem,),
        "positions": (positions,), "class_token": (class_token,), "pooling": (pooling,),
        "norm_before_pool": (first,),
    }
    for stem, positions, class_token, pooling, first in RELEASES
)  # fmt: skip
"""The classes of each era."""


def write(bundle: Bundle) -> dict[str, FileWriter]:
    """`model.safetensors` with the names of its release, and the constructor's arguments."""
    spec, era = bundle.spec, release(bundle.spec)
    name = "ViT" if spec.positions == "learned" else "SimpleViT"
    number = ".".join(map(str, era))
    if not spec.num_classes and (name == "SimpleViT" or era < (1, 17)):
        raise CheckpointError(f"{name} of {number} always has a head; num_classes must be >= 1")
    if era < (1, 4):
        names = _renamed(bundle.tensors, {new: old for old, new in OLD_PARTS[name].items()})
        bundle = replace(bundle, tensors={names[n]: t for n, t in bundle.tensors.items()})
    sizes = {"image_size": spec.image_size, "patch_size": spec.patch_size}
    arguments = {  # one number for a square: JSON makes a pair a list, which they do not take
        "class": name, **{key: s[0] if s[0] == s[1] else s for key, s in sizes.items()},
        "channels": spec.in_channels, "dim": spec.width, "depth": spec.depth,
        "heads": spec.num_heads, "dim_head": spec.attention_width // spec.num_heads,
        "mlp_dim": spec.mlp_width, "num_classes": spec.num_classes,
    }  # fmt: skip
    if name == "ViT":
        arguments["pool"] = "cls" if spec.pooling == "cls" else "mean"
    metadata = {"vit_pytorch": json.dumps(arguments), "vit_pytorch_release": number}
    return {"model.safetensors": safetensors_file(bundle, metadata)}


FORMAT = Format("lucidrains", detect, prepare, infer, table, HOLDS, write, CODE)
