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
from typing import TYPE_CHECKING, Any

from vitkit.spec import ViTSpec

if TYPE_CHECKING:
    from vitkit.weights.checkpoint import Checkpoint

ASSUMED = "the file names no classes; its 1,000 are assumed to be those of ImageNet-1k, in order"


@functools.cache
def imagenet() -> Mapping[str, str]:
    """WordNet id -> short name of the 1,000 classes, in the order of the logits.

    The table is read at the first call.
    """
    text = resources.files("vitkit.weights").joinpath("imagenet.tsv").read_text(encoding="utf-8")
    lines = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return MappingProxyType(dict(lines))


def assumed_names(spec: ViTSpec, classes: tuple[str, ...]) -> tuple[str, ...]:
    """ImageNet-1k's names for a model of colour images with 1,000 classes and no names, or none.

    Args:
        spec: the model.
        classes: the names that its file has.
    """
    if classes or spec.num_classes != 1000 or spec.in_channels != 3:
        return ()
    return tuple(imagenet().values())


def with_assumption(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's metadata, with a warning that its class names are an assumption."""
    sure, warnings = metadata.get("sure"), metadata.get("warnings")
    return {
        **metadata,
        "sure": {**(sure if isinstance(sure, Mapping) else {}), "classes": "usual"},
        "warnings": [*(warnings if isinstance(warnings, list) else []), ASSUMED],
    }


def names_are_assumed(classes: Sequence[str], metadata: Mapping[str, Any]) -> bool:
    """Whether the metadata of a checkpoint, or of a file made of one, say that its names are.

    They may be older than the names, as of a model that has been given another head since.
    """
    sure = metadata.get("sure")
    said = isinstance(sure, Mapping) and sure.get("classes") == "usual"
    return said and bool(classes) and set(classes) <= set(imagenet().values())


def names_for_data(checkpoint: Checkpoint, names: Sequence[str]) -> tuple[str, ...]:
    """A checkpoint's K class names as a data set writes them; none where they only are assumed
    and the data have others.

    Args:
        checkpoint: whose assumed names also match WordNet ids, such as folders called n01440764.
        names: the classes of the data.
    """
    if not checkpoint.classes_assumed or set(names) <= set(checkpoint.classes):
        return checkpoint.classes
    numbers = tuple(imagenet())
    return numbers if set(names) <= set(numbers) else ()
