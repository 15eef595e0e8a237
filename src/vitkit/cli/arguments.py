"""What of the command line is the same for every verb: groups of settings, flags without a value.

A group is written `--spec.patch-size 4`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from vitkit.errors import SettingError, UserError


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


@contextmanager
def as_flags(*fields: str, group: str = "") -> Iterator[None]:
    """Name a value that is refused in the block by its flag: `--batch-size 0: must be ...`.

    Args:
        fields: those that are flags; values of others may come from a file.
        group: what the flags begin with, such as `spec.`.
    """
    try:
        yield
    except UserError as error:
        wrong = error.wrong
        if wrong is None or wrong.field not in fields:
            raise
        flag = f"--{group}{wrong.field.replace('_', '-')}"
        raise type(error)(f"{flag} {wrong.value}: {wrong.expected}") from None


def filled(arguments: list[str], flag: str, usual: str) -> list[str]:
    """The arguments, with its usual value after a flag that stands without one."""
    words = []
    for number, word in enumerate(arguments, 1):
        alone = number == len(arguments) or arguments[number].startswith("-")
        words += [word, usual] if word == flag and alone else [word]
    return words
