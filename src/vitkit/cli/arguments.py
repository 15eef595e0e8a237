"""Arguments of the verbs: read from functions and settings, and parsed with one-line errors.

A verb is a function. Its parameters before `*` are positional arguments, the others are flags; the
type, the default and the docstring of a parameter decide how it is read and described.
"""

import ast
import inspect
import itertools
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from vitkit.errors import SettingError, UserError
from vitkit.messages import did_you_mean
from vitkit.training.config.meaning import Aliases

METAVARS = {
    "CHECKPOINT": "teacher",
    "DATA": "calibrate data",
    "DEVICE": "device",
    "FILE": "csv out relabel",
    "FOLDER": "cache data_root output save_images",
    "FORMAT": "to",
    "LICENCE": "licence",
    "MODULE:CLASS": "callbacks",
    "MODULE:FUNCTION": "metrics transform",
    "NAME": "class_name freeze gpu loss model opt",
    "NAME|FILE": "recipe",
    "PIXELS": "img_size progressive",
    "POLICY": "aa",
    "RUN": "resume",
    "SECONDS": "timeout",
    "SPLIT": "split suspects",
    "TIME": "budget",
    "WEIGHTS": "pretrained",
}
"""Word for a value -> the flags that have it; others, and all paths, have that of their type."""
TYPE_METAVARS: dict[type[Any], str] = {int: "N", float: "X", Path: "FILE", dict: "VALUE"}
KINDS: dict[type[Any], str] = {int: "a whole number", float: "a number"}
"""Type of a number -> its words in messages."""
BARE_VALUES = {
    "cache": "auto",
    "grad_checkpointing": "block",
    "pretrained": "auto",
    "report": "comparison.html",
    "suspects": "train",
}
"""Flag whose value is optional -> the value that it has without one."""
HELP_ALL = "--help-all"
HELP = ("-h", "--help", HELP_ALL)
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

    @property
    def is_switch(self) -> bool:
        """True for a flag without a value."""
        return self.kind is bool

    @property
    def label(self) -> str:
        """The name in messages: the main flag, or the word of a positional argument."""
        if self.flags:
            return self.flags[0]
        return self.metavar

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
        if self.kind is dict:
            return f"{flags}FIELD {value}"
        return f"{flags} {value}"

    def read(self, word: str, typed: str) -> Any:
        """Return the value of a word.

        Args:
            word: the word.
            typed: the flag as typed, or the word of a positional argument.

        Raises:
            SettingError: a value of the wrong type, or not among the choices.
        """
        if not word.strip():
            raise SettingError(f"{typed} is empty; pass a value, or leave it out")
        if self.nullable and word == "None":
            return None
        if self.choices and word not in self.choices:
            near = did_you_mean(word, self.choices)
            raise SettingError(f"{typed} {word}: must be one of {', '.join(self.choices)}{near}")
        try:
            if self.kind is dict:
                return _yaml(word, typed)
            value = self.kind(word)
        except ValueError:
            raise SettingError(f"{typed} {word}: must be {KINDS[self.kind]}") from None
        if self.kind is int and value >= 2**63:  # what no library takes
            raise SettingError(f"{typed} {word}: must be below {2**63:g}")
        return value


def _yaml(word: str, typed: str) -> Any:
    """Return the value of a field of a model, such as 4 or [4, 8]."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe", pure=True).load(word)
    except (YAMLError, ValueError):  # such as a date that does not exist
        raise SettingError(
            f"{typed}: {word!r} cannot be read; expected a value such as 4 or [4, 8]"
        ) from None


def inverse(flag: str) -> str:
    """Return the flag that turns a switch off: `--no-json` for `--json`."""
    return flag.replace("--", "--no-", 1)


def _argument(
    name: str, hint: Any, default: Any, text: str, *, positional: bool = False
) -> Argument:
    """Return the argument for a parameter of a function, or a field of a settings class.

    Args:
        name: name of the parameter.
        hint: its type, with what `Annotated` adds.
        default: its default value; `MISSING` if it has none.
        text: its description.
        positional: whether it has no flag.
    """
    aliases: tuple[str, ...] = ()
    if get_origin(hint) is Annotated:
        for fact in hint.__metadata__:
            if isinstance(fact, Aliases):
                aliases += fact.aliases
    kinds = list(_plain(hint))
    nullable = types.NoneType in kinds
    kind = next(kind for kind in kinds if kind is not types.NoneType)
    many = get_origin(kind) is tuple
    tuples = [get_args(one) for one in kinds if get_origin(one) is tuple]
    counts = {len(values) for values in tuples if ... not in values}
    if many:
        (kind, *_) = _plain(get_args(kind)[0])
    choices = tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()
    kind = get_origin(kind) or kind
    if not isinstance(kind, type):  # a Literal
        kind = str
    metavar = name.upper()
    flags: tuple[str, ...] = ()
    if not positional:
        flags = (f"--{name.replace('_', '-')}{'.' if kind is dict else ''}", *aliases)
        # a path is always FILE, whatever the name of its parameter
        of_type = TYPE_METAVARS.get(kind, "TEXT")
        words = [word for word, names in METAVARS.items() if name in names.split()]
        metavar = words[0] if words and kind is not Path else of_type
    return Argument(
        name=name,
        flags=flags,
        metavar=metavar,
        help=text,
        kind=kind,
        choices=choices,
        many=many,
        counts=tuple(sorted(counts)),
        required=default is MISSING,
        nullable=nullable,
        default=None if default is MISSING or kind is dict else default,
        bare=None if positional or kind is bool else BARE_VALUES.get(name),
    )


def _plain(hint: Any) -> Iterator[Any]:
    """Yield a type without what `Annotated` adds; of a union, each of its types."""
    if get_origin(hint) is Annotated:
        yield from _plain(get_args(hint)[0])
    elif get_origin(hint) in (Union, types.UnionType):
        for part in get_args(hint):
            yield from _plain(part)
    else:
        yield hint


# `Command`: what a verb does and takes, read from its function or from the settings of a run.


@dataclass(frozen=True, kw_only=True)
class Command:
    """A verb.

    Attributes:
        verb: such as `eval`.
        function: called with the arguments that were given, by name.
        description: paragraphs.
        groups: title -> arguments under it in the help, the positional ones first.
        examples: whole command lines, each with what it does after a `#`.
        common: names of the arguments in the help; `--help-all` has all. Empty where that is short.
    """

    verb: str
    function: Callable[..., object]
    description: tuple[str, ...]
    groups: Mapping[str, tuple[Argument, ...]]
    examples: tuple[str, ...]
    common: tuple[str, ...] = ()

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All arguments."""
        return tuple(itertools.chain.from_iterable(self.groups.values()))

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


def describe_function(
    verb: str,
    function: Callable[..., object],
    examples: Iterable[str],
    signature: Callable[..., object] | None = None,
) -> Command:
    """Describe a verb by its function's signature and docstring.

    Args:
        verb: the verb.
        function: what runs it.
        examples: whole command lines.
        signature: the function or class that has the parameters and the docstring, whose section
            `Args` describes them; default `function`.
    """
    signature = signature or function
    text, described = _docstring(inspect.getdoc(signature) or "")
    hints = get_type_hints(signature, include_extras=True)
    groups: dict[str, tuple[Argument, ...]] = {"arguments": (), "options": ()}
    for name, parameter in inspect.signature(signature).parameters.items():
        default = parameter.default
        if default is parameter.empty:
            default = MISSING
        positional = parameter.kind is not parameter.KEYWORD_ONLY
        found = _argument(name, hints[name], default, described[name], positional=positional)
        groups["arguments" if positional else "options"] += (found,)
    return Command(
        verb=verb,
        function=function,
        description=_paragraphs(text),
        groups=groups,
        examples=tuple(examples),
    )


def describe_settings(
    sections: Iterable[type[Any]], defaults: Any, without: Iterable[str]
) -> dict[str, tuple[Argument, ...]]:
    """Return title -> arguments of each section of settings: `DataSettings` has the title `data`.

    Args:
        sections: settings classes whose fields have docstrings.
        defaults: an instance with the defaults to show.
        without: names of fields that are no flags.
    """
    groups = {}
    for section in sections:
        hints = get_type_hints(section, include_extras=True)
        described = _field_docstrings(section)
        found = []
        for one in fields(section):
            if one.name not in without:
                default = getattr(defaults, one.name)
                found.append(_argument(one.name, hints[one.name], default, described[one.name]))
        # `FineTuningSettings` -> "fine-tuning"
        words = re.findall(r"[A-Z][a-z]*", section.__name__.removesuffix("Settings"))
        groups["-".join(words).lower()] = tuple(found)
    return groups


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


@cache  # a file of several classes is parsed once
def _class_bodies(module: str) -> dict[str, list[ast.stmt]]:
    """Return the statements of each class of a module."""
    parts = ast.parse(inspect.getsource(sys.modules[module])).body
    return {part.name: part.body for part in parts if isinstance(part, ast.ClassDef)}


def _field_docstrings(cls: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a class."""
    # Python keeps no docstrings of fields, so they are read from the source
    body = _class_bodies(cls.__module__)[cls.__name__]
    described = {}
    for one, following in itertools.pairwise(body):
        match one, following:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                described[name] = " ".join(text.split())
    return described


def _paragraphs(text: str) -> tuple[str, ...]:
    return tuple(" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))


# Parsing: the words of a verb become values by the names of its parameters.


def parse(command: Command, words: Iterable[str], *, complete: bool = True) -> dict[str, Any]:
    """Parse the words of a verb: return the values that were given, by the names of parameters.

    Args:
        command: the verb.
        words: the words after it.
        complete: check positional arguments and required flags, too; otherwise return the values
            of flags alone.

    Raises:
        SettingError: a flag that does not exist, a value that is missing, empty, or of another
            type, a positional argument that is missing or one too many.
    """
    remaining = deque(words)
    positionals: list[str] = []
    given: dict[str, Any] = {}
    by_flag = _by_flag(command)
    while remaining:
        word = remaining.popleft()
        if _is_flag(word):
            _read_flag(command, by_flag, word, remaining, given)
            continue
        positionals.append(word)
        if not word.strip():
            raise SettingError(f"argument {len(positionals)} is empty; expected: {command.usage}")
    if complete:
        _place(command, positionals, given)
    return given


def _read_flag(
    command: Command,
    by_flag: Mapping[str, Argument],
    word: str,
    remaining: deque[str],
    given: dict[str, Any],
) -> None:
    """Read a flag and its values, which are taken from the words after it."""
    typed, equals, value = word.partition("=")
    if typed not in by_flag and typed[:2] in by_flag:  # -cdigits
        typed, equals, value = typed[:2], "=", word[2:]
    known = "--" + typed[2:].replace("_", "-") if typed.startswith("--") else typed
    group, dot, member = known.partition(".")  # --spec.patch-size
    found = by_flag.get(group + dot)
    if found is None:
        raise SettingError(_no_such_flag(command, typed))
    if found.is_switch:
        if equals:
            raise SettingError(f"{typed} takes no value; leave out ={value}")
        given[found.name] = not known.startswith("--no-")
        return
    words = [value] if equals else []
    while not equals and remaining and not _is_flag(remaining[0]) and (found.many or not words):
        words.append(remaining.popleft())
    if found.bare and not words:
        words = [found.bare]
    if not words:
        raise SettingError(f"{typed} needs {_needed(found, typed)}")
    values = [found.read(one, typed) for one in words]
    if found.counts and len(values) not in found.counts:
        expected = " or ".join(map(str, found.counts))
        raise SettingError(
            f"{typed} {' '.join(words)}: expected {expected} values, got {len(values)}"
        )
    if dot:
        given.setdefault(found.name, {})[member.replace("-", "_")] = values[0]
    else:
        given[found.name] = tuple(values) if found.many else values[0]


def _place(command: Command, values: list[str], given: dict[str, Any]) -> None:
    """Give the positional arguments their names; refuse one that is missing, or one too many."""
    expected = command.positionals
    missing = [argument.metavar for argument in expected[len(values) :] if argument.required]
    if missing and "resume" not in given:  # a resumed run has its own data
        are = "is" if len(missing) == 1 else "are"
        raise SettingError(f"{' and '.join(missing)} {are} missing; expected: {command.usage}")
    for number, argument in enumerate(expected[: len(values)]):
        if argument.many:
            given[argument.name] = tuple(values[number:])
            values = []
        else:
            given[argument.name] = argument.read(values[number], argument.metavar)
    if len(values) > len(expected):
        problem = f"{values[len(expected)]!r} is one argument too many; expected: {command.usage}"
        shards = [one for one in values if one.endswith(".tar")]
        if len(shards) > 1 and shards[0].startswith("wds:"):
            problem = (
                f"the shell expanded the name of the shards to {len(shards):,} names; put it in "
                "quotes: 'wds:shards-{0000..0099}.tar'"
            )
        raise SettingError(problem)
    for argument in command.arguments:
        if argument.flags and argument.required and argument.name not in given:
            message = f"{argument.label} is missing; expected: {command.usage}"
            if argument.choices:
                message += f"; {argument.metavar} is one of {', '.join(argument.choices)}"
            raise SettingError(message)


def wants_help(words: Sequence[str]) -> bool:
    """Return True if the help is asked for."""
    return not set(HELP).isdisjoint(words)


def _by_flag(command: Command) -> dict[str, Argument]:
    """Return every flag with its argument, also those that turn a switch off."""
    by_flag = {}
    for argument in command.arguments:
        for flag in argument.flags:
            by_flag[flag] = argument
            if argument.is_switch and flag.startswith("--"):
                by_flag[inverse(flag)] = argument
    return by_flag


def _is_flag(word: str) -> bool:
    """Return True for a word that begins with a dash and is no number; "-" is standard input."""
    return bool(re.match(r"-[^\d.]|-\.\D", word))


def _needed(found: Argument, typed: str) -> str:
    """Describe the value that a flag needs."""
    if found.kind is dict:
        return f"a value, such as {typed} 4"
    return KINDS.get(found.kind) or f"a value: {'|'.join(found.choices) or found.metavar}"


def _no_such_flag(command: Command, typed: str) -> str:
    """Return the message on a flag that does not exist, with the nearest one."""
    from vitkit.training.config.merging import hint_on, letters

    # flags that every verb has, and that are no arguments of it
    known = ["help", "help_all"]
    second: dict[str, str] = {}
    for argument in command.arguments:
        if argument.flags:
            known.append(argument.name)
            second |= {letters(flag): argument.name for flag in argument.flags}
    hint = hint_on(typed, known, second, as_flags=True)
    if not hint.startswith(";"):  # no remedy was found
        hint += f"; `vitkit {command.verb} {HELP_ALL if command.common else '--help'}` lists all"
    return f"there is no flag {typed}{hint}"


@contextmanager
def as_flags(command: Command, given: Mapping[str, Any]) -> Iterator[None]:
    """Name a given value that the block refuses by its flag: `--batch-size 0: must be ...`.

    Args:
        command: the verb.
        given: the values that were given; others may come from a file.
    """
    try:
        yield
    except UserError as error:
        wrong = error.wrong
        if wrong is None:
            raise
        labels = {}
        for one in command.arguments:
            if one.kind is dict:
                for name in given.get(one.name, ()):
                    labels[name] = f"{one.label}{name.replace('_', '-')} "
            elif one.name in given:
                labels[one.name] = f"{one.label} "
        for word in given.get("option", ()):  # --option steps=20
            name = word.partition("=")[0]
            labels[name.replace("-", "_")] = f"--option {name}="
        if wrong.field not in labels:
            raise  # about a value from a file
        message = f"{labels[wrong.field]}{wrong.value}: {wrong.expected}"
        raise type(error)(message) from None
