"""Published checkpoints by name: the entries of `catalogue.toml`.

Names are timm's where timm has one (`vit_base_patch16_224.augreg2_in21k_ft_in1k`), else the source
and its own name (`google/sam/ViT-B_16`); a preset's name alone means the first of its checkpoints.
"""

from __future__ import annotations

import functools
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vitkit.errors import SettingError
from vitkit.messages import did_you_mean
from vitkit.models.presets import preset as preset_spec
from vitkit.models.presets import table
from vitkit.spec import Preprocess, ViTSpec

SOURCES = ("timm", "torchvision", "google", "deit", "dinov2", "huggingface")
"""The sections of the file, in the order in which a preset's checkpoints are listed."""
PUBLISHED_PICKLES = (".pth", ".pth.tar", ".pt", ".bin")
"""Endings of pickles that are published; others are read as local files only."""
DIGITS = re.compile(r"-([0-9a-f]{8,64})$")
"""The digest that some publishers put at the end of a file's name."""


@dataclass(frozen=True)
class CatalogueEntry:
    """One published checkpoint.

    Attributes:
        name: in the catalogue, unique.
        preset: the vitkit model that it is for.
        source: title of the publisher.
        format: of its file, one of `vitkit.formats()`.
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
    def pickle(self) -> bool:
        """True for a pickle, which is not fetched without trust."""
        return self.address.endswith(PUBLISHED_PICKLES)


@functools.cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Return every entry by its name, in the order of the file, which is read at the first call."""
    text = resources.files("vitkit.weights").joinpath("catalogue.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    entries: dict[str, CatalogueEntry] = {}
    for section in SOURCES:
        for name, preset, facts in _checkpoints(data[section]):
            assert name not in entries, f"catalogue.toml has {name} twice"
            entries[name] = _entry(name, preset, facts, data)
    return MappingProxyType(entries)


def find(name: str) -> CatalogueEntry:
    """Return the entry of this name; for a preset's name, its first.

    Raises:
        SettingError: no such entry, with those that are nearest; a model without published weights.
    """
    entries = catalogue()
    if name in entries:
        return entries[name]
    of_preset = published(name)
    if of_preset:
        return of_preset[0]  # the default comes first
    model, _, tag = name.partition(".")
    tags = [other.partition(".")[2] for other in entries if other.startswith(f"{model}.")]
    if tags:
        near = did_you_mean(tag, tags)
        raise SettingError(f"{model} has no checkpoint {tag!r}{near} (it has {', '.join(tags)})")
    if model in table():
        raise SettingError(
            f"no weights are published for {model}; `vitkit models --pretrained` lists what is"
        )
    presets = {entry.preset for entry in entries.values()}
    near = did_you_mean(name, [*entries, *presets], count=3)
    raise SettingError(
        f"there is no checkpoint {name!r}{near} (`vitkit models --pretrained` lists all)"
    )


def published(preset: str) -> list[CatalogueEntry]:
    """Return the checkpoints of a preset, the default first; none where nothing is published."""
    return [entry for entry in catalogue().values() if entry.preset == preset]


def known(path: str | Path) -> CatalogueEntry | None:
    """Return the entry that a name or an address means; `None` for files and unlisted addresses.

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


def _checkpoints(section: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield name, preset and facts of each checkpoint of a source.

    A source lists checkpoints one by one (`checkpoints`), or by preset and tag (`presets`), where
    `groups` of tags share facts. Later facts override earlier ones.
    """
    shared = {key: value for key, value in section.items() if not isinstance(value, dict | list)}
    shared["stated"] = section.get("stated", ())
    for name, (preset, *rest) in section.get("checkpoints", {}).items():
        facts = dict(shared)
        if rest:
            facts["file"] = rest[0]
        facts |= _facts_by_pattern(section, name)
        if len(rest) > 1:
            facts |= rest[1]
        yield name, preset, facts
    for preset, tags in section.get("presets", {}).items():
        for tag in tags:
            name = f"{preset}.{tag}"
            group = next(group for group in section.get("groups", []) if tag in group["tags"])
            facts = dict(shared)
            facts |= {key: value for key, value in group.items() if key not in ("tags", "where")}
            facts |= group["tags"][tag]
            facts |= _facts_by_pattern(group, name)
            yield name, preset, facts


def _facts_by_pattern(group: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the facts of all patterns in `where` that match a name; the last one wins."""
    facts: dict[str, Any] = {}
    for pattern, more in group.get("where", {}).items():
        if fnmatchcase(name, pattern):
            facts |= more
    return facts


def _entry(name: str, preset: str, facts: dict[str, Any], data: dict[str, Any]) -> CatalogueEntry:
    """Return the entry of a checkpoint, with what its name and its preset decide filled in."""
    model = table()[preset].fields
    size = facts.get("image_size", model["image_size"])
    file = facts.get("file", "")
    # The last part of a name says what the head was trained on, such as in1k or in21k.
    last_part = re.split(r"[._]", name)[-1]
    classes = data["classes"].get(last_part, model.get("num_classes", ViTSpec().num_classes))
    sha256 = ""
    if facts.get("digits"):
        match = DIGITS.search(file)
        sha256 = match[1] if match else ""
    # Some sources name their files without a part of our name.
    published_name = name.replace(facts["without"], "") if "without" in facts else name
    return CatalogueEntry(
        name=name,
        preset=preset,
        source=facts["title"],
        format=facts["format"],
        address=facts["address"].format(name=published_name, preset=preset, file=file),
        licence=facts.get("licence", ""),
        classes=facts.get("classes", classes),
        image_size=size,
        preprocess=_preprocess(facts, size, data),
        stated=tuple(facts["stated"]),
        sha256=sha256,
        note=facts["note"],
    )


def _preprocess(facts: dict[str, Any], size: Any, data: dict[str, Any]) -> Preprocess | None:
    if "images" not in facts:
        return None
    mean, std = data["images"][facts["images"]]
    return Preprocess(
        image_size=size,
        mean=mean,
        std=std,
        interpolation=facts["interpolation"],
        fit=facts["fit"],
        crop_ratio=facts["crop_ratio"],
    )
