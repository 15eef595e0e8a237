"""Frozen, validated dataclasses that turn into JSON and back: the base of every spec and config.

pydantic checks the types; what it finds is said again in one line, with the field's name, what was
given, and the nearest name where a field does not exist.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass

from vitkit.errors import UserError, did_you_mean

T = TypeVar("T")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def frozen(*, raises: type[UserError]) -> Callable[[type[T]], type[T]]:
    """A class decorator: keyword-only, frozen, validated; every mistake raises `raises`."""

    def decorate(cls: type[T]) -> type[T]:
        config = ConfigDict(extra="forbid", allow_inf_nan=False)
        made: Any = pydantic_dataclass(cls, frozen=True, kw_only=True, config=config)
        validate = made.__init__

        @functools.wraps(validate)
        def init(self: object, **fields: Any) -> None:
            try:
                validate(self, **fields)
            except ValidationError as error:
                raise raises(_one_line(made, error)) from None

        made.__init__ = init
        return cast(type[T], made)

    return decorate


def to_json(instance: Any) -> dict[str, Any]:
    """The fields of a frozen dataclass as plain JSON values (tuples become lists)."""
    values: dict[str, Any] = TypeAdapter(type(instance)).dump_python(instance, mode="json")
    return values


def replace(instance: T, **changes: Any) -> T:
    """A copy with some fields changed, validated again; an unknown field raises as at first."""
    return type(instance)(**(to_json(instance) | changes))


def field_names(cls: type[Any]) -> list[str]:
    """The names of a dataclass's fields, in order."""
    return [field.name for field in dataclasses.fields(cls)]


def _one_line(cls: type[Any], error: ValidationError) -> str:
    """The first problem of `error` in one line, and how many more there are."""
    problems = error.errors(include_url=False)
    first, more = problems[0], len(problems) - 1
    name = ".".join(str(part) for part in first["loc"]) or "value"
    kind = first["type"]
    if kind == "unexpected_keyword_argument":
        text = f"{cls.__name__} has no field {name!r}{did_you_mean(name, field_names(cls))}"
    elif kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        text = f"{cls.__name__} needs the field {name!r}"
    elif kind == "value_error":
        text = f"{cls.__name__}: {first['ctx']['error']!s}"
    else:
        said = first["msg"][0].lower() + first["msg"][1:]
        text = f"{cls.__name__}.{name} = {first['input']!r}: {said}"
    return text + (f" (and {more} more)" if more else "")
