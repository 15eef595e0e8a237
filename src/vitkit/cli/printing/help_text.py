"""The help of the verbs, wrapped to the width of the terminal."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator

from vitkit.cli.parsing.argument import Argument
from vitkit.cli.parsing.command import Command
from vitkit.cli.printing.columns import FEWEST_COLUMNS

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
    width = line_width()
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


def line_width() -> int:
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
