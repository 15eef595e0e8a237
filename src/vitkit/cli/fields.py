"""`FIELD=VALUE` of a `ViTSpec`, as flags give them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from vitkit.errors import SettingError


def fields_of_spec(given: Iterable[str]) -> dict[str, Any]:
    """`["num_heads=6"]` -> `{"num_heads": 6}`; `SettingError` for what is no such pair."""
    found: dict[str, Any] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or not value:
            raise SettingError(f"--spec {pair}: expected FIELD=VALUE, such as num_heads=6")
        try:
            found[name.replace("-", "_")] = YAML(typ="safe", pure=True).load(value)
        except YAMLError:
            raise SettingError(f"--spec {pair}: {value!r} is no value; such as 6") from None
    return found
