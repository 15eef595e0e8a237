"""Published checkpoints by name: the lines of `catalogue.toml`, where each of them stands once.

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

from vitkit.errors import SettingError, did_you_mean
from vitkit.models.presets import preset as preset_spec
from vitkit.models.presets import table
from vitkit.spec import Preprocess, ViTSpec

SOURCES = ("timm", "torchvision", "google", "deit", "dinov2", "huggingface")
"""The sections of the file, in the order in which a preset's checkpoints are listed."""
PICKLES = (".pth", ".pth.tar", ".pt", ".bin")
TRUST = (
    "say --trust-pickle (trust_pickle=True); a command without that flag takes what vitkit convert "
    "FILE OUT --to vitkit --trust-pickle makes of it"
)
"""How somebody says that a pickle may be read."""
DIGITS = re.compile(r"-([0-9a-f]{8,64})$")


@dataclass(frozen=True)
class Entry:
    """One published checkpoint.

    Attributes:
        name: in the catalogue, unique.
        preset: the vitkit model that it is for.
        source: the title of who publishes it.
        format: what its file is, as in `vitkit.formats()`.
        address: what `vitkit.load` fetches: `timm://`, `hf://` or `https://`.
        licence: as its publisher names it; empty where none is stated.
        classes: K of its head; 0 for none.
        image_size: side of its images, in pixels.
        preprocess: what images become, or `None` where only the file says it.
        stated: fields of `ViTSpec` to take from the preset, because the file does not say them.
        sha256: leading hex digits of the file's SHA-256, as far as its publisher states them.
        note: what it was trained on.
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
        """Whether it is a pickle, which is not fetched without trust."""
        return self.address.endswith(PICKLES)


@functools.cache
def catalogue() -> Mapping[str, Entry]:
    """Every entry by its name, in the order of the file, which is read at the first call."""
    text = resources.files("vitkit.weights").joinpath("catalogue.toml").read_text(encoding="utf-8")
    data = tomllib.loads(text)
    entries: dict[str, Entry] = {}
    for section in SOURCES:
        for name, preset, facts in _lines(data[section]):
            assert name not in entries, f"catalogue.toml has {name} twice"
            entries[name] = _entry(name, preset, facts, data)
    return MappingProxyType(entries)


def find(name: str) -> Entry:
    """The entry of this name; for a preset's name, its first.

    Raises:
        SettingError: no such entry, with those that are nearest; a model without published weights.
    """
    entries = catalogue()
    if name in entries:
        return entries[name]
    if found := published(name):
        return found[0]
    model, _, tag = name.partition(".")
    tags = [other.partition(".")[2] for other in entries if other.startswith(f"{model}.")]
    if tags:
        near = did_you_mean(tag, tags)
        raise SettingError(f"{model} has no checkpoint {tag!r}{near} (it has {', '.join(tags)})")
    if model in table():
        raise SettingError(
            f"no weights are published for {model}; `vitkit models --pretrained` lists what is"
        )
    near = did_you_mean(name, [*entries, *{entry.preset for entry in entries.values()}], count=3)
    raise SettingError(
        f"there is no checkpoint {name!r}{near} (`vitkit models --pretrained` lists all)"
    )


def published(preset: str) -> list[Entry]:
    """The checkpoints of a preset, the default first; none where nothing is published."""
    return [entry for entry in catalogue().values() if entry.preset == preset]


def known(place: str | Path) -> Entry | None:
    """The entry that a name or an address means; `None` for files and what is not listed.

    A file or a folder of that name goes first. Nothing is fetched.
    """
    place, entries = str(place), catalogue()
    if os.path.exists(place):
        return None
    name = place.removeprefix("timm://")
    if (name in entries or published(name)) and (name == place or "/" not in name):
        return find(name)
    return _by_address().get(place)


@functools.cache
def _by_address() -> dict[str, Entry]:
    # Two models of timm may be the same file; the first of them is what its repository says it is.
    return {entry.address: entry for entry in reversed([*catalogue().values()])}


def _lines(section: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, preset and facts of each checkpoint of a source."""
    shared = {key: value for key, value in section.items() if not isinstance(value, dict | list)}
    shared["stated"] = section.get("stated", ())
    for name, (preset, *rest) in section.get("checkpoints", {}).items():
        own = {"file": rest[0]} if rest else {}
        yield name, preset, shared | own | _where(section, name) | (rest[1] if rest[1:] else {})
    groups = section.get("groups", [])
    for preset, tags in section.get("presets", {}).items():
        for tag in tags:
            group = next(group for group in groups if tag in group["tags"])
            own = {key: value for key, value in group.items() if key not in ("tags", "where")}
            name = f"{preset}.{tag}"
            yield name, preset, shared | own | group["tags"][tag] | _where(group, name)


def _where(group: dict[str, Any], name: str) -> dict[str, Any]:
    """The facts that stand beside a pattern of the name; of two, the later wins."""
    facts: dict[str, Any] = {}
    for pattern, more in group.get("where", {}).items():
        if fnmatchcase(name, pattern):
            facts |= more
    return facts


def _entry(name: str, preset: str, facts: dict[str, Any], data: dict[str, Any]) -> Entry:
    model = table()[preset].fields
    size = facts.get("image_size", model["image_size"])
    words, file = re.split(r"[._]", name), facts.get("file", "")
    usual = data["classes"].get(words[-1], model.get("num_classes", ViTSpec().num_classes))
    digits = DIGITS.search(file) if facts.get("digits") else None
    preprocess = None
    if "images" in facts:
        mean, std = data["images"][facts["images"]]
        preprocess = Preprocess(
            image_size=size,
            mean=mean,
            std=std,
            interpolation=facts["interpolation"],
            fit=facts["fit"],
            crop_ratio=facts["crop_ratio"],
        )
    their = name.replace(facts.get("without", "\0"), "")
    return Entry(
        name=name,
        preset=preset,
        source=facts["title"],
        format=facts["format"],
        address=facts["address"].format(name=their, preset=preset, file=file),
        licence=facts.get("licence", ""),
        classes=facts.get("classes", usual),
        image_size=size,
        preprocess=preprocess,
        stated=tuple(facts["stated"]),
        sha256=digits[1] if digits else "",
        note=facts["note"],
    )
