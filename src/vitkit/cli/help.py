"""The help of a verb, wrapped to the width of the terminal, and `vitkit completion SHELL`."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import Literal

from vitkit.cli.arguments import HELP, Argument, Command, inverse
from vitkit.messages import FEWEST_COLUMNS

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
    width = max(min(shutil.get_terminal_size().columns, WIDEST), FEWEST_COLUMNS)
    parts = [textwrap.fill(f"usage: {command.usage}", width, subsequent_indent=" " * 7)]
    for paragraph in command.description:
        parts.append(textwrap.fill(paragraph, width, break_on_hyphens=False))
    is_short = bool(command.common) and not everything
    for title, arguments in command.groups.items():
        shown = [one for one in arguments if not is_short or one.name in command.common]
        if shown:
            lines = [f"{title}:"]
            for argument in shown:
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
    parts.append("\n".join(["examples:", *_examples(command.examples, width)]))
    return "\n\n".join(parts).replace(NO_BREAK, " ")


def _entry(invocation: str, description: str, width: int) -> Iterator[str]:
    """Yield the lines of one argument; its description begins beside it where there is room."""
    lines = textwrap.wrap(description, width - COLUMN, break_on_hyphens=False)
    first = f"  {invocation}"
    # a flag too long for the column stands on a line of its own
    if lines and len(first) < COLUMN - 1:
        first = f"{first:<{COLUMN}}{lines.pop(0)}"
    yield from textwrap.wrap(first, width, subsequent_indent="      ", break_long_words=False)
    for line in lines:
        yield f"{' ' * COLUMN}{line}"


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
        notes.append(f"default:{NO_BREAK}{shown}")  # a note stays on one line
    if not notes:
        return text
    return f"{text} ({'; '.join(notes)})"


def _value(default: object) -> str:
    """Format a default value; nothing if it is not informative."""
    if isinstance(default, tuple):
        return NO_BREAK.join(map(_value, default))
    if isinstance(default, float):
        return f"{default:g}"
    if default is None or default is False:
        return ""
    return str(default)


def _examples(examples: Iterable[str], width: int) -> Iterator[str]:
    """Yield the example commands, each below what it does."""
    for example in examples:
        # two spaces: a `#` inside the command is part of it
        command, _, purpose = example.partition("  # ")
        if purpose:
            yield from textwrap.wrap(
                f"# {purpose}", width, initial_indent="  ", subsequent_indent="  # "
            )
        yield f"  {command.strip()}"


# Completion of verbs, flags and their values: one script with all of them for each shell.

EXAMPLES = (
    "source <(vitkit completion bash)  # bash, for this session; in ~/.bashrc for all",
    "vitkit completion zsh > ~/.zfunc/_vitkit  # zsh, with ~/.zfunc in $fpath",
    "vitkit completion fish > ~/.config/fish/completions/vitkit.fish",
)
BASH = """_vitkit() {
local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD-1]}" verb="" found
[ "$COMP_CWORD" -gt 1 ] && verb="${COMP_WORDS[1]}"
%s
COMPREPLY=($(compgen -W "$found" -- "$current"))
}
complete -o default -F _vitkit vitkit
"""
ZSH = """#compdef vitkit
local previous="$words[CURRENT-1]" verb="" found
(( CURRENT > 2 )) && verb="$words[2]"
%s
compadd -- ${=found}
_files
"""


def completion_command(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print the script that completes verbs, flags and their values in your shell.

    Args:
        shell: bash, zsh or fish.
    """
    # imported here: the list of verbs is made by a module that imports this one
    from vitkit.cli import VERBS, command_of

    commands = [command_of(verb) for verb in VERBS]
    if shell == "fish":
        sys.stdout.write(f"complete -c vitkit -n __fish_use_subcommand -a '{' '.join(VERBS)}'\n")
        for command in commands:
            _print_fish(command)
        return
    cases = [f'"") found="{" ".join(VERBS)}";;']
    for command in commands:
        cases.append(f'{command.verb}) found="{" ".join(_flags(command))}"')
        cases.append('case "$previous" in')
        for one in command.arguments:
            if one.choices and one.flags:
                cases.append(f'{"|".join(one.flags)}) found="{" ".join(one.choices)}";;')
        cases.append("esac;;")
    body = "\n".join(['case "$verb" in', *cases, "esac"])
    sys.stdout.write((BASH if shell == "bash" else ZSH) % body)


def _flags(command: Command) -> Iterator[str]:
    """Yield all flags; of a switch that is on by default, the one that turns it off, too."""
    for argument in command.arguments:
        if argument.kind is not dict:
            yield from argument.flags
        if argument.is_switch and argument.default:
            yield inverse(argument.label)
    yield from HELP[1:]


def _print_fish(command: Command) -> None:
    """Print a line for each flag of a verb."""
    start = f"complete -c vitkit -n '__fish_seen_subcommand_from {command.verb}'"
    choices: dict[str, tuple[str, ...]] = {}
    for one in command.arguments:
        choices |= dict.fromkeys(one.flags, one.choices)
    for flag in _flags(command):
        line = f"{start} -o {flag.lstrip('-')}"
        if flag.startswith("--"):
            line = f"{start} -l {flag[2:]}"
        if choices.get(flag):
            line += f" -x -a '{' '.join(choices[flag])}'"
        sys.stdout.write(f"{line}\n")
