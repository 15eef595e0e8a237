"""lucidrains' `vit-pytorch`: `state_dict()` files of `ViT` and `SimpleViT`, of two releases.

Up to 0.40.2, the last release with a plain ViT, a patch goes through one matrix, `ViT`'s blocks are
wrapped (`fn`), tokens and positions have a batch axis, and the last norm is in the head, after
pooling. The newest release has a LayerNorm on each side of that matrix, no wrapper, the last norm
in the transformer, and no class token in models that pool by the mean.

A file is written for the release that computes the model, named in the safetensors header beside
the constructor's arguments. Files of theirs contain nothing on head width, on pooling up to 0.40.2,
or on preprocessing.
"""

import importlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.spec import ViTSpec
from vitkit.weights import checkpoint, files
from vitkit.weights.formats import format as shared
from vitkit.weights.formats.format import Bundle, Format, Inferred
from vitkit.weights.formats.keys import BLOCK, Parts, Table, Transform, each, renamed, row

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
_HEAD_WIDTH = 64
"""The constructor's default of `dim_head`."""
_NORM_AFTER_POOLING = "last norm after pooling, as in vit-pytorch up to 0.40.2"
"""A note of `_prepare`, which `_infer` reads."""
_STATED = ("num_heads", "head_width", "patch_size", "in_channels", "pooling")
"""Spec fields that a file written by vitkit states, and the tensors do not show."""


def _is_plain(spec: ViTSpec) -> bool:
    """Return True for a model of `PLAIN`, False for one of `NEWEST`."""
    return spec.stem != "normed_linear"


def _renamed_parts(names: Iterable[str], parts: Mapping[str, str]) -> dict[str, str]:
    """Return each name -> the same name with `parts` renamed."""
    pattern = re.compile(r"^(transformer\.layers\.\d+\.|)(.+)(?=\.(?:weight|bias)$)")
    return {
        name: pattern.sub(lambda match: match[1] + parts.get(match[2], match[2]), name)
        for name in names
    }


def _detect(header: files.Header) -> bool:
    """Return True for `to_patch_embedding` and blocks that are pairs in `transformer.layers`."""
    names = header.shapes
    block = _THEIRS.format(i=0)
    return f"{_PATCHES}1.weight" in names and any(name.startswith(f"{block}0.") for name in names)


def _prepare(source: files.Source) -> files.Source:
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
_IMAGES = (
    "mean and std 0.5 are a guess: files of this format do not state how images are normalised"
)


def _infer(header: files.Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer sizes from shapes; head width, pooling and preprocessing are usual or given."""
    shapes = header.shapes
    is_simple = "pos_embedding" not in shapes
    is_normed = f"{_PATCHES}3.weight" in shapes
    # In the newest release, models that pool by the mean have an empty token (0, D).
    class_token = not is_simple and shapes["cls_token"][-2] > 0
    given = dict(overrides)
    description = checkpoint.read_description(header, checkpoint.FOREIGN_METADATA_KEY)
    if description is not None:
        given = {name: getattr(description.spec, name) for name in _STATED} | given
    # A norm comes first where the projection has one on each side.
    width, values = shapes[f"{_PATCHES}{1 + is_normed}.weight"]
    channels, patch = _channels_and_patch(values, given)
    block = _THEIRS.format(i=0)
    if not is_simple and f"{block}0.to_out.0.weight" not in shapes:
        given = {"num_heads": 1, **given}  # only a single head goes without projection
    size = given.get("image_size")
    if not is_simple:
        size = shared.image_size(shapes["pos_embedding"][-2], int(class_token), patch, size)
    elif size is None:
        size = tuple(256 // side * side for side in patch)  # 256 is the size in its README
    pooling = given.get("pooling", "cls" if class_token else "mean")
    head = "linear_head.weight" if is_simple else "mlp_head.weight"
    fields = {
        "image_size": size,
        "patch_size": patch,
        "in_channels": channels,
        "num_classes": shapes.get(head, (0,))[0],
        "width": width,
        "depth": shared.depth_of(shapes, _THEIRS),
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
    return shared.finish(fields, given, shared.HALF_MEAN, usual=usual, warnings=(_IMAGES,))


def _channels_and_patch(values: int, given: Mapping[str, Any]) -> tuple[int, tuple[int, int]]:
    """Return channels and patch size of a patch with this number of values.

    A square patch decides the channels: 3 P^2 is never a square itself.
    """
    # values = C * P * P: a matrix of patches does not say how they divide.
    requested = given.get("patch_size")
    candidates = (given["in_channels"],) if "in_channels" in given else (3, 1)
    for channels in candidates:
        patch = requested or math.isqrt(values // channels)
        height, width = shared.as_pair(patch)
        if channels * height * width == values:
            return channels, (height, width)
    raise CheckpointError(
        f"{values} values per patch are not {requested or 'a square'} of 1 or 3 channels; "
        f"{shared.how_to_state('patch_size')}"
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
            f"into {heads}; {shared.how_to_state('num_heads')}"
        )
    return {"num_heads": heads, "head_width": None if inner == width else head_width}


def _ordered(ours: str) -> Transform:
    """Return the transform of a patch's values, which theirs have by (row, column, channel)."""

    def change(pattern: str) -> Callable[[Tensor, ViTSpec], Tensor]:
        def reorder(part: Tensor, spec: ViTSpec) -> Tensor:
            rows, columns = spec.patch_size
            return rearrange(part, pattern, P=rows, Q=columns, C=spec.in_channels)

        return reorder

    theirs = "... (P Q C)"
    return each(change(f"{theirs} -> {ours}"), change(f"{ours} -> {theirs}"))


_FLAT_PATCH = _ordered("... (C P Q)")
_PATCH_KERNEL = _ordered("... C P Q")
_BATCH_AXIS = each(  # tokens and positions have a batch axis up to 0.40.2
    lambda part, spec: part.reshape(1, -1, spec.width),
    lambda part, spec: part if _is_plain(spec) else part[0],
)
_EMPTY_TOKEN = Transform(  # the class token (0, D) of models that pool by the mean
    lambda parts, spec: (), lambda parts, spec: (torch.zeros(0, spec.width),)
)


def _projection(stored: int) -> Transform:
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

    def complete(parts: Parts, spec: ViTSpec) -> Parts:
        defaults = (torch.eye(spec.width), torch.zeros(spec.width))
        return (*parts, *defaults[stored:])

    def reduce(parts: Parts, spec: ViTSpec) -> Parts:
        if not all(map(torch.equal, parts, complete(parts[:stored], spec))):
            raise CheckpointError(errors[stored])
        return parts[:stored]

    return Transform(complete, reduce)


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
    projection = [f"{BLOCK}attn.proj.weight", f"{BLOCK}attn.proj.bias"]
    around = {
        f"{matrix}bias": "patch_embed.proj.bias",
        f"{_PATCHES}3.{{p}}": "patch_embed.norm.{p}",
        # One of the two applies: a model's last norm is before pooling or after it.
        "transformer.norm.{p}": "norm.{p}" if spec.norm_before_pool else "fc_norm.{p}",
        f"{head}.{{p}}": "head.{p}",
    }
    inside = {
        "0.norm.{p}": "norm1.{p}",
        "0.to_qkv.weight": "attn.qkv.weight",
        "1.net.0.{p}": "norm2.{p}",
        "1.net.1.{p}": "mlp.fc1.{p}",
        f"1.net.{fc2}.{{p}}": "mlp.fc2.{p}",
    }
    rows = [
        row("pos_embedding", "pos_embed", _BATCH_AXIS),
        row("cls_token", "cls_token", _BATCH_AXIS),
        row(f"{_PATCHES}1.{{p}}", "patch_embed.norm_patches.{p}", _FLAT_PATCH),
        row(f"{matrix}weight", "patch_embed.proj.weight", kernel),
        row([f"{_THEIRS}0.to_out.{p}" for p in to_out], projection, _projection(len(to_out))),
        *renamed(around),
        *renamed(inside, _THEIRS, BLOCK),
    ]
    if not is_simple and not spec.class_token:
        rows.append(row("cls_token", (), _EMPTY_TOKEN))
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
    if sides[0] == sides[1]:
        return sides[0]
    return sides


def _build(path: Path, spec: ViTSpec) -> nn.Module | None:
    """Build the model of the newest release."""
    if _is_plain(spec):
        return None
    library: Any = importlib.import_module("vit_pytorch")
    arguments = _constructor_arguments(spec)
    make = getattr(library, arguments.pop("class"))
    with torch.device("meta"):
        model: nn.Module = make(**arguments)
    if isinstance(model.pos_embedding, nn.Parameter):
        if not spec.num_classes:  # its constructor always makes a head
            model.mlp_head = nn.Identity()
    else:  # kept beside its parameters, so it is computed once more
        simple_vit: Any = importlib.import_module("vit_pytorch.simple_vit")
        model.pos_embedding = simple_vit.posemb_sincos_2d(*spec.grid, spec.width)
    model.load_state_dict(load_file(shared.weights_file(path)), assign=True)
    return model


def _write(bundle: Bundle) -> dict[str, FileWriter]:
    """Return one file with the names of its release, and the constructor's arguments.

    Raises:
        CheckpointError: no head, for a release whose class always has one.
    """
    spec = bundle.spec
    release = PLAIN if _is_plain(spec) else NEWEST
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
    return {shared.WEIGHTS_FILE: shared.bundle_writer(bundle, metadata)}


_SHARED: dict[str, Any] = {
    **{name: value for name, value in shared.FIRST_PAPER.items() if name != "head_width"},
    **shared.CLASS_TOKEN_ONLY,
    "norm_eps": 1e-5,
    "qkv_bias": False,
    "representation_width": None,
}
LUCIDRAINS = Format(
    name="lucidrains",
    detect=_detect,
    prepare=_prepare,
    infer=_infer,
    table=_table,
    capabilities=tuple(
        {
            **_SHARED,
            "stem": (stem, "linear") if stem == "convolution" else stem,
            "positions": positions,
            "class_token": class_token,
            "pooling": pooling,
            "norm_before_pool": norm_first,
        }
        for stem, positions, class_token, pooling, norm_first in CLASSES
    ),
    write=_write,
    fixed=shared.FIXED_BY_CODE,
    reference=shared.ReferenceLibrary("vit-pytorch", OLDEST_TESTED, "vit_pytorch", _build),
)
