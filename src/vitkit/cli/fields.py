"""What of the command line is the same for every verb: groups of settings, flags without a value.

A group is written `--spec.patch-size 4`.
"""

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
        if not value or value.startswith("--"):
            raise SettingError(f"{argument} needs a value, such as --{group}.patch-size 4")
        try:
            value = YAML(typ="safe", pure=True).load(value)
        except YAMLError:
            raise SettingError(
                f"--{group}.{name}: {value!r} is no value; such as 4 or [4, 8]"
            ) from None
        fields[name.replace("-", "_")] = value
    return rest, fields


def filled(arguments: list[str], flag: str, usual: str) -> list[str]:
    """The arguments, with its usual value after a flag that stands without one."""
    words = []
    for word, after in zip(arguments, [*arguments[1:], "-"], strict=True):
        words += [word, usual] if word == flag and after.startswith("-") else [word]
    return words
