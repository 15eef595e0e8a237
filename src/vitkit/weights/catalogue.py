"""Published checkpoints by name, and ImageNet-1k's class names.

Names are timm's where timm has one (`vit_base_patch16_224.augreg2_in21k_ft_in1k`), else the source
and its own name (`google/sam/ViT-B_16`); a preset's name alone means the first of its checkpoints.
"""

from __future__ import annotations

import csv
import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from vitkit.errors import SettingError
from vitkit.messages import did_you_mean
from vitkit.models.presets import preset as preset_spec
from vitkit.models.presets import table
from vitkit.other_names import usual_name
from vitkit.spec import Preprocess, ViTSpec

IMAGE_STATISTICS = {
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "clip": ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "satellite": ((0.430, 0.411, 0.296), (0.213, 0.156, 0.143)),
    "unit": ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}
"""Name in the column `images` -> mean and standard deviation of each channel on [0, 1]."""
Terms = Literal["permissive", "non-commercial", "own terms", "not stated"]
TERMS: dict[str, Terms] = {
    "": "not stated",
    "apache-2.0": "permissive",
    "mit": "permissive",
    "cc-by-nc-4.0": "non-commercial",
    "fair-noncommercial-research-license": "non-commercial",
    "apple-amlr": "non-commercial",  # research purposes only
}
"""Licence -> its kind; any other licence has special terms, to be read first."""
PUBLISHED_PICKLES = (".pth", ".pth.tar", ".pt", ".bin")
"""Endings of pickles that are published; others are read as local files only."""


@dataclass(frozen=True)
class CatalogueEntry:
    """One published checkpoint.

    Attributes:
        name: in the catalogue, unique.
        preset: the vitkit model that it is for.
        source: title of the publisher.
        format: format of its file, one of `vitkit.formats()`.
        address: `timm://`, `hf://` or `https://`, as `vitkit.load` takes it.
        licence: as its publisher names it; empty where none is stated.
        classes: K of its head; 0 for none.
        image_size: side of its images, in pixels.
        preprocess: resizing and normalisation of its images, or `None` where only the file has it.
        stated: fields of `ViTSpec` to take from the preset, because the file does not have them.
        sha256: leading hex digits of the file's SHA-256, as far as its publisher states them.
        note: the data that it was trained on.
    """

    name: str
    preset: str
    source: str
    format: str
    address: str
    licence: str
    classes: int
    image_size: int
    preprocess: Preprocess | None
    stated: tuple[str, ...]
    sha256: str
    note: str

    @property
    def spec(self) -> ViTSpec:
        """The preset with this checkpoint's classes and image size."""
        return preset_spec(self.preset, num_classes=self.classes, image_size=self.image_size)

    @property
    def fields(self) -> dict[str, Any]:
        """The keywords with which `vitkit.load(entry.address, ...)` understands the file."""
        spec = self.spec
        return {name: getattr(spec, name) for name in self.stated}

    @property
    def terms(self) -> Terms:
        """The kind of its licence, as a first orientation; the licence itself decides."""
        return TERMS.get(self.licence, "own terms")

    @property
    def pickle(self) -> bool:
        """True for a pickle, which is not fetched without trust."""
        return self.address.endswith(PUBLISHED_PICKLES)


@functools.cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Return every entry by its name, in the order of the file, which is read at the first call."""
    text = resources.files("vitkit.weights").joinpath("catalogue.tsv").read_text(encoding="utf-8")
    # Lines that begin with # are comments; the first other line names the columns.
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    entries: dict[str, CatalogueEntry] = {}
    for row in csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE):
        assert row["name"] not in entries, f"catalogue.tsv has {row['name']} twice"
        entries[row["name"]] = _entry(row)
    return MappingProxyType(entries)


def list_models(
    pattern: str | Iterable[str] = "*",
    *,
    pretrained: bool = False,
    exclude_filters: str | Iterable[str] = (),
    include_tags: bool | None = None,
) -> list[str]:
    """Return the names that `create_model` knows, sorted.

    Args:
        pattern: shell-style, such as `"vit_base*"`, or several; a name is listed if one matches.
        pretrained: list only models with published weights.
        exclude_filters: one or several patterns of names to leave out.
        include_tags: list checkpoints, such as `vit_base_patch16_224.augreg_in1k`, in the place of
            their models; default: the value of `pretrained`. Patterns may then name the model or
            the checkpoint.

    >>> list_models("vit_huge_patch??_224")
    ['vit_huge_patch14_224', 'vit_huge_patch16_224', 'vit_huge_patch32_224']
    >>> list_models(["deit3_tiny*", "deit_tiny*"], exclude_filters="*distilled*")
    ['deit_tiny_patch16_224']
    >>> list_models("vit_tiny_patch16_224.*", pretrained=True)
    ['vit_tiny_patch16_224.augreg_in21k', 'vit_tiny_patch16_224.augreg_in21k_ft_in1k']
    """
    included, excluded = _patterns(pattern), _patterns(exclude_filters)
    presets_with_weights = {entry.preset for entry in catalogue().values()}
    tagged = pretrained if include_tags is None else include_tags
    # Name of a list entry -> name of its model.
    names = {name: name for name in table() if name in presets_with_weights or not pretrained}
    if tagged:
        names = {name: model for name, model in names.items() if name not in presets_with_weights}
        names |= {name: entry.preset for name, entry in catalogue().items()}
    return sorted(
        name
        for name, model in names.items()
        if _matches(name, model, included or ["*"]) and not _matches(name, model, excluded)
    )


def _patterns(patterns: str | Iterable[str]) -> list[str]:
    if isinstance(patterns, str):
        return [patterns] if patterns else []
    return list(patterns)


def _matches(name: str, model: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) or fnmatchcase(model, pattern) for pattern in patterns)


def find(name: str) -> CatalogueEntry:
    """Return the entry of this name; for a preset's name, its first.

    Raises:
        SettingError: no such entry, with those that are nearest; a model without published weights.
    """
    entries = catalogue()
    name = usual_name(name, table())
    if name in entries:
        return entries[name]
    of_preset = published(name)
    if of_preset:
        return of_preset[0]  # the default comes first
    model, _, tag = name.partition(".")
    tags = [other.partition(".")[2] for other in entries if other.startswith(f"{model}.")]
    if tags:
        near = did_you_mean(tag, tags)
        raise SettingError(f"{model} has no checkpoint {tag!r}{near}; it has {', '.join(tags)}")
    if model in table():
        raise SettingError(
            f"no weights are published for {model}; `vitkit models --pretrained` lists the "
            "published ones"
        )
    raise SettingError(
        f"there is no checkpoint {name!r}{suggested(name)}; `vitkit models --pretrained` lists all"
    )


def suggested(name: str) -> str:
    """Return a hint with the names that are nearest, empty if none is near."""
    entries = catalogue()
    presets = {entry.preset: None for entry in entries.values()}
    return did_you_mean(name, [*entries, *presets], count=3)


def published(preset: str) -> list[CatalogueEntry]:
    """Return the checkpoints of a preset, the default first; none where nothing is published."""
    return [entry for entry in catalogue().values() if entry.preset == preset]


def known(path: str | Path) -> CatalogueEntry | None:
    """Return the entry of a name or an address; `None` for files and unlisted addresses.

    A file or a folder of that name goes first. Nothing is fetched.
    """
    address = str(path)
    if os.path.exists(address):
        return None
    name = address.removeprefix("timm://")
    is_listed = name in catalogue() or bool(published(name))
    # A name with a slash, such as google/sam/ViT-B_16, is no model of timm.
    if is_listed and (name == address or "/" not in name):
        return find(name)
    return _by_address().get(address)


@functools.cache
def _by_address() -> dict[str, CatalogueEntry]:
    # Two models of timm may be the same file: the first in the catalogue is the one meant.
    return {entry.address: entry for entry in reversed([*catalogue().values()])}


def _entry(row: Mapping[str, str]) -> CatalogueEntry:
    """Return the entry of a line, column -> text."""
    image_size = int(row["pixels"])
    preprocess = None
    # An empty column: the file itself has its preprocessing, or nothing is published on it.
    if row["images"]:
        mean, std = IMAGE_STATISTICS[row["images"]]
        transform = {
            "image_size": image_size,
            "mean": mean,
            "std": std,
            "interpolation": row["interpolation"],
            "fit": row["fit"],
            "crop_ratio": float(row["crop_ratio"]),
        }
        preprocess = Preprocess.from_json(transform)
    return CatalogueEntry(
        name=row["name"],
        preset=row["preset"],
        source=row["source"],
        format=row["format"],
        address=row["address"],
        licence=row["licence"],
        classes=int(row["classes"]),
        image_size=image_size,
        preprocess=preprocess,
        stated=tuple(row["stated"].split()),  # separated by spaces
        sha256=row["sha256"],
        note=row["note"],
    )


# ImageNet-1k's class names, for a head of 1,000 rows whose file names none.
#
# The order is that of the sorted WordNet ids (n01440764, n01443537, ...). All published heads of
# 1,000 classes have it: Google's and jeonsworld's (TensorFlow Datasets' `imagenet2012`), timm's,
# torchvision's, DeiT's and DINOv2's (folders of images in sorted order), and those on the Hugging
# Face Hub, which name their classes themselves. Heads of 11,821 or 21,843 rows get no names.

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
