"""ImageNet-1k's class names, for a head of 1,000 rows whose file names none.

The order is that of the sorted WordNet ids (n01440764, n01443537, ...). All published heads of
1,000 classes have it: Google's and jeonsworld's (TensorFlow Datasets' `imagenet2012`), timm's,
torchvision's, DeiT's and DINOv2's (folders of images in sorted order), and those on the Hugging
Face Hub, which name their classes themselves. Heads of 11,821 or 21,843 rows get no names.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

from vitkit.spec import ViTSpec

ASSUMED = (
    "the file has no class names; its 1,000 classes are assumed to be those of ImageNet-1k, in "
    "order"
)
"""The warning in the metadata of a checkpoint whose class names are assumed."""


@functools.cache
def imagenet() -> Mapping[str, str]:
    """Return WordNet id -> short name of the 1,000 classes, in the order of the logits.

    The table is read at the first call.
    """
    text = resources.files("vitkit.weights").joinpath("imagenet.tsv").read_text(encoding="utf-8")
    lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return MappingProxyType(dict(lines))


def assumed_names(spec: ViTSpec, classes: tuple[str, ...]) -> tuple[str, ...]:
    """Return ImageNet-1k's names for a model of colour images with 1,000 classes and no names.

    Args:
        spec: the model.
        classes: the names in its file.

    Returns:
        1,000 names, or none for any other model.
    """
    # A grey model of 1,000 classes is no ImageNet model.
    if classes or spec.num_classes != 1000 or spec.in_channels != 3:
        return ()
    return tuple(imagenet().values())


def with_assumption(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's metadata with the warning that its class names are assumed."""
    sure = metadata.get("sure")
    if not isinstance(sure, Mapping):
        sure = {}
    warnings = metadata.get("warnings")
    if not isinstance(warnings, list):
        warnings = []
    return {
        **metadata,
        "sure": {**sure, "classes": "usual"},
        "warnings": [*(line for line in warnings if line != ASSUMED), ASSUMED],
    }


def names_are_assumed(classes: Sequence[str], metadata: Mapping[str, Any]) -> bool:
    """Return True if a checkpoint's metadata mark its class names as assumed.

    Args:
        classes: its class names.
        metadata: may be older than the names, as of a model that got another head since.
    """
    sure = metadata.get("sure")
    if not isinstance(sure, Mapping) or sure.get("classes") != "usual":
        return False
    # A head of other classes may carry the metadata of the checkpoint that it began with.
    return bool(classes) and set(classes) <= set(imagenet().values())
