"""Frozen, validated dataclasses that turn into JSON and back: the base of every spec and config.

pydantic checks the types; what it finds is said again in one line, with the field's name, what was
given, and the nearest name where a field does not exist.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import ErrorDetails

from vitkit.errors import UserError, did_you_mean, plural

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
                raise _told(made, error, raises) from None

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


MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
"""What pydantic calls a field, or a value of a tuple, that was not given."""


def _told(cls: type[Any], error: ValidationError, raises: type[UserError]) -> UserError:
    """The first problem of `error` in one line, and how many other fields have one."""
    problems = error.errors(include_url=False)
    first = problems[0]
    name = str(first["loc"][0]) if first["loc"] else "value"
    kind = first["type"]
    more = len({problem["loc"][0] for problem in problems if problem["loc"]} - {name})
    others = f" (and {more} more)" if more else ""
    if kind == "unexpected_keyword_argument":
        text = f"{cls.__name__} has no field {name!r}{did_you_mean(name, field_names(cls))}"
    elif kind in MISSING and len(first["loc"]) == 1:
        text = f"{cls.__name__} needs the field {name!r}"
    elif kind == "value_error":
        text = f"{cls.__name__}: {first['ctx']['error']!s}"
    else:
        # a field that may be one thing or another has a problem for each
        said = [_expected(problem) for problem in problems if problem["loc"][0] == name]
        return raises.about(name, first["input"], " or ".join(dict.fromkeys(said)), others)
    return raises(text + others)


EXPECTED = {
    "greater_than_equal": "must be {ge:g} or more",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be {le:g} or less",
    "less_than": "must be below {lt:g}",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "string_type": "must be text",
    "dict_type": "must be names with values, such as {{width: 64}}",
    "tuple_type": "must be a list, such as [{input}]",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"),
                    "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
}  # fmt: skip
"""What is said for each kind of problem that pydantic finds."""


def _expected(problem: ErrorDetails) -> str:
    """What a value must be, in words that follow its name."""
    place = problem["loc"]
    if problem["type"] in ("too_long", "missing") and "tuple[" in str(place[1:2]):
        return f"must be {plural(str(place[1]).count('float'), 'number')}"
    known = EXPECTED.get(problem["type"])
    if known is None:
        return problem["msg"][0].lower() + problem["msg"][1:]
    said = known.format(input=problem["input"], **problem.get("ctx", {}))
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        said += did_you_mean(problem["input"], re.findall(r"'([^']*)'", said))
    return said
