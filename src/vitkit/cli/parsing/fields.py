"""Fields of a model as flags, `--spec.patch-size 4`, and settings named as flags in messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from vitkit.cli.parsing.argument import Argument
from vitkit.errors import SettingError, UserError

SPEC = Argument(
    name="spec",
    flags=("--spec.",),
    metavar="VALUE",
    help="a field of the model that the file does not state, such as --spec.num-heads 6.",
)


def take_fields(arguments: list[str], group: str = "spec") -> tuple[list[str], dict[str, Any]]:
    """Split `--spec.patch-size 4` off the other arguments; values are parsed as YAML.

    Raises:
        SettingError: a field without a value, or with one that is not YAML.
    """
    rest: list[str] = []
    fields: dict[str, Any] = {}
    remaining = iter(arguments)
    for argument in remaining:
        if not argument.startswith(f"--{group}."):
            rest.append(argument)
            continue
        name, _, value = argument.removeprefix(f"--{group}.").partition("=")
        value = value or next(remaining, "")  # `--spec.depth=4` or `--spec.depth 4`
        if not value or value.startswith("--"):
            raise SettingError(f"{argument} needs a value, such as --{group}.patch-size 4")
        try:
            fields[name.replace("-", "_")] = YAML(typ="safe", pure=True).load(value)
        except (YAMLError, ValueError):  # such as a date that does not exist
            raise SettingError(
                f"--{group}.{name}: {value!r} cannot be read; expected a value such as 4 or [4, 8]"
            ) from None
    return rest, fields


@contextmanager
def as_flags(*fields: str, group: str = "") -> Iterator[None]:
    """Name a value that the block refuses by its flag: `--batch-size 0: must be ...`.

    Args:
        fields: those that are flags; values of others may come from a file.
        group: prefix of the flags, such as `spec.`.
    """
    try:
        yield
    except UserError as error:
        wrong = error.wrong
        if wrong is None or wrong.field not in fields:
            raise  # not about a value, or about a value from a file
        flag = f"--{group}{wrong.field.replace('_', '-')}"
        raise type(error)(f"{flag} {wrong.value}: {wrong.expected}") from None
