"""transformers' `preprocessor_config.json`, read and written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vitkit.errors import CheckpointError
from vitkit.spec import Preprocess
from vitkit.weights.formats.huggingface.config import FAMILIES, json_bytes

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
    if their_size not in (None, size):
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
    if not isinstance(factor, int | float):
        raise CheckpointError("preprocessor_config.json: rescale_factor is not a number")
    # (value * factor - mean) / std = (value / 255 - mean / scale) / (std / scale).
    scale = 255 * factor
    if math.isclose(scale, 1):  # 1 / 255 as a decimal number, so that mean and std stay exact
        scale = 1
    mean: Any = 0.0
    std: Any = 1.0
    if document.get("do_normalize", True):
        mean = document.get("image_mean", usual.mean)
        std = document.get("image_std", usual.std)
    return (
        tuple(value / scale for value in _per_channel(mean)),
        tuple(value / scale for value in _per_channel(std)),
    )


def _per_channel(value: Any) -> tuple[float, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,) * 3


def _fit(document: Mapping[str, Any]) -> tuple[dict[str, Any], Sides | None, list[str]]:
    """Return `fit` and `crop_ratio`, the size (H, W) that results, and differences from theirs."""
    kind = str(document.get("image_processor_type") or document.get("feature_extractor_type") or "")
    # ViT's and DeiT's processors squash; Bit's and CLIP's resize the shorter side.
    keeps_shape = kind.startswith(("Bit", "CLIP"))
    # Absent entries have the default of their class, and the classes differ.
    crops = document.get("do_center_crop", keeps_shape or kind.startswith("DeiT"))
    crop = _sides(document.get("crop_size", 224)) if crops else None
    if not document.get("do_resize", True):
        return {"fit": "crop", "crop_ratio": 1.0}, crop, ["images are not resized there"]
    size = document.get("size", 224)
    if isinstance(size, Mapping) and "shortest_edge" in size:
        size = size["shortest_edge"]  # a processor of any kind keeps the shape then
        keeps_shape = True
    sides = _sides(size)
    if not keeps_shape and crop in (None, sides):
        return {"fit": "squash"}, sides, []
    if crop is None:
        return {"fit": "crop", "crop_ratio": 1.0}, None, ["images keep their shape there"]
    differences: list[str] = []
    if crop[0] > sides[0]:
        differences.append("the crop is larger than the image there, and padded")
    ratio = _crop_ratio(crop[0], sides[0])
    if not keeps_shape and math.floor(crop[1] / ratio) != sides[1]:
        differences.append(
            f"images are squashed to {sides[0]} x {sides[1]} there before they are cropped"
        )
    fit = "crop" if keeps_shape else "squash-crop"
    return {"fit": fit, "crop_ratio": ratio}, crop, differences


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
    return json_bytes(document)
