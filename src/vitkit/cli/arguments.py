"""Arguments, commands and help of the verbs, read from functions and settings."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from tyro.conf import Positional, Suppress

from vitkit.cli.output import FEWEST_COLUMNS
from vitkit.errors import SettingError
from vitkit.messages import did_you_mean
from vitkit.other_names import answer_to

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


# `Command`: what a verb does and takes, read from its function or from the settings of a run.


@dataclass(frozen=True, kw_only=True)
class Group:
    """Arguments under one title of the help."""

    title: str
    arguments: tuple[Argument, ...]


@dataclass(frozen=True, kw_only=True)
class Command:
    """A verb as its help describes it.

    Attributes:
        verb: such as `eval`.
        description: paragraphs.
        groups: its arguments, the positional ones first.
        examples: whole command lines, each with what it does after a `#`.
        common: names of the arguments in the help; `--help-all` has all. Empty where that is short.
    """

    verb: str
    description: tuple[str, ...]
    groups: tuple[Group, ...]
    examples: tuple[str, ...]
    common: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All arguments."""
        return tuple(argument for group in self.groups for argument in group.arguments)

    @property
    def positionals(self) -> tuple[Argument, ...]:
        """The arguments without a flag, in their order."""
        return tuple(argument for argument in self.arguments if not argument.flags)

    @property
    def usage(self) -> str:
        """The command in one line."""
        words = ["vitkit", self.verb]
        for positional in self.positionals:
            word = positional.invocation
            words.append(word if positional.required else f"[{word}]")
        # a flag that must be given
        for flag in self.arguments:
            if flag.flags and flag.required:
                words.append(flag.invocation.split(", ")[-1])
        return " ".join([*words, "[flags]"])


def command_of(verb: str, module: ModuleType, arguments: Sequence[str]) -> Command:
    """Return what a verb's module offers.

    Args:
        verb: the verb.
        module: it has a function `describe`, or one named like the verb, such as `eval_command`,
            and `EXAMPLES`.
        arguments: as typed; some decide the defaults of others.
    """
    if hasattr(module, "describe"):
        command: Command = module.describe(arguments)
        return command
    function = getattr(module, f"{verb}_command")
    return describe_function(verb, function, examples=module.EXAMPLES)


def describe_function(
    verb: str,
    function: Callable[..., Any],
    *,
    examples: Iterable[str],
    extra: Iterable[Argument] = (),
) -> Command:
    """Describe a verb by its function's signature and docstring.

    Args:
        verb: the verb.
        function: its docstring has a section `Args`.
        examples: whole command lines.
        extra: arguments that are no parameters of the function.
    """
    text, described = _docstring(inspect.getdoc(function) or "")
    hints = get_type_hints(function, include_extras=True)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints[name]
        if _has_marker(hint, Suppress):
            continue
        required = parameter.default is parameter.empty
        found.append(
            argument(
                name,
                hint,
                None if required else parameter.default,
                described.get(name, ""),
                positional=_has_marker(hint, Positional),
                required=required,
            )
        )
    positionals = tuple(argument for argument in found if not argument.flags)
    flags = tuple(argument for argument in found if argument.flags)
    groups = (
        Group(title="arguments", arguments=positionals),
        Group(title="options", arguments=(*flags, *extra)),
    )
    return Command(
        verb=verb, description=_paragraphs(text), groups=groups, examples=tuple(examples)
    )


def describe_settings(sections: Iterable[type[Any]], defaults: Any) -> tuple[Group, ...]:
    """Return a group for each section of settings, titled by its class: `DataSettings` is `data`.

    Args:
        sections: settings classes whose fields have docstrings.
        defaults: an instance with the defaults to show.
    """
    groups = []
    for section in sections:
        hints = get_type_hints(section, include_extras=True)
        described = _field_docstrings(section)
        found = []
        for field in fields(section):
            hint = hints[field.name]
            if _has_marker(hint, Suppress):
                continue
            found.append(
                argument(
                    field.name,
                    hint,
                    getattr(defaults, field.name),
                    described.get(field.name, ""),
                    positional=False,
                    required=field.default is MISSING and field.default_factory is MISSING,
                )
            )
        # `FineTuningSettings` -> "fine-tuning"
        words = re.findall(r"[A-Z][a-z]*", section.__name__.removesuffix("Settings"))
        groups.append(Group(title="-".join(words).lower(), arguments=tuple(found)))
    return tuple(groups)


def _has_marker(hint: Any, marker: Any) -> bool:
    """Return True if a type has a marker of tyro, written `Positional[str]` or in `Annotated`."""
    # a marker stands for `Annotated[T, MARKER]`
    wanted = get_args(marker[int])[1:] if get_origin(marker[int]) is Annotated else (marker,)
    return get_origin(hint) is Annotated and any(
        fact in wanted or fact is marker for fact in hint.__metadata__
    )


def _docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its text and the text of each argument."""
    text, _, arguments = text.partition("\nArgs:\n")
    described: dict[str, str] = {}
    name = ""
    for line in inspect.cleandoc(arguments).splitlines():
        if match := re.match(r"(\w+): (.*)", line):
            name, described[match[1]] = match[1], match[2]
        elif name:
            described[name] += f" {line.strip()}"
    return text, described


def _field_docstrings(cls: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a class."""
    # Python keeps no docstrings of fields, so they are read from the source
    module = ast.parse(inspect.getsource(sys.modules[cls.__module__]))
    classes = [part for part in module.body if isinstance(part, ast.ClassDef)]
    body = next(part.body for part in classes if part.name == cls.__name__)
    described = {}
    for field, following in itertools.pairwise(body):
        match field, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                described[name] = " ".join(text.split())
    return described


def _paragraphs(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))


# The help of the verbs, wrapped to the width of the terminal.

WIDEST = 100
"""Characters of the longest line, however wide the terminal is."""
COLUMN = 26
"""Column where descriptions begin."""
NO_BREAK = "\N{NO-BREAK SPACE}"


def help_text(command: Command, *, everything: bool = False) -> str:
    """Return the help of a verb: usage, description, its arguments by group, and examples.

    Args:
        command: the verb.
        everything: all arguments, also of a verb with a short help.
    """
    width = _line_width()
    parts = [textwrap.fill(f"usage: {command.usage}", width, subsequent_indent=" " * 7)]
    for paragraph in command.description:
        parts.append(textwrap.fill(paragraph, width, break_on_hyphens=False))
    is_short = bool(command.common) and not everything
    for group in command.groups:
        arguments = group.arguments
        if is_short:
            arguments = tuple(one for one in arguments if one.name in command.common)
        if arguments:
            lines = [f"{group.title}:"]
            for argument in arguments:
                text = _description(argument, brief=is_short and bool(argument.flags))
                lines += _entry(argument.invocation, text, width)
            parts.append("\n".join(lines))
    if is_short:
        flags = sum(bool(argument.flags) for argument in command.arguments)
        more = (
            f"These are the flags used most; `vitkit {command.verb} --help-all` lists all {flags}."
        )
        parts.append(textwrap.fill(more, width, break_on_hyphens=False))
    elif any(argument.is_switch for argument in command.arguments):
        parts.append("A switch --NAME is turned off by --no-NAME.")
    if command.examples:
        parts.append("\n".join(["examples:", *_examples(command.examples, width)]))
    return "\n\n".join(parts).replace(NO_BREAK, " ")


def _line_width() -> int:
    """Return the characters of a line, 40 to 100: those of the terminal, 80 if there is none."""
    return max(min(shutil.get_terminal_size().columns, WIDEST), FEWEST_COLUMNS)


def _entry(invocation: str, description: str, width: int) -> Iterator[str]:
    """Yield the lines of one argument; its description begins beside it where there is room."""
    indent = " " * COLUMN
    lines = textwrap.wrap(description, width - COLUMN, break_on_hyphens=False)
    first = f"  {invocation}"
    # A flag too long for the column stands on a line of its own.
    if lines and len(first) < COLUMN - 1:
        first = f"{first:<{COLUMN}}{lines.pop(0)}"
    yield from textwrap.wrap(first, width, subsequent_indent="      ", break_long_words=False)
    yield from (f"{indent}{line}" for line in lines)


def _description(argument: Argument, *, brief: bool) -> str:
    """Return what an argument does, with its choices and its default; `brief`: one sentence."""
    text = argument.help
    if brief:
        text = re.split(r"(?<=\.) (?=[A-Z])", text)[0]
    notes = []
    if argument.has_many_choices:
        notes.append(f"one of {', '.join(argument.choices)}")
    if argument.flags and argument.required:
        notes.append("required")
    elif argument.is_switch and argument.default:
        notes.append("on by default")
    elif shown := _value(argument.default):
        notes.append(f"default: {shown}")
    if not notes:
        return text
    # a note stays on one line
    return f"{text} ({'; '.join(notes)})".replace("default: ", f"default:{NO_BREAK}")


def _value(default: object) -> str:
    """Format a default value; nothing if it is not informative."""
    if isinstance(default, tuple):
        return NO_BREAK.join(map(_value, default))
    if isinstance(default, float):
        return f"{default:g}"
    return "" if default is None or default is False else str(default)


def _examples(examples: Iterable[str], width: int) -> Iterator[str]:
    """Yield the example commands, each below what it does."""
    for example in examples:
        # Two spaces: a `#` inside the command is part of it.
        command, _, purpose = example.partition("  # ")
        if purpose:
            yield from textwrap.wrap(
                f"# {purpose}", width, initial_indent="  ", subsequent_indent="  # "
            )
        yield f"  {command.strip()}"
