"""Inferring the model of a timm file: from shapes, from `config.json`, and from usual values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from vitkit.errors import CheckpointError
from vitkit.models.presets import table as presets
from vitkit.spec import STAGE_STRIDES, Preprocess
from vitkit.weights.files.source import Header, Shapes
from vitkit.weights.formats.infer_spec import (
    Inferred,
    as_pair,
    depth_of,
    finish,
    how_to_state,
    image_size,
    usual_heads,
)
from vitkit.weights.formats.timm.config import (
    StatedModel,
    architecture_name,
    config_of,
    origin_of,
    read_statement,
)
from vitkit.weights.formats.timm.table import FIRST_BLOCK, RESNET_NAMES


def is_eva_file(header: Header) -> bool:
    """Return True for tensors that only `Eva` has, or for its name in `config.json`."""
    shapes = header.shapes
    name = architecture_name(config_of(header))
    # Without a table of positions, a known name decides.
    if name in presets() and "pos_embed" not in shapes:
        return presets()[name].fields.get("positions") == "rope"
    if f"{FIRST_BLOCK}attn.q_bias" in shapes or f"{FIRST_BLOCK}attn.qkv.q_bias" in shapes:
        return True
    # With a table these marks may be DeiT III's LayerScale, or another class's gated MLP.
    marks = (f"{FIRST_BLOCK}gamma_1", f"{FIRST_BLOCK}mlp.fc1_g.weight")
    return "pos_embed" not in shapes and any(mark in shapes for mark in marks)


def infer_with_defaults(
    header: Header, overrides: Mapping[str, Any], preprocess: Preprocess, **defaults: Any
) -> Inferred:
    """Infer a model from shapes, then from `config.json`, then from usual values.

    Args:
        header: header of the prepared file.
        overrides: spec fields that the user gives.
        preprocess: the usual one for files of this origin.
        **defaults: spec fields that the code of this origin decides.

    Raises:
        CheckpointError: a `config.json` or an `arch` of another model, one that vitkit does not
            know, or positions of no known kind.
    """
    shapes = header.shapes
    origin = origin_of(header)
    stated = read_statement(config_of(header), overrides, origin)
    fields = {**_stem_fields(shapes), **_block_fields(shapes), **_readout_fields(shapes)}
    if stated.width not in (None, fields["width"]):
        stated = _of_another_width(stated.width, fields["width"], origin)
    positions = _position_fields(header, fields, overrides, {**stated.fields, **overrides})
    fields |= positions.certain
    is_rotary = positions.guessed.get("positions") == "rope"
    usual = {**_usual_fields(shapes, fields, is_rotary), **defaults, **positions.guessed}
    if fields["layer_scale"]:  # its starting value, which no shape contains
        usual["layer_scale"] = fields.pop("layer_scale")
    usual = {name: value for name, value in usual.items() if name not in fields}
    # Shapes and the code of this origin go before config.json, and that before usual values.
    decided = {*fields, *defaults}
    if "pos_embed" in shapes:
        decided.add("image_size")
    named: dict[str, Any] = {}
    for name, value in stated.fields.items():
        if name not in decided and value is not None:
            named[name] = value
    # Resampling is decided by timm's code, not by the model, so it counts as usual.
    stored = named.keys() - {"position_resampling"}
    usual_names = usual.keys() - stored
    if {"mean", "std"} <= stated.preprocess.keys():
        stored |= {"preprocess"}
    else:
        usual_names |= {"preprocess"}
    classes, class_warnings = _matching_classes(stated.classes, fields["num_classes"])
    return finish(
        {**usual, **named, **fields},
        overrides,
        preprocess.replace(**stated.preprocess),
        stored=stored,
        usual=usual_names,
        classes=classes,
        warnings=(*stated.warnings, *positions.warnings, *class_warnings),
    )


def _matching_classes(
    classes: tuple[str, ...], num_classes: int
) -> tuple[tuple[str, ...], list[str]]:
    """Return the class names if there is one for each logit, else none and a warning."""
    if not classes or len(classes) == num_classes:
        return classes, []
    return (), [f"{len(classes)} class names do not match {num_classes} logits and are left out"]


def _of_another_width(stated: int | None, width: int, origin: str) -> StatedModel:
    """Ignore an `arch` of another width; refuse such a `config.json`.

    The keywords of an `arch` may be unknown, so that its width is only that of the name.
    """
    line = f"{origin} describes a model of width {stated}; the tensors have width {width}"
    if origin == "config.json":
        raise CheckpointError(line)
    return StatedModel({}, {}, warnings=(f"{line}; {origin} is left out",))


def _stem_fields(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of the stem, by its projection and its ResNet if it has one."""
    projection = shapes["patch_embed.proj.weight"]
    width, channels, *kernel = projection
    fields: dict[str, Any] = {"stem": "convolution"}
    if len(projection) == 2:  # old files: one matrix, of channels times pixels
        channels = 1 if math.isqrt(projection[1]) ** 2 == projection[1] else 3
        kernel = [math.isqrt(projection[1] // channels)] * 2
    if any(name.startswith(RESNET_NAMES) for name in shapes):
        root = "conv.weight" if f"{RESNET_NAMES}conv.weight" in shapes else "stem.conv.weight"
        if RESNET_NAMES + root not in shapes:
            raise CheckpointError("the backbone is not a ResNetV2, the only one supported")
        layers = _resnet_layers(shapes)
        # The kernel of a hybrid covers cells of the ResNet's output, several pixels each.
        kernel = [side * STAGE_STRIDES[len(layers)] for side in kernel]
        channels = shapes[RESNET_NAMES + root][1]
        fields = {"stem": "resnet", "resnet_layers": layers}
    return fields | {
        "width": width,
        "in_channels": channels,
        "patch_size": tuple(kernel),
        "patch_bias": "patch_embed.proj.bias" in shapes,
    }


def _resnet_layers(shapes: Shapes) -> tuple[int, ...]:
    """Return the number of units of each stage of the ResNet."""
    pattern = re.compile(rf"{re.escape(RESNET_NAMES)}stages\.(\d+)\.blocks\.(\d+)\.conv1")
    units: dict[int, set[int]] = {}
    for name in shapes:
        match = pattern.match(name)
        if match:
            units.setdefault(int(match[1]), set()).add(int(match[2]))
    return tuple(len(units[stage]) for stage in sorted(units))


def _block_fields(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of the blocks, by the names in the first one."""
    names = {name.removeprefix(FIRST_BLOCK) for name in shapes if name.startswith(FIRST_BLOCK)}
    of_blocks = (name for name in shapes if name.startswith("blocks."))
    has_scale = bool(names & {"ls1.gamma", "gamma_1"})
    fields: dict[str, Any] = {
        "depth": depth_of(of_blocks, r"blocks\.(\d+)"),
        "mlp_width": shapes[f"{FIRST_BLOCK}mlp.fc2.weight"][1],
        "norm": "layer" if "norm1.bias" in names else "rms",
        "qkv_bias": "no_key" if "attn.q_bias" in names else "attn.qkv.bias" in names,
        "qk_norm": "attn.q_norm.weight" in names,
        "layer_scale": 1e-5 if has_scale else None,
        "mlp": "plain",
    }
    # The norm of queries is as wide as a head, so it shows how many heads there are.
    if fields["qk_norm"]:
        inner = shapes[f"{FIRST_BLOCK}attn.qkv.weight"][0] // 3
        fields["num_heads"] = inner // shapes[f"{FIRST_BLOCK}attn.q_norm.weight"][0]
    if "mlp.fc1_g.weight" in names:
        fields |= {"mlp": "swiglu_split", "activation": "silu"}
    # Gate and value in one matrix make it twice as high as fc2 is wide.
    elif shapes[f"{FIRST_BLOCK}mlp.fc1.weight"][0] == 2 * fields["mlp_width"]:
        fields |= {"mlp": "swiglu_packed", "activation": "silu"}
    return fields


def _readout_fields(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of tokens, norms and heads."""
    representation_width = shapes.get("pre_logits.fc.weight", (0,))[0]
    return {
        "num_classes": shapes.get("head.weight", (0,))[0],
        "class_token": "cls_token" in shapes,
        "distillation_token": "dist_token" in shapes,
        "num_registers": shapes.get("reg_token", (1, 0))[1],
        "embedding_norm": "norm_pre.weight" in shapes,
        "final_norm": "norm.weight" in shapes or "fc_norm.weight" in shapes,
        "norm_before_pool": "fc_norm.weight" not in shapes,
        "representation_width": representation_width or None,
    }


class _PositionFields(NamedTuple):
    """The fields of positions and image size.

    Attributes:
        certain: fields that follow from shapes.
        guessed: fields that are only probable.
        warnings: one line each.
    """

    certain: dict[str, Any]
    guessed: dict[str, Any]
    warnings: tuple[str, ...] = ()


def _position_fields(
    header: Header,
    fields: Mapping[str, Any],
    overrides: Mapping[str, Any],
    given: Mapping[str, Any],
) -> _PositionFields:
    """Infer positions and image size.

    Args:
        header: header of the file.
        fields: those inferred so far.
        overrides: fields of the user.
        given: fields of the user and of `config.json`.
    """
    table = header.shapes.get("pos_embed")
    if table is None:
        return _without_table(header, fields, given)
    if fields["mlp"] != "plain" and fields["qkv_bias"] == "no_key":
        raise CheckpointError("EVA-02's rotary positions beside a table are not supported")
    _refuse_rotary(header, fields)
    patch = fields["patch_size"]
    rows = table[1]  # (1, rows, D)
    prefix = fields["class_token"] + fields["distillation_token"] + fields["num_registers"]
    certain: dict[str, Any] = {"positions": "learned"}
    requested = overrides.get("image_size")
    if requested is None:
        requested = _fitting_size(given.get("image_size"), patch, rows, prefix)
    if requested is None:
        # Prefix tokens may have rows in the table or not: the one that leaves a square counts.
        if prefix and _is_square(rows - prefix) and _is_square(rows):
            return _ambiguous_square(fields, given, rows, prefix)
        covered = 0 if _is_square(rows) and not _is_square(rows - prefix) else prefix
    else:
        height, width = as_pair(requested)
        # As many rows as patches: none is left for prefix tokens.
        patches_alone = (height // patch[0]) * (width // patch[1]) == rows
        covered = 0 if patches_alone else prefix
    size = image_size(rows, covered, patch, requested)
    certain["positions_cover_prefix"] = prefix == 0 or covered > 0
    if requested is None:  # a square number of rows does not prove a square image
        return _PositionFields(certain, {"image_size": size})
    return _PositionFields({**certain, "image_size": size}, {})


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


def _without_table(
    header: Header, fields: Mapping[str, Any], given: Mapping[str, Any]
) -> _PositionFields:
    """Return the fields of a file without position table: rotary positions, or none."""
    patch = fields["patch_size"]
    if is_eva_file(header):
        positions, usual_side = "rope", 256
    else:
        positions, usual_side = "none", 224
    warnings: tuple[str, ...] = ()
    if "positions" not in given:
        described = "'rope' (as in DINOv3)" if positions == "rope" else "'none'"
        warnings = (
            f"the file has no table of positions; positions={described} is assumed; pass "
            f"positions= if the model has others",
        )
        if positions == "rope" and fields["qkv_bias"] is True:
            raise CheckpointError("rotary positions other than DINOv3's are not supported")
    side = usual_side // patch[0] or 1
    size = (side * patch[0], side * patch[1])
    return _PositionFields({}, {"positions": positions, "image_size": size}, warnings)


def _ambiguous_square(
    fields: Mapping[str, Any], given: Mapping[str, Any], rows: int, prefix: int
) -> _PositionFields:
    """Return the fields where rows are a square with and without those of prefix tokens."""
    covers_prefix = given.get("positions_cover_prefix", not fields["num_registers"])
    covered = prefix * covers_prefix
    size = image_size(rows, covered, fields["patch_size"], None)
    warning = (
        f"{rows} rows of positions form a square grid with and without the {prefix} prefix "
        f"tokens; image_size {size[0]} x {size[1]} is assumed; if it is another, "
        f"{how_to_state('image_size')}"
    )
    guessed = {"positions_cover_prefix": covered > 0, "image_size": size}
    return _PositionFields({"positions": "learned"}, guessed, (warning,))


def _refuse_rotary(header: Header, fields: Mapping[str, Any]) -> None:
    """Refuse rotations that timm's `Eva` computes beside a table.

    Its own class name, as timm's training writes it, and a full bias mean Perception Encoder.
    """
    is_named = architecture_name(config_of(header)) == "eva"
    if is_named and fields["qkv_bias"] is True:
        raise CheckpointError("timm's class Eva with rotary positions that are not supported")


def _fitting_size(size: Any, patch: tuple[int, int], rows: int, prefix: int) -> Any:
    """Return a stated size if the table has a row for each of its patches, else None."""
    if size is None:
        return None
    patches = (size[0] // patch[0]) * (size[1] // patch[1])
    return size if patches in (rows, rows - prefix) else None


def _usual_fields(shapes: Shapes, fields: Mapping[str, Any], is_rotary: bool) -> dict[str, Any]:
    """Return fields that timm's models of this kind usually have."""
    # timm's Eva, models without class token and those with fc_norm average patches.
    averages = is_rotary or not fields["class_token"] or not fields["norm_before_pool"]
    pooling = "mean" if averages and not fields["distillation_token"] else "cls"
    if "attn_pool.latent" in shapes:
        pooling = "map"
    usual = {
        "num_heads": usual_heads(fields["width"]),
        # CLIP, which has a norm before the blocks, and Eva take torch's default.
        "norm_eps": 1e-5 if fields["embedding_norm"] or is_rotary else 1e-6,
        "activation": "gelu",
        "pooling": pooling,
        "block": "pre_norm",
        "position_resampling": "bicubic_antialias",
    }
    if is_rotary:
        usual["rope_temperature"] = 100.0
    if fields["stem"] == "resnet":
        usual["resnet_variant"] = "timm"
    return usual
