"""Merging of settings from several sources: defaults, a stopped run, a recipe, flags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vitkit.errors import SettingError
from vitkit.frozen import field_names
from vitkit.training.config.field_types import Settings
from vitkit.training.config.setting_names import hint_on, second_names
from vitkit.training.config.train_config import TrainConfig

SYNONYMS = (("img_size", "progressive", "spec.image_size"), ("drop_path", "spec.drop_path"))
"""Groups of names that set the same thing."""
MODEL_DEFAULT = "the model's own"
"""Stands for the value of a spec field that no setting names."""


def layered(*layers: Mapping[str, Any]) -> Settings:
    """Merge settings, later ones over earlier ones; `spec` is merged field by field.

    A `spec` belongs to the `model` it was written for: a later layer that names another model drops
    the earlier layers' `spec`. Of synonyms, such as `img_size` and `spec.image_size`, the latest
    layer that has any of them decides; in one layer they must agree.

    Raises:
        SettingError: a key that is no setting (the nearest one is named), or a spec that is none.
    """
    merged: Settings = {"model": TrainConfig.model, "spec": {}}
    for layer in layers:
        check_names(layer)
        spec = layer.get("spec") or {}
        if not isinstance(spec, Mapping):
            raise SettingError(f"spec = {spec!r}: expected fields of ViTSpec, such as width: 64")
        # a later synonym replaces an earlier one
        for synonyms in SYNONYMS:
            if any(_is_set(layer, name) for name in synonyms):
                for name in synonyms:
                    _remove(merged, name)
        # the fields of a spec belong to one model
        if layer.get("model", merged["model"]) == merged["model"]:
            spec = {**merged["spec"], **spec}
        merged |= {**layer, "spec": dict(spec)}
    return merged


def check_names(keys: Iterable[str], where: str = "") -> None:
    """Raise `SettingError` for the first key that is no setting.

    Args:
        keys: names of settings.
        where: begins the message, such as `recipe.yaml:2: `.
    """
    known = field_names(TrainConfig)
    for key in keys:
        if key in known:
            continue
        hint = hint_on(key, known, second_names(TrainConfig))
        raise SettingError(f"{where}there is no setting {key!r}{hint}")


def _is_set(layer: Mapping[str, Any], name: str) -> bool:
    """Return True if a layer has a value for `name`, or for `field` where it is `spec.field`."""
    owner, _, field = name.rpartition(".")
    values = (layer.get(owner) or {}) if owner else layer
    return values.get(field) not in (None, (), [])


def _remove(merged: Settings, name: str) -> None:
    owner, _, field = name.rpartition(".")
    if owner:
        # a copy: the dictionary may belong to a layer
        merged[owner] = {key: value for key, value in merged[owner].items() if key != field}
    else:
        merged.pop(field, None)


def with_flat_spec(settings: Mapping[str, Any]) -> Settings:
    """Return the settings with each field of the spec as an entry `spec.NAME`."""
    flat = {f"spec.{name}": value for name, value in settings.get("spec", {}).items()}
    for name, value in settings.items():
        if name != "spec":
            flat[name] = value
    return flat
