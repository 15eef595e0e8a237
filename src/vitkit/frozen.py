"""Frozen, validated dataclasses with conversion to JSON: the base of every spec and config.

pydantic checks the types; its errors become one line with the field's name, the value, the expected
type or range, and the nearest name if a field does not exist.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic_core import ErrorDetails

from vitkit import errors, messages

Instance = TypeVar("Instance")


@dataclass_transform(frozen_default=True, kw_only_default=True)
def frozen(*, raises: type[errors.UserError]) -> Callable[[type[Instance]], type[Instance]]:
    """Decorate a class: keyword-only, frozen, validated; invalid values raise `raises`."""

    def decorate(cls: type[Instance]) -> type[Instance]:
        # unknown fields and non-finite numbers are mistakes
        config = ConfigDict(extra="forbid", allow_inf_nan=False)
        validated: Any = pydantic_dataclass(cls, frozen=True, kw_only=True, config=config)
        validate = validated.__init__

        @functools.wraps(validate)
        def init(self: object, **fields: Any) -> None:
            try:
                validate(self, **fields)
            except ValidationError as error:
                raise _one_line_error(validated, error, raises) from None

        validated.__init__ = init
        return cast(type[Instance], validated)

    return decorate


def to_json(instance: Any) -> dict[str, Any]:
    """Return the fields of a frozen dataclass as plain JSON values (tuples become lists)."""
    values: dict[str, Any] = TypeAdapter(type(instance)).dump_python(instance, mode="json")
    return values


def field_names(cls: type[Any]) -> list[str]:
    """Return the names of a dataclass's fields, in order."""
    return [field.name for field in dataclasses.fields(cls)]


def _nearest_field(cls: type[Any], name: str) -> str:
    """Suggest the field that an unknown name means: by `cls.OTHER_NAMES`, else by its letters."""
    other_names: Mapping[str, tuple[str, ...]] = getattr(cls, "OTHER_NAMES", {})
    if name in other_names:
        return f" (did you mean {other_names[name][0]!r}?)"
    known = field_names(cls)
    listed = ""
    if len(known) <= MOST_LISTED:
        listed = f"; it has {', '.join(known)}"
    return messages.did_you_mean(name, known) or listed


MOST_LISTED = 12
"""Fields of a class that a message lists."""
MAX_LIST_LENGTH = 1000
"""Most values of a list field; no model needs as many."""
Description = TypeVar("Description", bound="Described")


class Described:
    """The base of `ViTSpec` and `Preprocess`: to JSON, from JSON, and copies with changes."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values; `from_json` is the inverse."""
        return to_json(self)

    @classmethod
    def from_json(cls: type[Description], values: Mapping[str, Any]) -> Description:
        """Return the description of these values, as `to_json` returns them.

        Raises:
            SpecError: not an object; an unknown field, or a wrong value.
        """
        return cls(**_object(values, cls))

    def replace(self: Description, **changes: Any) -> Description:
        """Return a copy with some fields changed, validated again.

        Raises:
            SpecError: an unknown field, or a wrong value.
        """
        return type(self)(**vars(self) | changes)


def _object(values: object, cls: type[Any]) -> Mapping[str, Any]:
    """Check that all keys are fields of the class, before pydantic collects an error for each."""
    if not isinstance(values, Mapping):
        raise errors.SpecError(f"expected an object of fields, not {type(values).__name__}")
    known = field_names(cls)
    unknown = [name for name in values if name not in known]
    if unknown:
        more = ""
        if len(unknown) > 1:
            more = f" (and {len(unknown) - 1} more)"
        near = _nearest_field(cls, unknown[0])
        raise errors.SpecError(f"{cls.__name__} has no field {unknown[0]!r}{near}{more}")
    for name, value in values.items():
        if isinstance(value, list) and len(value) > MAX_LIST_LENGTH:
            raise errors.SpecError(
                f"{cls.__name__}.{name} has {len(value)} values, more than {MAX_LIST_LENGTH}"
            )
    return values


MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
"""Kinds of pydantic's errors about a missing field or tuple value."""


def _one_line_error(
    cls: type[Any], error: ValidationError, raises: type[errors.UserError]
) -> errors.UserError:
    """Describe the first problem of `error` in one line, and count other fields with problems."""
    problems = error.errors(include_url=False)
    # one line shows one problem; the rest is counted
    first = problems[0]
    name = str(first["loc"][0]) if first["loc"] else "value"
    kind = first["type"]
    more = len({problem["loc"][0] for problem in problems if problem["loc"]} - {name})
    others = f" (and {more} more)" if more else ""
    if kind == "unexpected_keyword_argument":
        text = f"{cls.__name__} has no field {name!r}{_nearest_field(cls, name)}"
    elif kind in MISSING and len(first["loc"]) == 1:
        text = f"{cls.__name__} needs the field {name!r}"
    # raised by a validator of ours, whose text is a whole message
    elif kind == "value_error":
        text = f"{cls.__name__}: {first['ctx']['error']!s}"
    else:
        wanted = _all_expected([one for one in problems if one["loc"][0] == name])
        return raises.about(name, first["input"], wanted, others)
    return raises(text + others)


EXPECTATIONS = {
    "greater_than_equal": "must be {ge:g} or more",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be {le:g} or less",
    "less_than": "must be below {lt:g}",
    "finite_number": "must be a finite number",
    "literal_error": "must be {expected}",
    "string_type": "must be text",
    "dict_type": "must be names with values, such as {{width: 64}}",
    "tuple_type": "must be a list, such as [{input}]",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
}
"""Kind of pydantic's error -> the expectation in our messages."""


def _all_expected(problems: Sequence[ErrorDetails]) -> str:
    """Describe the expected values of a field; one with a union type has problems for each type."""
    # (nan, nan, nan) also has a wrong length for one of two types, which is not the problem
    others = [problem for problem in problems if not _is_about_length(problem)]
    return " or ".join(dict.fromkeys(map(_expected, others or problems)))


def _is_about_length(problem: ErrorDetails) -> bool:
    """Return True for a tuple of a wrong length; its type is in the location: `tuple[float]`."""
    return problem["type"] in ("too_long", "missing") and "tuple[" in str(problem["loc"][1:2])


def _expected(problem: ErrorDetails) -> str:
    """Describe the expected value, in words that follow the field's name."""
    if _is_about_length(problem):
        return f"must be {messages.plural(str(problem['loc'][1]).count('float'), 'number')}"
    template = EXPECTATIONS.get(problem["type"])
    if template is None:
        return problem["msg"][0].lower() + problem["msg"][1:]
    expected = template.format(input=problem["input"], **problem.get("ctx", {}))
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        expected += messages.did_you_mean(problem["input"], re.findall(r"'([^']*)'", expected))
    return expected
