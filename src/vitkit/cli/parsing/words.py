"""Command-line parser with one-line errors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from vitkit.cli.parsing.argument import KINDS, Argument, inverse
from vitkit.cli.parsing.command import Command
from vitkit.errors import SettingError
from vitkit.training.config.foreign_names import letters
from vitkit.training.config.setting_names import hint_on


@dataclass
class Words:
    """The parsed arguments of a verb, as text.

    Attributes:
        positionals: values without a flag.
        flags: (name of the argument, its flag and values as typed), in their order.
        values: name of an argument with a flag -> its last values.
    """

    positionals: list[str] = field(default_factory=list)
    flags: list[tuple[str, list[str]]] = field(default_factory=list)
    values: dict[str, list[str]] = field(default_factory=dict)

    def last(self, name: str) -> str | None:
        """Return the last value of a flag, "True" or "False" of a switch; None if not given."""
        return self.values[name][-1] if self.values.get(name) else None

    def flag_words(self, *without: str) -> list[str]:
        """Return all flags and their values, except those of some arguments."""
        return [word for name, words in self.flags if name not in without for word in words]

    @property
    def ordered(self) -> list[str]:
        """All words, the positional arguments first."""
        return [*self.positionals, *self.flag_words()]


HELP_ALL = "--help-all"
HELP = ("-h", "--help", HELP_ALL)


def wants_help(words: Sequence[str]) -> bool:
    """Return True if the help is asked for."""
    return not set(HELP).isdisjoint(words)


def read_words(command: Command, words: Sequence[str]) -> Words:
    """Parse the arguments of a verb: each flag with its values.

    Raises:
        SettingError: a flag that does not exist, a value that is missing, empty, or of another
            type, a positional argument that is missing or one too many.
    """
    read = read_flags(command, words)
    _check_positionals(command, read.positionals)
    for argument in command.arguments:
        if argument.flags and argument.required and argument.name not in read.values:
            message = f"{argument.label} is missing; expected: {command.usage}"
            if argument.choices:
                message += f"; {argument.metavar} is one of {', '.join(argument.choices)}"
            raise SettingError(message)
    return read


def read_flags(command: Command, words: Sequence[str]) -> Words:
    """Parse as `read_words` does, without checking the number of positional arguments."""
    by_flag = _flags(command)
    read = Words()
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        if not _is_flag(word):
            read.positionals.append(word)
            if not word.strip():
                number = len(read.positionals)
                raise SettingError(f"argument {number} is empty; expected: {command.usage}")
            continue
        typed, equals, value = _split(word, by_flag)
        found = _find(typed, by_flag)
        if found is None:
            raise SettingError(_no_such_flag(command, typed))
        values = [value] if equals else list(_values(found, remaining))
        if found.bare and not values:
            values = [found.bare]
        _check_values(found, typed, values, given=bool(equals))
        as_typed = [typed, *values]
        # the parser takes a value that begins with a dash for a flag
        if len(values) == 1 and values[0].startswith("-"):
            as_typed = [f"{typed}={values[0]}"]
        read.flags.append((found.name, as_typed))
        # A switch has no value: its form, --x or --no-x, decides.
        read.values[found.name] = values or [str(not typed.startswith(("--no-", "--no_")))]
    return read


def _flags(command: Command) -> dict[str, Argument]:
    """Return every flag with its argument, also those that turn a switch off."""
    by_flag = {}
    for argument in command.arguments:
        for flag in argument.flags:
            by_flag[flag] = argument
            if argument.is_switch and flag.startswith("--"):
                by_flag[inverse(flag)] = argument
    return by_flag


def _find(typed: str, by_flag: dict[str, Argument]) -> Argument | None:
    if "." in typed:  # --spec.patch-size
        return by_flag.get(typed.partition(".")[0] + ".")
    return by_flag.get("--" + typed[2:].replace("_", "-") if typed.startswith("--") else typed)


def _split(word: str, by_flag: dict[str, Argument]) -> tuple[str, str, str]:
    """Split `--lr=1` and `-cdigits` into flag, `=` and value; the last two may be empty."""
    typed, equals, value = word.partition("=")
    if typed not in by_flag and typed[:2] in by_flag:
        return typed[:2], "=", word[2:]
    return typed, equals, value


def _is_flag(word: str) -> bool:
    """Return True for a word that begins with a dash and is no number; "-" is standard input."""
    return bool(re.match(r"-[^\d.]|-\.\D", word))


def _values(found: Argument, remaining: list[str]) -> Iterator[str]:
    """Take the values of a flag from the words after it."""
    while not found.is_switch and remaining and not _is_flag(remaining[0]):
        yield remaining.pop(0)
        if not found.many:
            return


def _check_values(found: Argument, typed: str, values: list[str], *, given: bool) -> None:
    """Raise `SettingError` for values that a flag cannot have.

    Args:
        found: the flag's argument.
        typed: the flag as typed.
        values: its values.
        given: whether they were written behind `=`.
    """
    if found.is_switch:
        if given:
            raise SettingError(f"{typed} takes no value; leave out ={values[0]}")
        return
    if not values:
        raise SettingError(f"{typed} needs {_needed(found, typed)}")
    for value in values:
        if not value.strip():
            raise SettingError(f"{typed} is empty; pass a value, or leave it out")
        found.check(value, typed)
    if found.counts and len(values) not in found.counts:
        expected = " or ".join(map(str, found.counts))
        raise SettingError(
            f"{typed} {' '.join(values)}: expected {expected} values, got {len(values)}"
        )


def _needed(found: Argument, typed: str) -> str:
    """Describe the value that a flag needs."""
    if "." in typed:
        return f"a value, such as {typed} 4"
    if found.kind in (int, float):
        return KINDS[found.kind]
    return f"a value: {'|'.join(found.choices) or found.metavar}"


def _check_positionals(command: Command, values: list[str]) -> None:
    """Raise `SettingError` if a positional argument is missing, or one too many."""
    expected = command.positionals
    missing = [argument.metavar for argument in expected[len(values) :] if argument.required]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        raise SettingError(f"{' and '.join(missing)} {are} missing; expected: {command.usage}")
    for argument, value in zip(expected, values, strict=False):
        argument.check(value, argument.metavar)
    if len(values) > len(expected) and not any(argument.many for argument in expected):
        raise SettingError(
            f"{values[len(expected)]!r} is one argument too many; expected: {command.usage}"
        )


def _no_such_flag(command: Command, typed: str) -> str:
    """Return the message on a flag that does not exist, with the nearest one."""
    # Flags that every verb has, and that are no arguments of it.
    known = ["help", "help_all"]
    second: dict[str, str] = {}
    for argument in command.arguments:
        if not argument.flags:
            continue
        known.append(argument.name)
        second |= {letters(flag): argument.name for flag in argument.flags}
    hint = hint_on(typed, known, second, as_flags=True)
    if not hint.startswith(";"):  # no remedy was found
        hint += f"; `vitkit {command.verb} {HELP_ALL if command.common else '--help'}` lists all"
    return f"there is no flag {typed}{hint}"
