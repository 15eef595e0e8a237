"""lucidrains' `vit-pytorch`: `state_dict()` files of `ViT` and `SimpleViT`, of two releases.

Up to 0.40.2, the last release with a plain ViT, a patch goes through one matrix, `ViT`'s blocks are
wrapped (`fn`), tokens and positions have a batch axis, and the last norm is in the head, after
pooling. The newest release has a LayerNorm on each side of that matrix, no wrapper, the last norm
in the transformer, and no class token in models that pool by the mean.

A file is written for the release that computes the model, named in the safetensors header beside
the constructor's arguments. Files of theirs contain nothing on head width, on pooling up to 0.40.2,
or on preprocessing.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.io.results import parse_json
from vitkit.spec import ViTSpec
from vitkit.weights.formats.format import (
    CLASS_TOKEN_ONLY,
    FIRST_PAPER,
    FIXED_BY_CODE,
    WEIGHTS_FILE,
    BuiltModel,
    Bundle,
    Capabilities,
    Format,
    ReferenceLibrary,
    bundle_writer,
    weights_file,
)
from vitkit.weights.formats.infer_spec import (
    HALF_MEAN,
    Inferred,
    as_pair,
    depth_of,
    finish,
    how_to_state,
    image_size,
)
from vitkit.weights.formats.key_table import KeyTransform, Table, TensorParts, row
from vitkit.weights.tensor_file import Header, Source

ARGUMENTS_KEY = "vit_pytorch"
"""Entry of the safetensors header with the constructor's arguments, JSON."""
RELEASE_KEY = "vit_pytorch_release"
"""Entry of the safetensors header with the release that computes the model."""
OLDEST_TESTED = (1, 16, 1)
PLAIN, NEWEST = "0.40.2", "1.17.3"
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
"""Class -> names of its parts, or a block's, up to 0.40.2 -> in the newest release."""
CLASSES = (
    ("convolution", "learned", True, "cls", True),
    ("convolution", "learned", True, "mean_all", False),
    ("convolution", "sincos_2d", False, "mean", False),
    ("normed_linear", "learned", True, "cls", True),
    ("normed_linear", "learned", False, "mean", True),
    ("normed_linear", "sincos_2d", False, "mean", True),
)
"""Stem, positions, class token, pooling, last norm before pooling of the models of both releases:
those with the stem "convolution" are of `PLAIN`, the others of `NEWEST`."""
_PATCHES = "to_patch_embedding."
_THEIRS = "transformer.layers.{i}."
_OURS = "blocks.{i}."
_HEAD_WIDTH = 64
"""The constructor's default of `dim_head`."""
_NORM_AFTER_POOLING = "last norm after pooling, as in vit-pytorch up to 0.40.2"
"""A note of `_prepare`, which `_infer` reads."""
_SPEC_FIELDS = {
    "image_size": "image_size",
    "patch_size": "patch_size",
    "channels": "in_channels",
    "heads": "num_heads",
    "dim_head": "head_width",
    "pool": "pooling",
}
"""Keyword of their constructor -> our spec field."""


def _release(spec: ViTSpec) -> str:
    """Return the release whose classes compute this model.

    Raises:
        CheckpointError: none does.
    """
    stem = "convolution" if spec.stem == "linear" else spec.stem
    # For one token, a norm before pooling and one after it are the same.
    norm_first = spec.norm_before_pool or spec.pooling == "cls"
    if (stem, spec.positions, spec.class_token, spec.pooling, norm_first) not in CLASSES:
        names = ("stem", "positions", "class_token", "pooling", "norm_before_pool")
        together = ", ".join(f"{name} = {getattr(spec, name)!r}" for name in names)
        raise CheckpointError(
            f"neither {PLAIN} nor {NEWEST} of vit-pytorch computes {together} in one model"
        )
    return PLAIN if stem == "convolution" else NEWEST


def _renamed_parts(names: Iterable[str], parts: Mapping[str, str]) -> dict[str, str]:
    """Return each name -> the same name with `parts` renamed."""
    pattern = re.compile(r"^(transformer\.layers\.\d+\.|)(.+)(?=\.(?:weight|bias)$)")
    return {
        name: pattern.sub(lambda match: match[1] + parts.get(match[2], match[2]), name)
        for name in names
    }


def _detect(header: Header) -> bool:
    """Return True for `to_patch_embedding` and blocks that are pairs in `transformer.layers`."""
    names = header.shapes
    block = _THEIRS.format(i=0)
    return f"{_PATCHES}1.weight" in names and any(name.startswith(f"{block}0.") for name in names)


def _prepare(source: Source) -> Source:
    """Rename the parts of 0.40.2 as in the newest release.

    Raises:
        CheckpointError: a file of a release between them.
    """
    names = _renamed_parts(source, OLD_PARTS["ViT"] | OLD_PARTS["SimpleViT"])
    # Up to 0.40.2 the head was a Sequential of norm and layer: its norm is the model's last one.
    norm_in_head = bool(names.keys() & {"mlp_head.0.weight", "linear_head.0.weight"})
    batch_axis = len(source.header.shapes.get("cls_token", ())) == 3
    if f"{_PATCHES}3.weight" in names and (norm_in_head or batch_axis):
        raise CheckpointError(
            f"releases 1.0 to 1.15 of vit-pytorch are not read, only those up to {PLAIN} and from "
            "1.16 on; examples/research/lucidrains_eras.py converts it"
        )
    if norm_in_head:
        return source.renamed(names, _NORM_AFTER_POOLING)
    return source.renamed(names)


_USUAL = (
    "num_heads", "head_width", "norm_eps", "activation", "position_resampling", "image_size",
    "patch_size", "in_channels", "preprocess",
)  # fmt: skip
"""Fields that the file does not state."""


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer sizes from shapes; head width, pooling and preprocessing are usual or given."""
    shapes = header.shapes
    is_simple = "pos_embedding" not in shapes
    is_normed = f"{_PATCHES}3.weight" in shapes
    # In the newest release, models that pool by the mean have an empty token (0, D).
    class_token = not is_simple and shapes["cls_token"][-2] > 0
    given = {**_stated_fields(header, class_token), **overrides}
    # A norm comes first where the projection has one on each side.
    width, values = shapes[f"{_PATCHES}{1 + is_normed}.weight"]
    channels, patch = _channels_and_patch(values, given)
    block = _THEIRS.format(i=0)
    if not is_simple and f"{block}0.to_out.0.weight" not in shapes:
        given = {"num_heads": 1, **given}  # only a single head goes without projection
    warnings = [
        "mean and std 0.5 are a guess: files of this format do not state how images are normalised"
    ]
    size = given.get("image_size")
    if not is_simple:
        size = image_size(shapes["pos_embedding"][-2], int(class_token), patch, size)
    elif size is None:
        size = tuple(256 // side * side for side in patch)  # 256 is the size in its README
        warnings.append(
            f"image_size {size} is a guess; if it is another, {how_to_state('image_size')}"
        )
    pooling = given.get("pooling", "cls" if class_token else "mean")
    head = "linear_head.weight" if is_simple else "mlp_head.weight"
    fields = {
        "image_size": size,
        "patch_size": patch,
        "in_channels": channels,
        "num_classes": shapes.get(head, (0,))[0],
        "width": width,
        "depth": depth_of(shapes, r"transformer\.layers\.(\d+)\."),
        **_head_fields(shapes[f"{block}0.to_qkv.weight"][0] // 3, width, given),
        "mlp_width": shapes[f"{block}1.net.1.weight"][0],
        "stem": "normed_linear" if is_normed else "convolution",
        "class_token": class_token,
        "positions": "sincos_2d" if is_simple else "learned",
        "norm_eps": 1e-5,
        "qkv_bias": False,
        "pooling": pooling,
        "norm_before_pool": pooling == "cls" or _NORM_AFTER_POOLING not in header.notes,
    }
    usual = [*_USUAL, "pooling"] if class_token else list(_USUAL)
    for name in ("num_heads", "head_width"):
        if name in given:
            given[name] = fields[name]
    return finish(fields, given, HALF_MEAN, usual=usual, warnings=tuple(warnings))


def _stated_fields(header: Header, class_token: bool) -> dict[str, Any]:
    """Return the spec fields in the header, which only files written by vitkit have."""
    try:
        arguments = dict(parse_json(header.metadata.get(ARGUMENTS_KEY, "{}")))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"the header's vit_pytorch is not a JSON object: {error}") from None
    fields: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _SPEC_FIELDS:
            if isinstance(value, list):
                value = tuple(value)
            fields[_SPEC_FIELDS[name]] = value
    # With a class token, vit-pytorch's "mean" includes that token.
    if class_token and fields.get("pooling") == "mean":
        fields["pooling"] = "mean_all"
    return fields


def _channels_and_patch(values: int, given: Mapping[str, Any]) -> tuple[int, tuple[int, int]]:
    """Return channels and patch size of a patch with this number of values.

    A square patch decides the channels: 3 P^2 is never a square itself.
    """
    # values = C * P * P: a matrix of patches does not say how they divide.
    requested = given.get("patch_size")
    candidates = (given["in_channels"],) if "in_channels" in given else (3, 1)
    for channels in candidates:
        patch = requested or math.isqrt(values // channels)
        height, width = as_pair(patch)
        if channels * height * width == values:
            return channels, (height, width)
    raise CheckpointError(
        f"{values} values per patch are not {requested or 'a square'} of 1 or 3 channels; "
        f"{how_to_state('patch_size')}"
    )


def _head_fields(inner: int, width: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return num_heads and head_width (None at the default) of heads that are `inner` wide."""
    # inner = k * h is all that the tensors show.
    heads = given.get("num_heads")
    head_width = given.get("head_width")
    if not head_width:
        head_width = inner // heads if heads else _HEAD_WIDTH
    heads = heads or inner // head_width
    if heads * head_width != inner or not inner:
        raise CheckpointError(
            f"all heads together have width {inner}, which {head_width} per head does not divide "
            f"into {heads}; {how_to_state('num_heads')}"
        )
    return {"num_heads": heads, "head_width": None if inner == width else head_width}


def _reordered(pattern: str, parts: TensorParts, spec: ViTSpec) -> TensorParts:
    rows, columns = spec.patch_size
    return (rearrange(parts[0], pattern, P=rows, Q=columns, C=spec.in_channels),)


def _ordered(ours: str) -> KeyTransform:
    """Return the transform of a patch's values, which theirs have by (row, column, channel)."""
    theirs = "... (P Q C)"
    return KeyTransform(
        partial(_reordered, f"{theirs} -> {ours}"), partial(_reordered, f"{ours} -> {theirs}")
    )


_FLAT_PATCH = _ordered("... (C P Q)")
_PATCH_KERNEL = _ordered("... C P Q")
_BATCH_AXIS = KeyTransform(  # tokens and positions have a batch axis up to 0.40.2
    lambda parts, spec: (parts[0].reshape(1, -1, spec.width),),
    lambda parts, spec: parts if _release(spec) == PLAIN else (parts[0][0],),
)
_EMPTY_TOKEN = KeyTransform(  # the class token (0, D) of models that pool by the mean
    lambda parts, spec: (), lambda parts, spec: (torch.zeros(0, spec.width),)
)


def _projection(stored: int) -> KeyTransform:
    """Return the transform of the output projection's weight and bias.

    Args:
        stored: the number of the two that theirs has: none where the one head is as wide as the
            tokens, the weight in `SimpleViT`, both else. The others are identity and zero.
    """
    errors = (
        "attn.proj is not an identity, and ViT has no such layer where its one head is as wide as "
        "the tokens; convert to another format",
        "attn.proj.bias is not zero, and SimpleViT's to_out has no bias; convert to another format",
    )

    def complete(parts: TensorParts, spec: ViTSpec) -> TensorParts:
        defaults = (torch.eye(spec.width), torch.zeros(spec.width))
        return (*parts, *defaults[stored:])

    def reduce(parts: TensorParts, spec: ViTSpec) -> TensorParts:
        if not all(map(torch.equal, parts, complete(parts[:stored], spec))):
            raise CheckpointError(errors[stored])
        return parts[:stored]

    return KeyTransform(complete, reduce)


def _table(spec: ViTSpec) -> Table:
    """Return the table with the newest names; a file without positions is a `SimpleViT`.

    Raises:
        CheckpointError: a model that its classes never compute.
    """
    is_simple = spec.positions != "learned"
    is_normed = spec.stem == "normed_linear"
    if spec.class_token and spec.pooling == "mean":
        raise CheckpointError("with a class token its mean is over all tokens: pooling 'mean_all'")
    if is_simple:
        head, fc2, to_out = "linear_head", 3, ["weight"]
    else:
        # ViT has dropouts that SimpleViT lacks, so its layers have other numbers.
        head, fc2, to_out = "mlp_head", 4, ["0.weight", "0.bias"]
        if (spec.num_heads, spec.attention_width) == (1, spec.width):
            to_out = []
    matrix = f"{_PATCHES}{1 + is_normed}."
    kernel = _FLAT_PATCH if is_normed else _PATCH_KERNEL
    projection = [f"{_OURS}attn.proj.weight", f"{_OURS}attn.proj.bias"]
    rows = [row("pos_embedding", "pos_embed", _BATCH_AXIS)]
    rows.append(row("cls_token", "cls_token", _BATCH_AXIS))
    if not is_simple and not spec.class_token:
        rows.append(row("cls_token", (), _EMPTY_TOKEN))
    rows += [
        row(f"{_PATCHES}1.{{p}}", "patch_embed.norm_patches.{p}", _FLAT_PATCH),
        row(f"{matrix}weight", "patch_embed.proj.weight", kernel),
        row(f"{matrix}bias", "patch_embed.proj.bias"),
        row(f"{_PATCHES}3.{{p}}", "patch_embed.norm.{p}"),
        row(f"{_THEIRS}0.norm.{{p}}", f"{_OURS}norm1.{{p}}"),
        row(f"{_THEIRS}0.to_qkv.weight", f"{_OURS}attn.qkv.weight"),
        row([f"{_THEIRS}0.to_out.{p}" for p in to_out], projection, _projection(len(to_out))),
        row(f"{_THEIRS}1.net.0.{{p}}", f"{_OURS}norm2.{{p}}"),
        row(f"{_THEIRS}1.net.1.{{p}}", f"{_OURS}mlp.fc1.{{p}}"),
        row(f"{_THEIRS}1.net.{fc2}.{{p}}", f"{_OURS}mlp.fc2.{{p}}"),
        # One of the two applies: a model's last norm is before pooling or after it.
        row("transformer.norm.{p}", "norm.{p}"),
        row("transformer.norm.{p}", "fc_norm.{p}"),
        row(f"{head}.{{p}}", "head.{p}"),
    ]
    return Table(tuple(rows))


def _constructor_arguments(spec: ViTSpec) -> dict[str, Any]:
    """Return the class and its keywords for a model, as JSON values; a square is one number."""
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
    """Build the model by the constructor's arguments in the file's header."""
    if _release(spec) == PLAIN:
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
    else:  # kept beside its parameters, so it is computed once more
        simple_vit: Any = importlib.import_module("vit_pytorch.simple_vit")
        model.pos_embedding = simple_vit.posemb_sincos_2d(*spec.grid, spec.width)
    model.load_state_dict(load_file(weights_file(path)), assign=True)
    # A block has no module of its own: it ends with the sum of its MLP's input and output.
    mlps = [mlp for _, mlp in model.transformer.layers]
    return BuiltModel(model, mlps, tokens=lambda inputs, output: inputs + output)


def _write(bundle: Bundle) -> dict[str, FileWriter]:
    """Return one file with the names of its release, and the constructor's arguments.

    Raises:
        CheckpointError: no head, for a release whose class always has one.
    """
    spec = bundle.spec
    release = _release(spec)
    arguments = _constructor_arguments(spec)
    class_name = arguments["class"]
    if not spec.num_classes and (class_name == "SimpleViT" or release == PLAIN):
        raise CheckpointError(
            f"{class_name} of {release} always has a head; num_classes must be 1 or more"
        )
    # The table has only the newest names.
    if release == PLAIN:
        old_parts = {new: old for old, new in OLD_PARTS[class_name].items()}
        names = _renamed_parts(bundle.tensors, old_parts)
        tensors = {names[name]: tensor for name, tensor in bundle.tensors.items()}
        bundle = replace(bundle, tensors=tensors)
    metadata = {ARGUMENTS_KEY: json.dumps(arguments), RELEASE_KEY: release}
    return {WEIGHTS_FILE: bundle_writer(bundle, metadata)}


_SHARED: dict[str, Any] = {
    **{name: values for name, values in FIRST_PAPER.items() if name != "head_width"},
    **CLASS_TOKEN_ONLY,
    "norm_eps": (1e-5,),
    "qkv_bias": (False,),
    "representation_width": (None,),
}
_CAPABILITIES: tuple[Capabilities, ...] = tuple(
    {
        **_SHARED,
        "stem": (stem, "linear") if stem == "convolution" else (stem,),
        "positions": (positions,),
        "class_token": (class_token,),
        "pooling": (pooling,),
        "norm_before_pool": (norm_first,),
    }
    for stem, positions, class_token, pooling, norm_first in CLASSES
)
LUCIDRAINS = Format(
    name="lucidrains",
    detect=_detect,
    prepare=_prepare,
    infer=_infer,
    table=_table,
    capabilities=_CAPABILITIES,
    write=_write,
    fixed=FIXED_BY_CODE,
    reference=ReferenceLibrary("vit-pytorch", OLDEST_TESTED, ("vit_pytorch",), _build),
)
