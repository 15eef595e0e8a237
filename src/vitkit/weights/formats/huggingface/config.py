"""transformers' `config.json` and `preprocessor_config.json`, read and written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vitkit.errors import CheckpointError
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.formats.infer_spec import HALF, IMAGENET

ACTIVATIONS = {
    "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu",
    "silu": "silu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "swish": "silu",
}  # fmt: skip
"""Their name of an activation -> ours; the first that means ours is the one written."""
FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of resampling filters -> our names."""
CROPPED = IMAGENET.replace(interpolation="bicubic", crop_ratio=0.875)


class Family(NamedTuple):
    """What the classes of one model type have in common.

    Attributes:
        name: what the names of its classes begin with.
        norm_eps: the default of its config.
        resampling: how it brings positions to another grid.
        preprocess: what its published models' images become.
    """

    name: str
    norm_eps: float
    resampling: str
    preprocess: Preprocess


FAMILIES = {
    "vit": Family("ViT", 1e-12, "bicubic", HALF.replace(interpolation="bilinear", fit="squash")),
    "deit": Family("DeiT", 1e-12, "bicubic", CROPPED),
    "dinov2": Family("Dinov2", 1e-6, "bicubic", CROPPED),
    "dinov2_with_registers": Family("Dinov2WithRegisters", 1e-6, "bicubic_antialias", CROPPED),
}
"""By `model_type`, which is also the prefix of the names of a task model's tensors."""


@dataclass(frozen=True)
class Known:
    """What a `config.json` says.

    Attributes:
        there: whether there is one.
        fields: of `ViTSpec`.
        architecture: the class that wrote the file, or nothing.
        names: number of a class -> its name.
        sizes: fields that shapes decide, as it has them.
        pooler_act: the function after the pooler, which only models without a head read.
    """

    there: bool = False
    fields: dict[str, Any] = field(default_factory=dict)
    architecture: str = ""
    names: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)
    pooler_act: str = "tanh"


FIELDS = {"num_attention_heads": "num_heads", "layer_norm_eps": "norm_eps",
          "image_size": "image_size", "hidden_act": "activation"}  # fmt: skip
SIZES = {"hidden_size": "width", "num_hidden_layers": "depth", "intermediate_size": "mlp_width"}


def read_config(document: Mapping[str, Any] | None, family: str) -> Known:
    """The fields that a `config.json` has, under our names.

    Raises:
        CheckpointError: an activation that vitkit does not have.
    """
    if document is None:
        return Known()
    wanted = FIELDS | ({"layerscale_value": "layer_scale"} if family.startswith("dinov2") else {})
    fields = {ours: document[theirs] for theirs, ours in wanted.items() if theirs in document}
    if document.get("hidden_act", "gelu") not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise CheckpointError(
            f"config.json: hidden_act {document['hidden_act']!r} is none of {known}"
        )
    names = document.get("id2label") or {}
    if not isinstance(names, Mapping):
        raise CheckpointError("config.json: id2label is not an object of numbers and names")
    if "activation" in fields:
        fields["activation"] = ACTIVATIONS[fields["activation"]]
    return Known(
        there=True,
        fields=fields,
        architecture=str((document.get("architectures") or [""])[0]),
        names=names,
        sizes={ours: document[key] for key, ours in SIZES.items() if key in document},
        pooler_act=str(document.get("pooler_act", "tanh")),
    )


def class_names(known: Known, count: int) -> tuple[tuple[str, ...], list[str]]:
    """The K names in the order of the logits, or none and why."""
    names = {str(number): str(name) for number, name in known.names.items()}
    if count == 0 or all(name == f"LABEL_{number}" for number, name in names.items()):
        return (), []
    if set(names) != {str(number) for number in range(count)}:
        return (), [f"config.json names {len(names)} classes, the head has {count}; left out"]
    return tuple(names[str(number)] for number in range(count)), []


def doubts(
    known: Known, family: str, fields: Mapping[str, Any], overrides: Mapping[str, Any]
) -> list[str]:
    """A line for what `config.json` contradicts, and for what neither it nor a tensor states."""
    lines = [
        f"config.json says {name} {value}, the tensors {fields[name]}"
        for name, value in known.sizes.items()
        if value != fields[name]
    ]
    eps = FAMILIES[family].norm_eps
    if eps != 1e-6 and "norm_eps" not in {*known.fields, *overrides}:
        lines.append(
            f"norm_eps {eps:g} is transformers' default and nothing states it; weights that "
            f"Google or timm trained need norm_eps=1e-6"
        )
    if fields.get("distilled_readout") == "cls" and fields["num_classes"]:
        lines.append("DeiTForImageClassification has no distillation head; head_dist is zero")
    return lines


def read_preprocess(
    documents: Mapping[str, Mapping[str, Any]], family: str, size: tuple[int, int]
) -> tuple[Preprocess, set[str], list[str]]:
    """What images become; whether the file says so; a line for what vitkit does otherwise.

    Where vitkit cannot do exactly what the file says, the result is not the file's statement.

    Args:
        documents: beside the weights; `preprocessor` may be among them.
        family: decides what is usual.
        size: (H, W) of the model's images, in pixels.
    """
    document = documents.get("preprocessor")
    usual = FAMILIES[family].preprocess
    if document is None:
        return usual, set(), []
    lines: list[str] = []
    number = document.get("resample", 2 if family == "vit" else 3)
    if number not in FILTERS:
        lines.append(f"preprocessor_config.json: resample {number} is not in vitkit; bicubic it is")
    factor = document.get("rescale_factor", 1 / 255) if document.get("do_rescale", True) else 1
    if not isinstance(factor, int | float):
        raise CheckpointError("preprocessor_config.json: rescale_factor is not a number")
    scale = 255 * factor
    scale = 1 if math.isclose(scale, 1) else scale  # theirs normalise value * scale
    normed = document.get("do_normalize", True)
    mean, std = (
        tuple(value / scale for value in _values(document.get(key, default) if normed else plain))
        for key, default, plain in (("image_mean", usual.mean, 0.0), ("image_std", usual.std, 1.0))
    )
    fitted, size_there, doubt = _fit(document)
    if size_there not in (None, size):
        doubt.append(
            f"images become {size_there[0]} x {size_there[1]} there; here {size[0]} x {size[1]}, "
            f"as the model's positions are made for"
        )
    lines += [f"preprocessor_config.json: {line}" for line in doubt]
    read = usual.replace(mean=mean, std=std, interpolation=FILTERS.get(number, "bicubic"), **fitted)
    return read, set() if lines else {"preprocess"}, lines


Sides = tuple[int, int]


def _fit(document: Mapping[str, Any]) -> tuple[dict[str, Any], Sides | None, list[str]]:
    """`fit` and `crop_ratio`, the size (H, W) that results, and what is not the same here."""
    kind = str(document.get("image_processor_type") or document.get("feature_extractor_type") or "")
    keeps_shape = kind.startswith(("Bit", "CLIP"))
    crops = document.get("do_center_crop", keeps_shape or kind.startswith("DeiT"))
    crop = _sides(document.get("crop_size", 224)) if crops else None
    if not document.get("do_resize", True):
        return {"fit": "crop", "crop_ratio": 1.0}, crop, ["images are not resized there"]
    given = document.get("size", 224)
    if isinstance(given, Mapping) and "shortest_edge" in given:
        given, keeps_shape = given["shortest_edge"], True
    sides = _sides(given)
    if not keeps_shape and crop in (None, sides):
        return {"fit": "squash"}, sides, []
    if crop is None:
        return {"fit": "crop", "crop_ratio": 1.0}, None, ["images keep their shape there"]
    doubt = []
    if crop[0] > sides[0]:
        doubt.append("the cut is larger than the image there, and filled up")
    ratio = _ratio(crop[0], sides[0])
    if not keeps_shape and math.floor(crop[1] / ratio) != sides[1]:
        doubt.append(f"images are squashed to {sides[0]} x {sides[1]} there before they are cut")
    return {"fit": "crop" if keeps_shape else "squash-crop", "crop_ratio": ratio}, crop, doubt


def _ratio(crop: int, edge: int) -> float:
    """`crop / edge`, rounded so that `floor(crop / ratio)` is the edge again."""
    ratio = min(1.0, crop / edge)
    while math.floor(crop / ratio) < edge:
        ratio = math.nextafter(ratio, 0.0)
    return ratio


def _sides(value: Any) -> Sides:
    """(H, W) from one number, two, or a mapping."""
    if isinstance(value, Mapping):
        return int(value["height"]), int(value["width"])
    if isinstance(value, list):
        return int(value[0]), int(value[-1])
    return int(value), int(value)


def _values(value: Any) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,) * 3


def family(spec: ViTSpec) -> str:
    """The `model_type` that computes what a spec says.

    Raises:
        CheckpointError: none does.
    """
    dino = spec.layer_scale is not None
    tells = (
        (dino and spec.distillation_token, "a distillation token beside LayerScale"),
        (dino and spec.num_classes and spec.pooling == "cls",
         "a head that reads the class token alone after LayerScale (pooling 'cls_mean' has one)"),
        (dino and spec.representation_width, "a representation layer after LayerScale"),
        (not dino and spec.num_registers, "register tokens without LayerScale"),
        (not dino and spec.pooling != "cls", f"pooling {spec.pooling!r} without LayerScale"),
        (not dino and spec.mlp != "plain", f"mlp {spec.mlp!r} without LayerScale"),
        (spec.representation_width and spec.num_classes,
         "a head after a representation layer (num_classes=0 leaves the head out)"),
        (spec.representation_width and spec.distillation_token
         and spec.distilled_readout == "mean", "a representation layer on two tokens"),
    )  # fmt: skip
    for there, what in tells:
        if there:
            raise CheckpointError(f"no model of transformers has {what}")
    if dino:
        return "dinov2_with_registers" if spec.num_registers else "dinov2"
    return "deit" if spec.distillation_token else "vit"


def architecture(spec: ViTSpec) -> str:
    """The class that computes what a spec says. Without a head it is a base model where one fits:
    a task model with no classes hands out what its head would read."""
    model_type = family(spec)
    pooled = spec.pooling == "cls_mean" or model_type in ("vit", "deit")
    if spec.representation_width or not (spec.num_classes or pooled):
        return f"{FAMILIES[model_type].name}Model"
    taught = spec.distillation_token and spec.distilled_readout == "mean"
    return f"{FAMILIES[model_type].name}ForImageClassification{'WithTeacher' * taught}"


def is_task_model(architecture: str) -> bool:
    """Whether a class puts its family's name before its tensors' names."""
    return "ForImageClassification" in architecture


def config_json(spec: ViTSpec, classes: tuple[str, ...]) -> bytes:
    """`config.json`, with every number said even where it is the default.

    Raises:
        CheckpointError: DINOv2's classes do not go with the MLP's width or an oblong grid.
    """
    model_type = family(spec)
    names = classes or tuple(f"LABEL_{number}" for number in range(spec.num_classes))
    # The gated MLP's function is fixed there, and its config has the plain one's.
    activation = "gelu" if spec.mlp != "plain" else spec.activation
    document: dict[str, Any] = {
        "architectures": [architecture(spec)],
        "model_type": model_type,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.depth,
        "num_attention_heads": spec.num_heads,
        "hidden_act": next(name for name, ours in ACTIVATIONS.items() if ours == activation),
        "layer_norm_eps": spec.norm_eps,
        "image_size": _one_or_two(spec.image_size),
        "patch_size": _one_or_two(spec.patch_size),
        "num_channels": spec.in_channels,
        "qkv_bias": bool(spec.qkv_bias),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
    }
    if model_type in ("vit", "deit"):
        document |= {"intermediate_size": spec.mlp_width, "encoder_stride": spec.patch_size[0]}
        if spec.representation_width:
            document |= {"pooler_output_size": spec.representation_width, "pooler_act": "tanh"}
        return _bytes(document)
    if spec.grid[0] != spec.grid[1]:
        raise CheckpointError(f"{model_type} takes every grid for a square, not {spec.grid}")
    document |= {
        "mlp_ratio": _mlp_ratio(spec),
        "use_swiglu_ffn": spec.mlp != "plain",
        "layerscale_value": spec.layer_scale,
    }
    if spec.num_registers:
        return _bytes(document | {"num_register_tokens": spec.num_registers})
    return _bytes(document | {"use_mask_token": True})


def _mlp_ratio(spec: ViTSpec) -> int:
    """The whole number from which DINOv2's classes compute the MLP's width."""

    def made(ratio: int) -> int:
        hidden = spec.width * ratio
        return hidden if spec.mlp == "plain" else (int(hidden * 2 / 3) + 7) // 8 * 8

    ratios = range(1, 2 * spec.mlp_width // spec.width + 2)
    found = next((ratio for ratio in ratios if made(ratio) == spec.mlp_width), None)
    if found is None:
        raise CheckpointError(
            f"DINOv2's classes have no mlp_width {spec.mlp_width} for width {spec.width}; they "
            f"make it from a whole mlp_ratio, such as {made(4)} from 4"
        )
    return found


def _one_or_two(sides: Sides) -> int | list[int]:
    return sides[0] if sides[0] == sides[1] else list(sides)


def preprocessor_json(preprocess: Preprocess) -> bytes:
    """`preprocessor_config.json`; the classes are those that resize so in every version.

    Their cut starts at the floor of half the excess and ours at its nearest even number, so an
    excess of 3, 7, 11, ... pixels moves it by one.

    Raises:
        CheckpointError: a crop to an oblong, which theirs cannot size as ours.
    """
    height, width = preprocess.image_size
    document: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": next(n for n, name in FILTERS.items() if name == preprocess.interpolation),
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
        "do_convert_rgb": preprocess.channels == 3,
    }
    if preprocess.fit == "squash-crop":
        tall, wide = (math.floor(side / preprocess.crop_ratio) for side in (height, width))
        document |= {
            "image_processor_type": "DeiTImageProcessor",
            "size": {"height": tall, "width": wide},
            "do_center_crop": True,
            "crop_size": {"height": height, "width": width},
        }
    if preprocess.fit == "crop":
        if height != width:
            raise CheckpointError(
                f"transformers has no crop to {height} x {width}; pass --adapt.fit squash "
                f"(vitkit.adapt(checkpoint, fit='squash')), and images are squashed instead"
            )
        document |= {
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": math.floor(height / preprocess.crop_ratio)},
            "do_center_crop": True,
            "crop_size": {"height": height, "width": width},
        }
    return _bytes(document)


def _bytes(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"
