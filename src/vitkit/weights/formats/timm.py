"""timm's `VisionTransformer`, distilled and hybrid ones, and its `Eva`: files and Hub folders."""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.io.results import read_json
from vitkit.models.presets import table as presets
from vitkit.spec import STAGE_STRIDES, Preprocess, ViTSpec
from vitkit.weights.formats.format import (
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
    usual_heads,
)
from vitkit.weights.formats.key_table import AS_IS, KeyTransform, Row, Table, TensorParts, row
from vitkit.weights.formats.timm_config import (
    StatedModel,
    architecture_name,
    config_document,
    config_of,
    is_eva,
    origin_of,
    read_statement,
)
from vitkit.weights.formats.unwrapping import plain_head
from vitkit.weights.tensor_file import Header, Shapes, Source

# The table between timm's names and ours, and the names by which its files are known.

FIRST_BLOCK = "blocks.0."
RESNET_NAMES = "patch_embed.backbone."
_DINO_NAMES = {
    "register_tokens",
    "storage_tokens",
    f"{FIRST_BLOCK}mlp.w12.weight",
    f"{FIRST_BLOCK}mlp.w1.weight",
}
"""Names that DINO's own files have beside timm's."""
# timm's `Eva` has LayerScale as parameters of the block, and two biases beside the matrix.
EVA_NAMES = {
    "ls1.gamma": "gamma_1",
    "ls2.gamma": "gamma_2",
    "attn.qkv.q_bias": "attn.q_bias",
    "attn.qkv.v_bias": "attn.v_bias",
}
"""Our name in a block -> that of timm's `Eva`."""
_IN_BLOCK = (
    "attn.qkv.{p}",
    "attn.q_norm.{p}",
    "attn.k_norm.{p}",
    "attn.proj.{p}",
    "norm1.{p}",
    "norm2.{p}",
    "mlp.fc1.{p}",
    "mlp.fc1_g.{p}",
    "mlp.fc1_x.{p}",
    "mlp.fc2.{p}",
)
_IN_POOL = ("latent", "q.{p}", "kv.{p}", "proj.{p}", "norm.{p}", "mlp.fc1.{p}", "mlp.fc2.{p}")
_AROUND_BLOCKS = (
    "cls_token",
    "dist_token",
    "reg_token",
    "pos_embed",
    "norm_pre.{p}",
    "norm.{p}",
    "fc_norm.{p}",
    "pre_logits.fc.{p}",
    "head.{p}",
    "head_dist.{p}",
)
_IGNORED = (
    ("mask_token", "stands for masked patches in MAE's pre-training"),
    ("decoder_*", "restores masked patches in MAE's pre-training"),
)
_IGNORED_POOL = ("attn_pool.*", "attention pooling, which this model does without")


def has_timm_names(header: Header) -> bool:
    """Return True for blocks with a fused `attn.qkv` behind a `patch_embed.proj`."""
    names = header.shapes.keys()
    if "mask_token" in names and "decoder_embed.weight" not in names:
        return False  # pre-training other than MAE's
    # DINO's files have the same names and more; they are a format of their own.
    needed = {"patch_embed.proj.weight", f"{FIRST_BLOCK}norm1.weight"}
    needed.add(f"{FIRST_BLOCK}attn.qkv.weight")
    return needed <= names and names.isdisjoint(_DINO_NAMES)


def _unfolded(parts: TensorParts, spec: ViTSpec) -> TensorParts:
    """Turn old files' matrix of patches, channels first, into the kernel of a convolution."""
    return tuple(
        # (D, C P P) -> (D, C, P, P)
        part.reshape(len(part), -1, *spec.patch_size) if part.ndim == 2 else part
        for part in parts
    )


def timm_table(spec: ViTSpec) -> Table:
    """Return a table of equal names; `Eva` has a few of its own."""
    eva = is_eva(spec)
    same = [*_AROUND_BLOCKS, *(f"blocks.{{i}}.{part}" for part in _IN_BLOCK)]
    ignored: tuple[tuple[str, str], ...] = _IGNORED
    if spec.pooling == "map":
        same += [f"attn_pool.{part}" for part in _IN_POOL]
    else:
        ignored = (*_IGNORED, _IGNORED_POOL)
    # Only on the way in: files are written with the kernel of a convolution.
    kernel = KeyTransform(_unfolded, AS_IS.to_theirs)
    rows = [row("patch_embed.proj.{p}", "patch_embed.proj.{p}", kernel), *_resnet_rows(spec)]
    rows += [row(name, name) for name in same]
    for ours, eva_name in EVA_NAMES.items():
        rows.append(row(f"blocks.{{i}}.{eva_name if eva else ours}", f"blocks.{{i}}.{ours}"))
    return Table(tuple(rows), ignored)


def _resnet_rows(spec: ViTSpec) -> list[Row]:
    """Return the rows of a hybrid's stem; without stages, its root is the whole of it."""
    if spec.stem != "resnet":
        return []
    names = ["conv.weight", "norm.{p}", "stem.conv.weight", "stem.norm.{p}"]
    parts: list[str] = []
    for n in (1, 2, 3):
        parts += [f"conv{n}.weight", f"norm{n}.{{p}}"]
    parts += ["downsample.conv.weight", "downsample.norm.{p}"]
    for stage, units in enumerate(spec.resnet_layers):
        for unit in range(units):
            names += [f"stages.{stage}.blocks.{unit}.{part}" for part in parts]
    return [row(RESNET_NAMES + name, RESNET_NAMES + name) for name in names]


# timm's own models of its files, to verify what vitkit writes.


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


# timm's `VisionTransformer`, its distilled and hybrid kinds and its `Eva`: files and Hub folders.
#
# Names as in timm 1.0.31, models/{vision_transformer,deit,vision_transformer_hybrid,eva}.py; they
# are ours too, except for `Eva`, which computes DINOv3 and EVA. Without its `config.json` a file
# contains nothing on epsilon, activation and pooling.

_OLD_SCALE_NAMES = {"gamma_1": "ls1.gamma", "gamma_2": "ls2.gamma"}


def _prepare(source: Source) -> Source:
    """Rename LayerScale and split biases to the names of the class in question."""
    changes = _OLD_SCALE_NAMES
    if _is_eva_file(source.header):
        changes = EVA_NAMES

    def rename(name: str) -> str:
        # Only inside blocks: other parts of a model may have the same last names.
        match = re.match(r"(blocks\.\d+\.)(.*)", name)
        if match is None:
            return name
        block, part = match.groups()
        return f"{block}{changes.get(part, part)}"

    return plain_head(source.renamed_by(rename), "head.", "head")


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer from shapes, then from `config.json`, then from usual values."""
    return infer_with_defaults(header, overrides, HALF_MEAN)


def _write(bundle: Bundle) -> dict[str, FileWriter]:
    """Return a folder as on the Hub: `model.safetensors` and `config.json`."""
    config = config_document(bundle.spec, bundle.preprocess, bundle.classes)
    return {
        WEIGHTS_FILE: bundle_writer(bundle),
        "config.json": FileWriter.of((json.dumps(config, indent=2) + "\n").encode()),
    }


def _resampling(spec: ViTSpec) -> str:
    return "bicubic_antialias"


_SHARED: dict[str, Any] = {
    "stem": ("convolution", "linear", "resnet"),
    "resnet_variant": ("timm",),
    "distilled_readout": ("mean",),
    "pooling": ("cls", "mean", "mean_all", "map"),
    "block": ("pre_norm", "res_post_norm"),
    "representation_width": (None,),  # its classes drop a `pre_logits` layer
    "head_width": (None,),
}
_CAPABILITIES: tuple[Capabilities, ...] = (
    {**_SHARED, "positions": ("learned", "none"), "qkv_bias": (True, False)},
    {**_SHARED, "positions": ("learned",), "qkv_bias": ("no_key",), "mlp": ("plain",)},
    {**_SHARED, "positions": ("rope",), "qkv_bias": ("no_key", False)},
)
"""`VisionTransformer`; `Eva` as it is for EVA, and for DINOv3."""
TIMM = Format(
    name="timm",
    detect=has_timm_names,
    prepare=_prepare,
    infer=_infer,
    table=timm_table,
    capabilities=_CAPABILITIES,
    write=_write,
    resampling=_resampling,
    reference=TIMM_LIBRARY,
)


# Inferring the model of a timm file: from shapes, from `config.json`, and from usual values.


def _is_eva_file(header: Header) -> bool:
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
    if _is_eva_file(header):
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
