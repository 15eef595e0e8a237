"""timm's `VisionTransformer`, distilled and hybrid ones, its `Eva`; and facebookresearch/deit."""

import importlib
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitkit.errors import CheckpointError
from vitkit.io import atomic, untrusted
from vitkit.models.presets import table as presets
from vitkit.spec import STAGE_STRIDES, Preprocess, ViTSpec
from vitkit.weights.files import Header, Shapes, Source
from vitkit.weights.formats import format as shared
from vitkit.weights.formats import keys, timm_config, unwrapping
from vitkit.weights.formats.format import Bundle, Format, Inferred, ReferenceLibrary

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
FIRST_SCALES = {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2"}
EVA_NAMES = {**FIRST_SCALES, "attn.qkv.q_bias": "attn.q_bias", "attn.qkv.v_bias": "attn.v_bias"}
"""Our name in a block -> that of timm's `Eva`."""
_IGNORED = (
    ("mask_token", "stands for masked patches in MAE's pre-training"),
    ("decoder_*", "restores masked patches in MAE's pre-training"),
)


def has_timm_names(header: Header) -> bool:
    """Return True for blocks with a fused `attn.qkv` behind a `patch_embed.proj`."""
    names = header.shapes.keys()
    if "mask_token" in names and "decoder_embed.weight" not in names:
        return False  # pre-training other than MAE's
    # DINO's files have the same names and more; they are a format of their own.
    needed = {"patch_embed.proj.weight", f"{FIRST_BLOCK}norm1.weight"}
    needed.add(f"{FIRST_BLOCK}attn.qkv.weight")
    return needed <= names and names.isdisjoint(_DINO_NAMES)


def _unfolded(part: Tensor, spec: ViTSpec) -> Tensor:
    """Turn old files' matrix of patches, channels first, into the kernel of a convolution."""
    # (D, C P P) -> (D, C, P, P)
    if part.ndim == 2:
        return part.reshape(len(part), -1, *spec.patch_size)
    return part


def _table(spec: ViTSpec) -> keys.Table:
    """Return a table of equal names; `Eva` has a few of its own."""
    return _with_block_names(spec, EVA_NAMES if timm_config.is_eva(spec) else {})


def _with_block_names(spec: ViTSpec, in_block: Mapping[str, str]) -> keys.Table:
    """Return the table of our own names, but for those in a block: ours -> theirs."""
    # Only on the way in: files are written with the kernel of a convolution.
    kernel = keys.each(_unfolded, lambda part, spec: part)
    rows = [keys.row("patch_embed.proj.weight", "patch_embed.proj.weight", kernel)]
    rows += keys.renamed(
        {theirs: ours for ours, theirs in in_block.items()}, keys.BLOCK, keys.BLOCK
    )
    ignored: tuple[tuple[str, str], ...] = _IGNORED
    if spec.pooling != "map":
        ignored += (("attn_pool.*", "attention pooling, which this model does without"),)
    return keys.Table(tuple(rows), ignored, same_names=True)


# timm's own models of its files, to verify what vitkit writes.


def filled_timm_model(path: Path, make: Callable[[], Any]) -> nn.Module:
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
    model.load_state_dict(models.load_state_dict(str(shared.weights_file(path))), assign=True)
    for module in model.modules():
        if hasattr(module, "init_non_persistent_buffers"):
            module.init_non_persistent_buffers()
    built: nn.Module = model
    return built


def _build(path: Path, spec: ViTSpec) -> nn.Module | None:
    """Build the model by `config.json`, as `timm.create_model("local-dir:FOLDER")` reads it."""
    timm: Any = importlib.import_module("timm")
    if "architecture" not in untrusted.read_json(path / "config.json"):
        return None
    return filled_timm_model(path, lambda: timm.create_model(f"local-dir:{path}"))


TIMM_LIBRARY = ReferenceLibrary("timm", (1, 0, 29), "timm", _build)


# timm's `VisionTransformer`, its distilled and hybrid kinds and its `Eva`: files and Hub folders.
#
# Names as in timm 1.0.31, models/{vision_transformer,deit,vision_transformer_hybrid,eva}.py; they
# are ours too, except for `Eva`, which computes DINOv3 and EVA. Without its `config.json` a file
# contains nothing on epsilon, activation and pooling.


def _prepare(source: Source) -> Source:
    """Rename LayerScale and split biases to the names of the class in question."""
    changes = {old: name for name, old in FIRST_SCALES.items()}
    if _is_eva_file(source.header):
        changes = EVA_NAMES
    return unwrapping.plain_head(_renamed_in_blocks(source, changes), "head.", "head")


def _renamed_in_blocks(source: Source, changes: Mapping[str, str]) -> Source:
    # Only inside blocks: other parts of a model may have the same last names.
    def rename(name: str) -> str:
        match = re.match(r"(blocks\.\d+\.)(.*)", name)
        if match is None:
            return name
        return match[1] + changes.get(match[2], match[2])

    return source.renamed_by(rename)


def _infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer from shapes, then from `config.json`, then from usual values."""
    return infer_with_defaults(header, overrides, shared.HALF_MEAN)


def _write(bundle: Bundle) -> dict[str, atomic.FileWriter]:
    """Return a folder as on the Hub: `model.safetensors` and `config.json`."""
    config = timm_config.config_document(bundle.spec, bundle.preprocess, bundle.classes)
    return {
        shared.WEIGHTS_FILE: shared.bundle_writer(bundle),
        "config.json": atomic.FileWriter.of((json.dumps(config, indent=2) + "\n").encode()),
    }


_SHARED: dict[str, Any] = {
    "stem": ("convolution", "linear", "resnet"),
    "resnet_variant": "timm",
    "distilled_readout": "mean",
    "pooling": ("cls", "mean", "mean_all", "map"),
    "block": ("pre_norm", "res_post_norm"),
    "representation_width": None,  # its classes drop a `pre_logits` layer
    "head_width": None,
}
TIMM = Format(
    name="timm",
    detect=has_timm_names,
    prepare=_prepare,
    infer=_infer,
    table=_table,
    # `VisionTransformer`; `Eva` as it is for EVA, and for DINOv3.
    capabilities=(
        {**_SHARED, "positions": ("learned", "none"), "qkv_bias": (True, False)},
        {**_SHARED, "positions": "learned", "qkv_bias": "no_key", "mlp": "plain"},
        {**_SHARED, "positions": "rope", "qkv_bias": ("no_key", False)},
    ),
    write=_write,
    reference=TIMM_LIBRARY,
)


# Inferring the model of a timm file: from shapes, from `config.json`, and from usual values.


def _is_eva_file(header: Header) -> bool:
    """Return True for tensors that only `Eva` has, or for its name in `config.json`."""
    shapes = header.shapes
    name = timm_config.architecture_name(header)
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
    stated = timm_config.read_statement(header, overrides)
    fields = {**_stem_fields(shapes), **_block_fields(shapes), **_readout_fields(shapes)}
    if stated.width not in (None, fields["width"]):
        line = f"{stated.origin} describes a model of width {stated.width}; the tensors have width "
        line += f"{fields['width']}"
        # The keywords of an `arch` may be unknown, so that its width is only that of the name.
        if stated.origin == "config.json":
            raise CheckpointError(line)
        line += f"; {stated.origin} is left out"
        stated = timm_config.StatedModel(stated.origin, warnings=(line,))
    classes = stated.classes
    if len(classes) not in (0, fields["num_classes"]):
        line = f"{len(classes)} class names do not match {fields['num_classes']} logits"
        stated = stated._replace(warnings=(*stated.warnings, f"{line} and are left out"))
        classes = ()
    certain, guessed = _position_fields(header, fields, overrides, {**stated.fields, **overrides})
    fields |= certain
    is_rotary = guessed.get("positions") == "rope"
    usual = {**_usual_fields(shapes, fields, is_rotary), **defaults, **guessed}
    if fields["layer_scale"]:  # its starting value, which no shape contains
        usual["layer_scale"] = fields.pop("layer_scale")
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
    states_images = {"mean", "std"} <= stated.preprocess.keys()
    return shared.finish(
        {**usual, **named, **fields},
        overrides,
        preprocess.replace(**stated.preprocess),
        stored=stored | ({"preprocess"} if states_images else set()),
        usual=(usual.keys() - fields.keys()) | {"preprocess"},
        classes=classes,
        warnings=stated.warnings,
    )


def _stem_fields(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of the stem, by its projection and its ResNet if it has one."""
    projection = shapes["patch_embed.proj.weight"]
    width, channels, *kernel = projection
    fields: dict[str, Any] = {"stem": "convolution"}
    if len(projection) == 2:  # old files: one matrix, of channels times pixels
        channels = 3
        if math.isqrt(projection[1]) ** 2 == projection[1]:
            channels = 1
        kernel = [math.isqrt(projection[1] // channels)] * 2
    if any(name.startswith(RESNET_NAMES) for name in shapes):
        root = "stem.conv.weight"
        if f"{RESNET_NAMES}conv.weight" in shapes:
            root = "conv.weight"
        if RESNET_NAMES + root not in shapes:
            raise CheckpointError("the backbone is not a ResNetV2, the only one supported")
        layers = shared.resnet_layers(shapes, f"{RESNET_NAMES}stages.{{s}}.blocks.*.conv1.weight")
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


def _block_fields(shapes: Shapes) -> dict[str, Any]:
    """Return the fields of the blocks, by the names in the first one."""
    names = {name.removeprefix(FIRST_BLOCK) for name in shapes if name.startswith(FIRST_BLOCK)}
    has_scale = bool(names & {"ls1.gamma", "gamma_1"})
    fields: dict[str, Any] = {
        "depth": shared.depth_of(shapes, keys.BLOCK),
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


def _position_fields(
    header: Header,
    fields: Mapping[str, Any],
    overrides: Mapping[str, Any],
    given: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Infer positions and image size.

    Args:
        header: header of the file.
        fields: those inferred so far.
        overrides: fields of the user.
        given: fields of the user and of `config.json`.

    Returns:
        Fields that follow from shapes, and fields that are only probable.
    """
    patch = fields["patch_size"]
    table = header.shapes.get("pos_embed")  # (1, rows, D)
    if table is None:
        return {}, _without_table(header, fields, given)
    # Its own class name, as timm's training writes it, and a full bias mean Perception Encoder.
    is_named_eva = timm_config.architecture_name(header) == "eva"
    is_eva02 = fields["mlp"] != "plain" and fields["qkv_bias"] == "no_key"
    if is_eva02 or (is_named_eva and fields["qkv_bias"] is True):
        raise CheckpointError(
            "timm's class Eva with a table and rotary positions that are not supported (EVA-02, "
            "Perception Encoder)"
        )
    rows = table[1]
    prefix = fields["class_token"] + fields["distillation_token"] + fields["num_registers"]
    requested = overrides.get("image_size", given.get("image_size"))
    if requested is not None:
        height, width = shared.as_pair(requested)
        patches = (height // patch[0]) * (width // patch[1])
        # A stated size may be another one; the user's is refused if it is.
        if "image_size" not in overrides and patches not in (rows, rows - prefix):
            requested = None
    # Prefix tokens may have rows in the table or not: the one that leaves a square counts.
    is_square, without = _is_square(rows), _is_square(rows - prefix)
    is_open = requested is None and prefix > 0 and is_square and without
    covers_prefix = patches != rows if requested is not None else without or not is_square
    if is_open:
        covers_prefix = given.get("positions_cover_prefix", not fields["num_registers"])
    size = shared.image_size(rows, prefix * covers_prefix, patch, requested)
    certain: dict[str, Any] = {"positions": "learned"}
    guessed: dict[str, Any] = {}
    (guessed if is_open else certain)["positions_cover_prefix"] = prefix == 0 or covers_prefix
    # A square number of rows does not prove a square image.
    (guessed if requested is None else certain)["image_size"] = size
    return certain, guessed


def _is_square(number: int) -> bool:
    return number > 0 and math.isqrt(number) ** 2 == number


def _without_table(
    header: Header, fields: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Guess the fields of a file without position table: rotary positions as DINOv3's, or none."""
    is_rotary = _is_eva_file(header)
    if is_rotary and "positions" not in given and fields["qkv_bias"] is True:
        raise CheckpointError("rotary positions other than DINOv3's are not supported")
    usual_side = 256 if is_rotary else 224
    size = tuple((usual_side // side or 1) * side for side in fields["patch_size"])
    return {"positions": "rope" if is_rotary else "none", "image_size": size}


def _usual_fields(shapes: Shapes, fields: Mapping[str, Any], is_rotary: bool) -> dict[str, Any]:
    """Return fields that timm's models of this kind usually have."""
    # timm's Eva, models without class token and those with fc_norm average patches.
    averages = is_rotary or not fields["class_token"] or not fields["norm_before_pool"]
    pooling = "cls"
    if averages and not fields["distillation_token"]:
        pooling = "mean"
    if "attn_pool.latent" in shapes:
        pooling = "map"
    usual = {
        "num_heads": shared.usual_heads(fields["width"]),
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


# facebookresearch/deit: training checkpoints of DeiT (2012.12877) and DeiT III (2204.07118).
#
# Names are those that timm had at the time: main.py saves `{"model": state_dict, ...}`, models.py
# has the distilled class and models_v2.py DeiT III's, whose LayerScale is `gamma_1`, `gamma_2` and
# whose table of positions has no row for the class token. A plain model differs from timm's by its
# container alone; without that, it is read as timm's, which computes the same.

_CONTAINERS = ("'model'", "'model_ema'")
"""Entries of its training checkpoints, as a note on the way in names them."""
_LAYOUT = "facebookresearch/deit"
"""The mark that vitkit writes into the header, where no container shows the origin."""
_DEIT_IMAGES = shared.IMAGENET_MEAN.replace(interpolation="bicubic", crop_ratio=0.875)


def _detect_deit(header: Header) -> bool:
    """Return True for DeiT III's LayerScale beside a fused bias, or timm's names in `model`."""
    shapes = header.shapes
    if "architecture" in header.documents.get("config", {}):
        return False  # timm's own folder
    if f"{FIRST_BLOCK}norm11.weight" in shapes and f"{FIRST_BLOCK}norm21.weight" in shapes:
        return True  # DeiT III's parallel blocks, which `_infer` refuses by name
    if not has_timm_names(header) or "pos_embed" not in shapes:
        return False
    # timm's Eva has gamma_1 beside split biases; DeiT III has it beside a fused one.
    deit3 = {f"{FIRST_BLOCK}gamma_1", f"{FIRST_BLOCK}attn.qkv.bias", "cls_token"}
    if deit3 <= shapes.keys() or header.metadata.get("layout") == _LAYOUT:
        return True
    return any(note.endswith(_CONTAINERS) for note in header.notes)


def _infer_deit(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """Infer as for timm, with ImageNet's mean; DeiT III is evaluated on the whole shorter side."""
    if f"{FIRST_BLOCK}norm11.weight" in header.shapes:
        raise CheckpointError("DeiT III's parallel blocks are not supported")
    preprocess = _DEIT_IMAGES
    # DeiT III evaluates at crop_ratio 1, and is known by its LayerScale.
    if f"{FIRST_BLOCK}gamma_1" in header.shapes:
        preprocess = _DEIT_IMAGES.replace(crop_ratio=1.0)
    return infer_with_defaults(header, overrides, preprocess, position_resampling="bicubic")


def _prepare_deit(source: Source) -> Source:
    """Rename timm's LayerScale to the first names."""
    return _renamed_in_blocks(source, FIRST_SCALES)


def _build_deit(path: Path, spec: ViTSpec) -> nn.Module | None:
    """Build the model by timm, whose classes DeiT's own code uses.

    LayerScale has other names there since DeiT III.
    """
    timm: Any = importlib.import_module("timm")
    architecture = timm_config.timm_architecture(spec)
    if architecture is None or spec.layer_scale is not None:
        return None
    name, arguments = architecture
    return filled_timm_model(
        path, lambda: timm.create_model(name, num_classes=spec.num_classes, **arguments)
    )


_DEIT: dict[str, Any] = {**shared.FIRST_PAPER, "representation_width": None}
DEIT = Format(
    name="deit",
    detect=_detect_deit,
    prepare=_prepare_deit,
    infer=_infer_deit,
    table=lambda spec: _with_block_names(spec, FIRST_SCALES),
    # The models of models.py; those of models_v2.py, with LayerScale and without.
    capabilities=(
        {**_DEIT, "distilled_readout": "mean", "layer_scale": None},
        {**_DEIT, "distillation_token": False, "positions_cover_prefix": False},
    ),
    # No pickle is written; names as of their `model.state_dict()`.
    write=lambda bundle: {shared.WEIGHTS_FILE: shared.bundle_writer(bundle, {"layout": _LAYOUT})},
    fixed=shared.FIXED_BY_CODE,
    reference=TIMM_LIBRARY._replace(build=_build_deit),
)
