"""timm's `VisionTransformer`, its distilled and hybrid kinds and its `Eva`: files and Hub folders.

Names as in timm 1.0.31, models/{vision_transformer,deit,vision_transformer_hybrid,eva}.py; they
are ours too, but for `Eva`, which computes DINOv3 and EVA. Without its `config.json` a file says
nothing of epsilon, activation and pooling.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from vitkit.errors import CheckpointError
from vitkit.io.atomic import FileWriter
from vitkit.models.presets import table as presets
from vitkit.spec import STAGE_STRIDES, Preprocess, ViTSpec
from vitkit.weights.converting.fold import Capabilities
from vitkit.weights.files.open import Header, Source
from vitkit.weights.formats.format import Bundle, Format, Inferred, safetensors_file
from vitkit.weights.formats.infer_spec import HALF, depth_of, finish, image_size, usual_heads
from vitkit.weights.formats.key_table import AS_IS, Row, Table, Transform, row
from vitkit.weights.formats.timm import config as timm_config
from vitkit.weights.formats.unwrapping import plain_head

Shapes = Mapping[str, tuple[int, ...]]
BACKBONE, BLOCK = "patch_embed.backbone.", "blocks.0."
OTHERS = ("register_tokens", "storage_tokens", f"{BLOCK}mlp.w12.weight",
          f"{BLOCK}mlp.w1.weight")  # fmt: skip
"""Names that DINO's own files have besides."""
EVA = {"ls1.gamma": "gamma_1", "ls2.gamma": "gamma_2", "attn.qkv.q_bias": "attn.q_bias",
       "attn.qkv.v_bias": "attn.v_bias"}  # fmt: skip
"""Our name -> that of timm's `Eva`."""


def detect(header: Header) -> bool:
    """Blocks with a fused `attn.qkv` behind a `patch_embed.proj`."""
    names = ("patch_embed.proj.weight", f"{BLOCK}norm1.weight", f"{BLOCK}attn.qkv.weight")
    pretraining = "mask_token" in header.shapes and "decoder_embed.weight" not in header.shapes
    if pretraining:  # other than MAE's
        return False
    return all(n in header.shapes for n in names) and not any(n in header.shapes for n in OTHERS)


def prepare(source: Source) -> Source:
    """LayerScale and split biases under the names that the class in question has for them."""
    eva = _is_eva(source.header)
    changes = EVA if eva else {f"gamma_{i}": f"ls{i}.gamma" for i in (1, 2)}

    def current(name: str) -> str:
        found = re.match(r"(blocks\.\d+\.)(.*)", name)
        return found[1] + changes.get(found[2], found[2]) if found else name

    names = {name: current(name) for name in source}
    if any(old != new for old, new in names.items()):
        source = source.renamed(names)
    return plain_head(source, "head.", "head")


def _is_eva(header: Header) -> bool:
    """By the signs that only `Eva` leaves, or by the name in `config.json`."""
    name = timm_config.architecture_of(timm_config.config_of(header))
    if name in presets() and "pos_embed" not in header.shapes:
        return presets()[name].fields.get("positions") == "rope"
    if any(f"{BLOCK}attn.{part}" in header.shapes for part in ("q_bias", "qkv.q_bias")):
        return True
    marks = (f"{BLOCK}gamma_1", f"{BLOCK}mlp.fc1_g.weight")
    return "pos_embed" not in header.shapes and any(mark in header.shapes for mark in marks)


def infer(header: Header, overrides: Mapping[str, Any]) -> Inferred:
    """From shapes; then from `config.json`; then what such files usually have."""
    return infer_as(header, overrides, HALF)


def infer_as(
    header: Header, overrides: Mapping[str, Any], preprocess: Preprocess, **habits: Any
) -> Inferred:
    """The same with the preprocessing and the fields that files of some origin usually have.

    Raises:
        CheckpointError: a `config.json` or an `arch` of another model, one that vitkit does not
            know, or positions of no known kind.
    """
    shapes, config = header.shapes, timm_config.config_of(header)
    stated = timm_config.read(config, overrides, said_by=timm_config.place_of(header))
    fields = {**_stem(shapes), **_blocks(shapes), **_readout(shapes)}
    if stated.width not in (None, fields["width"]):
        stated = _of_another_width(stated.width, fields["width"], timm_config.place_of(header))
    said = {**stated.fields, **overrides}
    warnings = list(stated.warnings)
    placed, guessed = _positions(header, fields, overrides, said, warnings)
    fields |= placed
    rotary = guessed.get("positions") == "rope"
    usual = {**_usual(shapes, fields, rotary), **habits, **guessed}
    if fields["layer_scale"]:  # a starting value: no shape has it
        usual["layer_scale"] = fields.pop("layer_scale")
    usual = {name: value for name, value in usual.items() if name not in fields}
    taken = {*fields, *habits, *(("image_size",) if "pos_embed" in shapes else ())}
    named = {n: v for n, v in stated.fields.items() if n not in taken and v is not None}
    stored = named.keys() - {"position_resampling"}  # a habit of the code, not of the model
    images = preprocess.replace(**stated.preprocess)
    known = {"mean", "std"} <= stated.preprocess.keys()
    classes = stated.classes if len(stated.classes) == fields["num_classes"] else ()
    if stated.classes and not classes:
        warnings.append(
            f"{len(stated.classes)} class names for {fields['num_classes']} logits are left out"
        )
    return finish(
        {**usual, **named, **fields},
        overrides,
        images,
        stored=[*stored, *(["preprocess"] if known else [])],
        usual=[*(usual.keys() - stored), *([] if known else ["preprocess"])],
        classes=classes,
        warnings=tuple(warnings),
    )


def _of_another_width(stated: int | None, found: int, place: str) -> timm_config.Stated:
    """Nothing of what `arch` says, as its keywords may be unknown; a `config.json` is refused."""
    line = f"{place} is of a model {stated} wide; the tensors are {found} wide"
    if place == "config.json":
        raise CheckpointError(line)
    return timm_config.Stated({}, {}, warnings=(f"{line}; {place} is left out",))


def _stem(shapes: Shapes) -> dict[str, Any]:
    projection = shapes["patch_embed.proj.weight"]
    width, channels, *kernel = projection
    fields: dict[str, Any] = {"stem": "convolution"}
    if len(projection) == 2:  # old files: one matrix, of channels times pixels
        channels = 1 if math.isqrt(projection[1]) ** 2 == projection[1] else 3
        kernel = [math.isqrt(projection[1] // channels)] * 2
    if any(name.startswith(BACKBONE) for name in shapes):
        root = "conv.weight" if f"{BACKBONE}conv.weight" in shapes else "stem.conv.weight"
        if BACKBONE + root not in shapes:
            raise CheckpointError("the backbone is no ResNetV2, the only one that vitkit knows")
        layers = _layers(shapes)
        kernel = [side * STAGE_STRIDES[len(layers)] for side in kernel]
        channels = shapes[BACKBONE + root][1]
        fields = {"stem": "resnet", "resnet_layers": layers}
    return fields | {
        "width": width,
        "in_channels": channels,
        "patch_size": tuple(kernel),
        "patch_bias": "patch_embed.proj.bias" in shapes,
    }


def _layers(shapes: Shapes) -> tuple[int, ...]:
    found: dict[int, set[int]] = {}
    for name in shapes:
        if match := re.match(rf"{re.escape(BACKBONE)}stages\.(\d+)\.blocks\.(\d+)\.conv1", name):
            found.setdefault(int(match[1]), set()).add(int(match[2]))
    return tuple(len(found[stage]) for stage in sorted(found))


def _blocks(shapes: Shapes) -> dict[str, Any]:
    has = [name.removeprefix(BLOCK) for name in shapes if name.startswith(BLOCK)]
    fields: dict[str, Any] = {
        "depth": depth_of(
            (name for name in shapes if name.startswith("blocks.")), r"blocks\.(\d+)"
        ),
        "mlp_width": shapes[f"{BLOCK}mlp.fc2.weight"][1],
        "norm": "layer" if "norm1.bias" in has else "rms",
        "qkv_bias": "no_key" if "attn.q_bias" in has else "attn.qkv.bias" in has,
        "qk_norm": "attn.q_norm.weight" in has,
        "layer_scale": 1e-5 if "ls1.gamma" in has or "gamma_1" in has else None,
        "mlp": "plain",
    }
    if fields["qk_norm"]:
        inner = shapes[f"{BLOCK}attn.qkv.weight"][0] // 3
        fields["num_heads"] = inner // shapes[f"{BLOCK}attn.q_norm.weight"][0]
    if "mlp.fc1_g.weight" in has:
        fields |= {"mlp": "swiglu_split", "activation": "silu"}
    elif shapes[f"{BLOCK}mlp.fc1.weight"][0] == 2 * fields["mlp_width"]:
        fields |= {"mlp": "swiglu_packed", "activation": "silu"}
    return fields


def _readout(shapes: Shapes) -> dict[str, Any]:
    representation = shapes.get("pre_logits.fc.weight")
    return {
        "num_classes": shapes.get("head.weight", (0,))[0],
        "class_token": "cls_token" in shapes,
        "distillation_token": "dist_token" in shapes,
        "num_registers": shapes.get("reg_token", (1, 0))[1],
        "embedding_norm": "norm_pre.weight" in shapes,
        "final_norm": "norm.weight" in shapes or "fc_norm.weight" in shapes,
        "norm_before_pool": "fc_norm.weight" not in shapes,
        "representation_width": representation[0] if representation else None,
    }


def _positions(
    header: Header,
    fields: Mapping[str, Any],
    overrides: Mapping[str, Any],
    said: Mapping[str, Any],
    warnings: list[str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What positions and the image's size certainly are, and what they probably are."""
    patch, table = fields["patch_size"], header.shapes.get("pos_embed")
    if table is None:
        rotary = _is_eva(header)
        if "positions" not in said:
            kind = "DINOv3's RoPE" if rotary else "none at all"
            warnings.append(f"no table of positions: taken for {kind}; positions= says else")
            if rotary and fields["qkv_bias"] is True:
                raise CheckpointError("rotary positions that are not DINOv3's; vitkit has no other")
        size = (256 if rotary else 224) // patch[0] or 1
        return {}, {
            "positions": "rope" if rotary else "none",
            "image_size": (size * patch[0], size * patch[1]),
        }
    if fields["mlp"] != "plain" and fields["qkv_bias"] == "no_key":
        raise CheckpointError("EVA-02's rotary positions beside a table are not known to vitkit")
    rows, prefix = table[1], fields["class_token"] + fields["distillation_token"]
    prefix += fields["num_registers"]
    _refuse_rotary(header, fields)
    placed: dict[str, Any] = {"positions": "learned"}
    asked = overrides.get("image_size")
    if asked is None:
        asked = _fitting(said.get("image_size"), patch, rows, prefix)
    if asked is not None:
        height, width = (asked, asked) if isinstance(asked, int) else tuple(asked)
        bare = (height // patch[0]) * (width // patch[1]) == rows
        covered = prefix if prefix == 0 or not bare else 0
    else:
        squares = [n for n in (prefix, 0) if rows > n and math.isqrt(rows - n) ** 2 == rows - n]
        covered = squares[0] if squares else prefix
        if len(set(squares)) > 1:
            covered = 0 if fields["num_registers"] else prefix
            covered = prefix * said.get("positions_cover_prefix", covered > 0)
            size = image_size(rows, covered, patch, None)
            warnings.append(
                f"{rows} rows of positions fit a square with and without the {prefix} prefix "
                f"tokens; taken for {size[0]} x {size[1]} pixels (image_size= says else)"
            )
            return placed, {"positions_cover_prefix": covered > 0, "image_size": size}
    size = image_size(rows, covered, patch, asked)
    placed["positions_cover_prefix"] = prefix == 0 or covered > 0
    if asked is None:  # a square number of rows is no proof of a square image
        return placed, {"image_size": size}
    return {**placed, "image_size": size}, {}


def _refuse_rotary(header: Header, fields: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` for what timm's `Eva` with a table computes by rotation besides.

    Its own class name, as timm's training writes it, and a full bias mean Perception Encoder.
    """
    named = timm_config.architecture_of(timm_config.config_of(header)) == "eva"
    if named and fields["qkv_bias"] is True:
        raise CheckpointError("timm's class Eva with rotary positions that vitkit does not know")


def _fitting(size: Any, patch: tuple[int, int], rows: int, prefix: int) -> Any:
    """A stated size, if the table has as many rows as it makes patches."""
    if size is None:
        return None
    patches = (size[0] // patch[0]) * (size[1] // patch[1])
    return size if patches in (rows, rows - prefix) else None


def _usual(shapes: Shapes, fields: Mapping[str, Any], rotary: bool) -> dict[str, Any]:
    mean = rotary or not fields["class_token"] or not fields["norm_before_pool"]
    mean = mean and not fields["distillation_token"]
    usual = {
        "num_heads": usual_heads(fields["width"]),
        "norm_eps": 1e-5 if fields["embedding_norm"] or rotary else 1e-6,
        "activation": "gelu",
        "pooling": "map" if "attn_pool.latent" in shapes else "mean" if mean else "cls",
        "block": "pre_norm",
        "position_resampling": "bicubic_antialias",
    }
    if rotary:
        usual["rope_temperature"] = 100.0
    if fields["stem"] == "resnet":
        usual["resnet_variant"] = "timm"
    return usual


UNFOLDED = Transform(
    lambda parts, spec: tuple(
        part.reshape(len(part), -1, *spec.patch_size) if part.ndim == 2 else part for part in parts
    ),
    AS_IS.to_theirs,
)
"""Old files' matrix of patches, channels first, to the kernel of a convolution."""
PARTS = ("attn.qkv.{p}", "attn.q_norm.{p}", "attn.k_norm.{p}", "attn.proj.{p}", "norm1.{p}",
         "norm2.{p}", "mlp.fc1.{p}", "mlp.fc1_g.{p}", "mlp.fc1_x.{p}", "mlp.fc2.{p}")  # fmt: skip
POOL = ("latent", "q.{p}", "kv.{p}", "proj.{p}", "norm.{p}", "mlp.fc1.{p}", "mlp.fc2.{p}")
AROUND = ("cls_token", "dist_token", "reg_token", "pos_embed", "norm_pre.{p}", "norm.{p}",
          "fc_norm.{p}", "pre_logits.fc.{p}", "head.{p}", "head_dist.{p}")  # fmt: skip


MAE = (
    ("mask_token", "stands for masked patches in MAE's pre-training"),
    ("decoder_*", "restores masked patches in MAE's pre-training"),
)


def table(spec: ViTSpec) -> Table:
    """Their names are ours; `Eva` has a few of its own."""
    eva = timm_config.is_eva(spec)
    same = [*AROUND, *(f"blocks.{{i}}.{part}" for part in PARTS)]
    same += [f"attn_pool.{part}" for part in POOL] if spec.pooling == "map" else []
    rows = [row("patch_embed.proj.{p}", "patch_embed.proj.{p}", UNFOLDED), *_backbone(spec)]
    rows += [row(name, name) for name in same]
    rows += [
        row(f"blocks.{{i}}.{theirs if eva else ours}", f"blocks.{{i}}.{ours}")
        for ours, theirs in EVA.items()
    ]
    unused = ("attn_pool.*", "attention pooling, which this model does without")
    return Table(tuple(rows), MAE if spec.pooling == "map" else (*MAE, unused))


def _backbone(spec: ViTSpec) -> list[Row]:
    if spec.stem != "resnet":
        return []
    names = [f"{root}{part}" for root in ("", "stem.") for part in ("conv.weight", "norm.{p}")]
    for stage, units in enumerate(spec.resnet_layers):
        for unit in range(units):
            parts = [p for n in (1, 2, 3) for p in (f"conv{n}.weight", f"norm{n}.{{p}}")]
            parts += ["downsample.conv.weight", "downsample.norm.{p}"]
            names += [f"stages.{stage}.blocks.{unit}.{part}" for part in parts]
    return [row(BACKBONE + name, BACKBONE + name) for name in names]


FIXED: dict[str, Any] = {
    "stem": ("convolution", "linear", "resnet"), "resnet_variant": ("timm",),
    "distilled_readout": ("mean",), "pooling": ("cls", "mean", "mean_all", "map"),
    "block": ("pre_norm", "res_post_norm"), "representation_width": (None,), "head_width": (None,),
}  # fmt: skip
"""What all of its classes compute; a `pre_logits` they drop. Any value of the other fields."""
HOLDS: tuple[Capabilities, ...] = (
    {**FIXED, "positions": ("learned", "none"), "qkv_bias": (True, False)},
    {**FIXED, "positions": ("learned",), "qkv_bias": ("no_key",), "mlp": ("plain",)},
    {**FIXED, "positions": ("rope",), "qkv_bias": ("no_key", False)},
)
"""`VisionTransformer`; `Eva` as it is for EVA, and for DINOv3."""


def write(bundle: Bundle) -> dict[str, FileWriter]:
    """A folder as on the Hub: `model.safetensors` and `config.json`."""
    config = timm_config.document(bundle.spec, bundle.preprocess, bundle.classes)
    return {
        "model.safetensors": safetensors_file(bundle),
        "config.json": FileWriter.of((json.dumps(config, indent=2) + "\n").encode()),
    }


FORMAT = Format(
    "timm", detect, prepare, infer, table, HOLDS, write,
    resampling=lambda spec: "bicubic_antialias",
)  # fmt: skip
