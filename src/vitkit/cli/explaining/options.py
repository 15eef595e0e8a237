"""Options of a method on the command line: `--option steps=20`, `--layer` and `--head`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from vitkit.errors import SettingError, UserError
from vitkit.explaining.choice import choose_method, method_options
from vitkit.explaining.methods import METHODS

ALL = "all"
"""The word for every method of the registry."""


def read_options(words: tuple[str, ...]) -> dict[str, object]:
    """Return the options written `NAME=VALUE`; values are numbers where they can be.

    Raises:
        SettingError: another form.
    """
    pairs: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not name or not equals or not value:
            raise SettingError(f"--option {word}: expected NAME=VALUE, such as steps=20")
        pairs[name.replace("-", "_")] = _number(value)
    return pairs


def options_of(method: str | None, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options that were set.

    Args:
        method: a name of `METHODS`, or `all`; None for the default method.
        options: those of the command line; None where not set.

    Raises:
        SettingError: an option that no chosen method has.
    """
    if method != ALL:
        return method_options(choose_method(method, options)[0], options)
    for name, value in options.items():
        if value is not None and not any(name in other.options for other in METHODS.values()):
            known = sorted({option for other in METHODS.values() for option in other.options})
            expected = f"no method has this option; options are {', '.join(known)}"
            raise SettingError.about(name, value, expected)
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def named_as_options(names: Collection[str]) -> Iterator[None]:
    """Name a value that the block refuses as it was written: `--option steps=0: must be ...`.

    Args:
        names: of the options that --option has set.
    """
    try:
        yield
    except UserError as error:
        wrong = error.wrong
        if wrong is None or wrong.field not in names:
            raise
        raise type(error)(f"--option {wrong.field}={wrong.value}: {wrong.expected}") from None


def _number(value: str) -> object:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
