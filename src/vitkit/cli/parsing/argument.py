"""`Argument`: one argument of a verb, as its type, its default and its docstring describe it."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from vitkit.errors import SettingError
from vitkit.messages import did_you_mean
from vitkit.weights.converting.other_words import answer_to

METAVARS = {
    "aa": "POLICY",
    "against": "NAME",
    "batch_size": "N",
    "budget": "TIME",
    "cache": "FOLDER",
    "calibrate": "DATA",
    "callbacks": "MODULE:CLASS",
    "class_name": "NAME",
    "csv": "FILE",
    "data_root": "FOLDER",
    "device": "DEVICE",
    "engines": "NAME",
    "freeze": "NAME",
    "gpu": "NAME",
    "img_size": "PIXELS",
    "licence": "LICENCE",
    "loss": "NAME",
    "metrics": "MODULE:FUNCTION",
    "model": "NAME",
    "opt": "NAME",
    "output": "FOLDER",
    "out": "FILE",
    "pretrained": "WEIGHTS",
    "progressive": "PIXELS",
    "recipe": "NAME|FILE",
    "relabel": "FILE",
    "resume": "RUN",
    "save_images": "FOLDER",
    "seconds": "SECONDS",
    "split": "SPLIT",
    "suspects": "SPLIT",
    "tasks": "NAME",
    "to": "FORMAT",
    "data": "DATA",
    "teacher": "CHECKPOINT",
    "timeout": "SECONDS",
    "transform": "MODULE:FUNCTION",
}
"""Parameter -> the word for its value; others, and all paths, have that of their type."""
TYPE_METAVARS: dict[type[Any], str] = {int: "N", float: "X", Path: "FILE", str: "TEXT"}
KINDS: dict[type[Any], str] = {int: "a whole number", float: "a number"}
"""Type of a number -> its words in messages."""
ANSWERS = {"to": answer_to}
"""Name of a parameter -> the function that answers an invalid choice."""
BARE_VALUES = {
    "cache": "auto",
    "grad_checkpointing": "block",
    "pretrained": "auto",
    "report": "comparison.html",
    "suspects": "train",
}
"""Flag whose value is optional -> the value that it has without one."""

LONGEST_CHOICES = 40
"""Most characters of the choices listed beside a flag."""


@dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of a verb.

    Attributes:
        name: name of the parameter or setting, such as `batch_size`.
        flags: its flags, the main one first; empty for a positional argument. One that ends with a
            dot, such as `--spec.`, is followed by the name of a field.
        metavar: the word for its value.
        help: what it does.
        kind: the type of its value, or of each of its values.
        choices: the values it can have, if they are few.
        many: whether it takes several values.
        counts: how many values it may have, if not any number.
        required: whether it must be given.
        nullable: whether `None` is a value.
        default: its value if it is not given.
        bare: the value of the flag without a value; None if it needs one.
        answer: returns what to write for a wrong word; empty where the nearest choice is meant.
    """

    name: str
    flags: tuple[str, ...] = ()
    metavar: str = ""
    help: str = ""
    kind: type[Any] = str
    choices: tuple[str, ...] = ()
    many: bool = False
    counts: tuple[int, ...] = ()
    required: bool = False
    nullable: bool = False
    default: Any = None
    bare: str | None = None
    answer: Callable[[str], str] | None = None

    @property
    def is_switch(self) -> bool:
        """True for a flag without a value."""
        return self.kind is bool

    @property
    def label(self) -> str:
        """The name in messages: the main flag, or the word of a positional argument."""
        return self.flags[0] if self.flags else self.metavar

    @property
    def has_many_choices(self) -> bool:
        """True for too many choices to list beside the flag."""
        return len("|".join(self.choices)) > LONGEST_CHOICES

    @property
    def invocation(self) -> str:
        """The flags with their value, as in the help: `-b, --batch-size N`."""
        value = self.metavar
        if self.choices and not self.has_many_choices:
            value = "|".join(self.choices)
        if self.many:
            value += " ..."
        if self.bare:
            value = f"[{value}]"
        if not self.flags:
            return value
        # short flags first, as in other programs
        flags = ", ".join(sorted(self.flags, key=lambda flag: flag.startswith("--")))
        if self.is_switch and self.default:
            return f"{flags}, {inverse(self.flags[0])}"  # on by default: can only be turned off
        if self.is_switch:
            return flags
        if flags.endswith("."):
            return f"{flags}FIELD {value}"
        return f"{flags} {value}"

    def check(self, value: str, flag: str) -> None:
        """Raise `SettingError` for a value of the wrong type, or not among the choices.

        Args:
            value: as typed.
            flag: the flag as typed, or the word of a positional argument.
        """
        # tyro writes None this way, also for numbers and choices.
        if self.nullable and value == "None":
            return
        if self.choices and value not in self.choices:
            answer = self.answer and self.answer(value)
            raise SettingError(
                f"{flag} {value}: must be one of {', '.join(self.choices)}"
                f"{answer or did_you_mean(value, self.choices)}"
            )
        if self.kind in KINDS:
            try:
                self.kind(value)
            except ValueError:
                raise SettingError(f"{flag} {value}: must be {KINDS[self.kind]}") from None


def argument(
    name: str, hint: Any, default: Any, text: str, *, positional: bool, required: bool
) -> Argument:
    """Return the argument for a parameter of a function, or a field of a settings class.

    Args:
        name: name of the parameter.
        hint: its type, with what `Annotated` adds.
        default: its default value.
        text: its description.
        positional: whether it has no flag.
        required: whether it has no default.
    """
    plain, aliases = _without_annotations(hint)
    # `int | None` is an int that may be absent.
    inner = [kind for kind in _union(plain) if kind is not type(None)]
    many = any(get_origin(_without_annotations(kind)[0]) is tuple for kind in inner)
    kind, choices = _value_type(inner[0])
    metavar = name.upper()
    # the word of a flag's value says what kind of value it is; a positional argument is its name
    if not positional:
        # A path is always FILE, whatever the name of its parameter.
        of_type = TYPE_METAVARS.get(kind, "TEXT")
        metavar = of_type if kind is Path else METAVARS.get(name, of_type)
    return Argument(
        name=name,
        flags=() if positional else (f"--{name.replace('_', '-')}", *aliases),
        metavar=metavar,
        help=text,
        kind=kind,
        choices=choices,
        many=many,
        counts=_counts(inner),
        required=required,
        nullable=len(inner) < len(_union(plain)),
        default=default,
        bare=None if positional or kind is bool else BARE_VALUES.get(name),
        answer=ANSWERS.get(name),
    )


def inverse(flag: str) -> str:
    """Return the flag that turns a switch off: `--no-json` for `--json`."""
    return flag.replace("--", "--no-", 1)


def _without_annotations(hint: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a type without `Annotated`, and the second names of its flag."""
    aliases: tuple[str, ...] = ()
    while get_origin(hint) is Annotated:
        hint, *metadata = get_args(hint)
        for fact in metadata:
            aliases += tuple(getattr(fact, "aliases", None) or ())
    return hint, aliases


def _union(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _counts(kinds: list[Any]) -> tuple[int, ...]:
    """Return the lengths of fixed-length tuples; empty if any length is allowed."""
    counts = set()
    for kind in kinds:
        plain, _ = _without_annotations(kind)
        values = get_args(plain)
        if get_origin(plain) is not tuple or Ellipsis in values:
            return ()
        counts.add(len(values))
    return tuple(sorted(counts))


def _value_type(hint: Any) -> tuple[type[Any], tuple[str, ...]]:
    """Return the type of a value, or of the values of a tuple, and the choices there are."""
    plain, _ = _without_annotations(hint)
    if get_origin(plain) is tuple:
        return _value_type(get_args(plain)[0])
    if get_origin(plain) is Literal:
        return str, tuple(map(str, get_args(plain)))
    return (plain if isinstance(plain, type) else str), ()
