"""transformers' `config.json` and `preprocessor_config.json`, read and written."""

import json
import math
from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from vitkit.errors import CheckpointError
from vitkit.spec import Preprocess, ViTSpec
from vitkit.weights.formats.format import HALF_MEAN, IMAGENET_MEAN

HF_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
}
"""Their name of an activation -> ours; the first that means ours is the one written."""
_CROPPED = IMAGENET_MEAN.replace(interpolation="bicubic", crop_ratio=0.875)


class ModelFamily(NamedTuple):
    """The classes of one model type.

    Attributes:
        name: start of the names of its classes.
        norm_eps: the default of its config.
        resampling: resampling of positions for another grid.
        preprocess: preprocessing of its published models.
    """

    name: str
    norm_eps: float
    resampling: str
    preprocess: Preprocess


FAMILIES = {
    "vit": ModelFamily(
        "ViT", 1e-12, "bicubic", HALF_MEAN.replace(interpolation="bilinear", fit="squash")
    ),
    "deit": ModelFamily("DeiT", 1e-12, "bicubic", _CROPPED),
    "dinov2": ModelFamily("Dinov2", 1e-6, "bicubic", _CROPPED),
    "dinov2_with_registers": ModelFamily(
        "Dinov2WithRegisters", 1e-6, "bicubic_antialias", _CROPPED
    ),
}
"""By `model_type`, which is also the prefix of the names of a task model's tensors."""


_FIELDS = {
    "num_attention_heads": "num_heads",
    "layer_norm_eps": "norm_eps",
    "image_size": "image_size",
    "hidden_act": "activation",
}
_SIZES = {"hidden_size": "width", "num_hidden_layers": "depth", "intermediate_size": "mlp_width"}
"""Entries that shapes decide."""


def stated_fields(config: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Return the spec fields that a `config.json` states.

    Args:
        config: the JSON, empty where there is none.
        family: a key of `FAMILIES`.

    Raises:
        CheckpointError: an activation that vitkit does not have.
    """
    # Entries that are not in the tables are decided by shapes, or change no output.
    known = dict(_FIELDS)
    if family.startswith("dinov2"):
        known["layerscale_value"] = "layer_scale"
    fields: dict[str, Any] = {}
    for theirs, ours in known.items():
        if theirs in config:
            fields[ours] = config[theirs]
    activation = fields.get("activation", "gelu")
    if activation not in HF_ACTIVATIONS:
        known_names = ", ".join(HF_ACTIVATIONS)
        raise CheckpointError(f"config.json: hidden_act {activation!r} is none of {known_names}")
    if "activation" in fields:
        fields["activation"] = HF_ACTIVATIONS[activation]
    return fields


def hf_class_names(config: Mapping[str, Any], count: int) -> tuple[tuple[str, ...], list[str]]:
    """Return the K names in the order of the logits, or none and a warning."""
    labels = config.get("id2label") or {}
    if not isinstance(labels, Mapping):
        raise CheckpointError("config.json: id2label must map numbers to names")
    names = {str(number): str(name) for number, name in labels.items()}
    # transformers names the classes LABEL_0, LABEL_1, ... where the user gave no names.
    if count == 0 or all(name == f"LABEL_{number}" for number, name in names.items()):
        return (), []
    numbers = list(map(str, range(count)))
    if set(names) == set(numbers):
        return tuple(names[number] for number in numbers), []
    line = f"config.json names {len(names)} classes, the head has {count}; the names are left out"
    return (), [line]


def config_warnings(
    config: Mapping[str, Any], family: str, fields: Mapping[str, Any], stated: Container[str]
) -> list[str]:
    """Return a line for each contradiction of `config.json`, and for each value nothing states.

    Args:
        config: the JSON, empty where there is none.
        family: a key of `FAMILIES`.
        fields: inferred spec fields.
        stated: those of them that the file or the user states.
    """
    lines: list[str] = []
    for theirs, name in _SIZES.items():
        if config.get(theirs, fields[name]) != fields[name]:
            lines.append(f"config.json has {name} {config[theirs]}, the tensors {fields[name]}")
    # Published ViT and DeiT were trained with 1e-6, but the class defaults to 1e-12.
    eps = FAMILIES[family].norm_eps
    if eps != 1e-6 and "norm_eps" not in stated:
        lines.append(
            f"norm_eps {eps:g} is transformers' default, as the file does not state it; weights "
            "trained by Google or timm need norm_eps=1e-6"
        )
    if fields.get("distilled_readout") == "cls" and fields["num_classes"]:
        lines.append("DeiTForImageClassification has no distillation head; head_dist is zero")
    return lines


def model_type(spec: ViTSpec) -> str:
    """Return the `model_type` that computes a spec, a key of `FAMILIES`."""
    if spec.layer_scale is not None:
        if spec.num_registers:
            return "dinov2_with_registers"
        return "dinov2"
    if spec.distillation_token:
        return "deit"
    return "vit"


def hf_class(spec: ViTSpec) -> str:
    """Return the name of the class that computes a spec.

    Without a head it is a base model where one fits: a task model with no classes returns the input
    of its head.
    """
    family = model_type(spec)
    name = FAMILIES[family].name
    # Their base models of DINOv2 give the class token; those of ViT and DeiT have a pooler.
    pooled = spec.pooling == "cls_mean" or family in ("vit", "deit")
    if spec.representation_width or not (spec.num_classes or pooled):
        return f"{name}Model"
    if spec.distillation_token and spec.distilled_readout == "mean":
        return f"{name}ForImageClassificationWithTeacher"
    return f"{name}ForImageClassification"


def is_task_model(architecture: str) -> bool:
    """Return True for a class that puts its family's name before its tensors' names."""
    return "ForImageClassification" in architecture


def config_json(spec: ViTSpec, classes: tuple[str, ...]) -> bytes:
    """Return `config.json`, with every number written even where it is the default.

    Raises:
        CheckpointError: an MLP width or an oblong grid that DINOv2's classes cannot have.
    """
    family = model_type(spec)
    names = classes or tuple(f"LABEL_{number}" for number in range(spec.num_classes))
    # The gated MLP's function is fixed there, and its config has the plain one's.
    activation = "gelu" if spec.mlp != "plain" else spec.activation
    document: dict[str, Any] = {
        "architectures": [hf_class(spec)],
        "model_type": family,
        "hidden_size": spec.width,
        "num_hidden_layers": spec.depth,
        "num_attention_heads": spec.num_heads,
        "hidden_act": next(name for name, ours in HF_ACTIVATIONS.items() if ours == activation),
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
    # ViT and DeiT state the width of the MLP, DINOv2 its ratio to the width of a token.
    if family in ("vit", "deit"):
        document |= {"intermediate_size": spec.mlp_width, "encoder_stride": spec.patch_size[0]}
        if spec.representation_width:
            document |= {"pooler_output_size": spec.representation_width, "pooler_act": "tanh"}
        return _json_bytes(document)
    if spec.grid[0] != spec.grid[1]:
        raise CheckpointError(f"{family} assumes a square grid, not {spec.grid}")
    document |= {
        "mlp_ratio": _mlp_ratio(spec),
        "use_swiglu_ffn": spec.mlp != "plain",
        "layerscale_value": spec.layer_scale,
    }
    if spec.num_registers:
        document["num_register_tokens"] = spec.num_registers
    else:
        document["use_mask_token"] = True
    return _json_bytes(document)


def _mlp_ratio(spec: ViTSpec) -> int:
    """Return the whole number from which DINOv2's classes compute the MLP's width."""

    def mlp_width(ratio: int) -> int:
        hidden = spec.width * ratio
        if spec.mlp == "plain":
            return hidden
        return (int(hidden * 2 / 3) + 7) // 8 * 8  # rounded up to a multiple of 8

    # The ratio is a whole number in their config, so not every width can be stated.
    for ratio in range(1, 2 * spec.mlp_width // spec.width + 2):
        if mlp_width(ratio) == spec.mlp_width:
            return ratio
    raise CheckpointError(
        f"DINOv2's classes have no mlp_width {spec.mlp_width} for width {spec.width}; they need "
        f"a whole mlp_ratio, such as {mlp_width(4)} for 4"
    )


def _one_or_two(sides: tuple[int, int]) -> int | list[int]:
    # As in published files: one number is a square.
    if sides[0] == sides[1]:
        return sides[0]
    return list(sides)


def _json_bytes(document: Mapping[str, Any]) -> bytes:
    """Return a document as transformers lays out its JSON files."""
    return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


# transformers' `preprocessor_config.json`, read and written.

PILLOW_FILTERS = {0: "nearest", 2: "bilinear", 3: "bicubic"}
"""Pillow's numbers of resampling filters -> our names."""

Sides = tuple[int, int]


def read_preprocessor(
    documents: Mapping[str, Mapping[str, Any]], family: str, size: Sides
) -> tuple[Preprocess, set[str], list[str]]:
    """Read the preprocessing of a folder.

    Args:
        documents: beside the weights; `preprocessor` may be among them.
        family: a key of `FAMILIES`, for values that are not stated.
        size: (H, W) of the model's images, in pixels.

    Returns:
        The preprocessing; `{"preprocess"}` if it is exactly the file's, else an empty set; a line
        for each step that vitkit does otherwise.
    """
    document = documents.get("preprocessor")
    usual = FAMILIES[family].preprocess
    if document is None:
        return usual, set(), []
    lines: list[str] = []
    number = document.get("resample", 2 if family == "vit" else 3)
    if number not in PILLOW_FILTERS:
        lines.append(
            f"preprocessor_config.json: resample {number} is not supported; bicubic is used instead"
        )
    mean, std = _mean_and_std(document, usual)
    fit, their_size, differences = _fit(document)
    if their_size != size:
        differences.append(
            f"images become {their_size[0]} x {their_size[1]} there; {size[0]} x {size[1]} here, "
            "as the model's positions require"
        )
    lines += [f"preprocessor_config.json: {line}" for line in differences]
    interpolation = PILLOW_FILTERS.get(number, "bicubic")
    preprocess = usual.replace(mean=mean, std=std, interpolation=interpolation, **fit)
    return preprocess, set() if lines else {"preprocess"}, lines


def _mean_and_std(
    document: Mapping[str, Any], usual: Preprocess
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation on the scale [0, 1] of our images.

    Theirs normalise value * rescale_factor, with values in [0, 255].
    """
    factor = document.get("rescale_factor", 1 / 255) if document.get("do_rescale", True) else 1
    if not isinstance(factor, int | float):  # a long text would be repeated 255 times
        raise CheckpointError("preprocessor_config.json: rescale_factor is not a number")
    # (value * factor - mean) / std = (value / 255 - mean / scale) / (std / scale).
    scale = 255 * factor
    if math.isclose(scale, 1):  # 1 / 255 as a decimal number, so that mean and std stay exact
        scale = 1
    given: dict[str, Any] = {"image_mean": 0.0, "image_std": 1.0}
    if document.get("do_normalize", True):
        given = {"image_mean": usual.mean, "image_std": usual.std, **document}
    mean, std = (_per_channel(given[name]) for name in ("image_mean", "image_std"))
    return tuple(value / scale for value in mean), tuple(value / scale for value in std)


def _per_channel(value: Any) -> tuple[float, ...]:
    if isinstance(value, (list, tuple)):
        return tuple(value)
    return (value,) * 3


def _fit(document: Mapping[str, Any]) -> tuple[dict[str, Any], Sides, list[str]]:
    """Return `fit` and `crop_ratio`, the size (H, W) that results, and a line if theirs differs."""
    kind = str(document.get("image_processor_type") or document.get("feature_extractor_type") or "")
    size = document.get("size", 224)
    # ViT's and DeiT's processors squash; Bit's and CLIP's resize the shorter side, and so do all
    # that name it. Absent entries have the default of their class, and the classes differ.
    keeps_shape = kind.startswith(("Bit", "CLIP"))
    if isinstance(size, Mapping) and "shortest_edge" in size:
        size, keeps_shape = size["shortest_edge"], True
    sides = _sides(size)
    is_cropped = document.get("do_center_crop", keeps_shape or kind.startswith("DeiT"))
    crop = _sides(document.get("crop_size", 224)) if is_cropped else sides
    if not keeps_shape and crop == sides:
        fit: dict[str, Any] = {"fit": "squash"}
        is_same = True
    else:
        ratio = _crop_ratio(crop[0], sides[0])
        fit = {"fit": "crop" if keeps_shape else "squash-crop", "crop_ratio": ratio}
        is_padded = crop[0] > sides[0]
        is_same = math.floor(crop[1] / ratio) == sides[1] or keeps_shape
        is_same = is_same and is_cropped and not is_padded
    if is_same and document.get("do_resize", True):
        return fit, crop, []
    return fit, crop, ["images are resized or cropped in another way there"]


def _crop_ratio(crop: int, edge: int) -> float:
    """Return `crop / edge`, rounded so that `floor(crop / ratio)` is the edge again."""
    # Ours is a ratio, theirs two sizes: the ratio must give back the same whole edge.
    ratio = min(1.0, crop / edge)
    while math.floor(crop / ratio) < edge:
        ratio = math.nextafter(ratio, 0.0)
    return ratio


def _sides(value: Any) -> Sides:
    """Return (H, W) of one number, two, or a mapping."""
    if isinstance(value, Mapping):
        return int(value["height"]), int(value["width"])
    if isinstance(value, list):
        return int(value[0]), int(value[-1])
    return int(value), int(value)


def preprocessor_json(preprocess: Preprocess) -> bytes:
    """Return `preprocessor_config.json`, for the classes that resize so in every version.

    Their cut starts at the floor of half the excess and ours at its nearest even number, so an
    excess of 3, 7, 11, ... pixels moves it by one.

    Raises:
        CheckpointError: a crop to an oblong, for which theirs cannot resize as ours.
    """
    height, width = preprocess.image_size
    resample = next(n for n, name in PILLOW_FILTERS.items() if name == preprocess.interpolation)
    document: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": resample,
        "do_center_crop": False,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(preprocess.mean),
        "image_std": list(preprocess.std),
        "do_convert_rgb": preprocess.channels == 3,
    }
    cut = {"do_center_crop": True, "crop_size": {"height": height, "width": width}}
    resized = [math.floor(side / preprocess.crop_ratio) for side in (height, width)]
    if preprocess.fit == "squash-crop":
        document["image_processor_type"] = "DeiTImageProcessor"
        document["size"] = {"height": resized[0], "width": resized[1]}
        document |= cut
    if preprocess.fit == "crop":
        if height != width:
            raise CheckpointError(
                f"transformers has no crop to {height} x {width}; to squash images instead, pass "
                "--adapt.fit squash (vitkit.adapt(checkpoint, fit='squash'))"
            )
        document["image_processor_type"] = "BitImageProcessor"
        document["size"] = {"shortest_edge": resized[0]}
        document |= cut
    return _json_bytes(document)
