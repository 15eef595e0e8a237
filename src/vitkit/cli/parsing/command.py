"""`Command`: what a verb does and takes, read from its function or from the settings of a run."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, dataclass, fields
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from tyro.conf import Positional, Suppress

from vitkit.cli.parsing.argument import Argument, argument


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
