"""Groups of settings on the command line, `--spec.patch-size 4`: the same for every verb."""

from __future__ import annotations

from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from vitkit.errors import SettingError


def take_fields(arguments: list[str], group: str = "spec") -> tuple[list[str], dict[str, Any]]:
    """Split `--spec.patch-size 4` off the other arguments; values are read as YAML.

    Raises:
        SettingError: a field without a value, or with one that is none.
    """
    rest: list[str] = []
    fields: dict[str, Any] = {}
    waiting = iter(arguments)
    for argument in waiting:
        if not argument.startswith(f"--{group}."):
            rest.append(argument)
            continue
        name, _, value = argument.removeprefix(f"--{group}.").partition("=")
        value = value or next(waiting, "")
        if not value:
            raise SettingError(f"{argument} needs a value, such as --{group}.patch-size 4")
        try:
            value = YAML(typ="safe", pure=True).load(value)
        except YAMLError:
            raise SettingError(
                f"--{group}.{name}: {value!r} is no value; such as 4 or [4, 8]"
            ) from None
        fields[name.replace("-", "_")] = value
    return rest, fields
