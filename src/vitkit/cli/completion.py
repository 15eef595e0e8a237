"""`vitkit completion SHELL`."""

from __future__ import annotations

import io
import sys
from contextlib import redirect_stdout, suppress
from importlib import import_module, util
from typing import Annotated, Any, Literal, Union

import tyro
from tyro.conf import Positional

from vitkit.errors import SettingError

Shell = Literal["bash", "zsh", "fish", "tcsh"]


EXAMPLES = (
    "source <(vitkit completion bash)  # bash, for this session; in ~/.bashrc for all",
    "vitkit completion zsh > ~/.zfunc/_vitkit  # zsh, with ~/.zfunc in $fpath",
    "vitkit completion fish > ~/.config/fish/completions/vitkit.fish",
)


def completion_command(shell: Positional[Shell]) -> None:
    """Print the script that completes verbs, flags and their values in your shell.

    Args:
        shell: bash, zsh, fish or tcsh; tcsh needs the package shtab.
    """
    if shell == "tcsh" and util.find_spec("shtab") is None:
        raise SettingError("tcsh needs the package shtab; pip install shtab")
    script = io.StringIO()
    with redirect_stdout(script), suppress(SystemExit):  # it ends so when it has printed
        tyro.cli(_all_verbs(), prog="vitkit", args=["--tyro-print-completion", shell])
    # a line break in a description would end it in the list of completions
    lines = []
    for line in script.getvalue().splitlines():
        is_data = line.startswith("COMPLETION_SPEC")
        lines.append(line.replace("\\n", " ") if is_data else line)
    sys.stdout.writelines(f"{line}\n" for line in lines)


def run(arguments: list[str]) -> None:
    """Parse the arguments and print."""
    tyro.cli(completion_command, args=arguments, prog="vitkit completion")


def _all_verbs() -> Any:
    """Return the verbs as one type for tyro, with one subcommand each."""
    from vitkit.cli import VERBS
    from vitkit.training.config.train_config import TrainConfig

    verbs = [_subcommand("train", default=TrainConfig(data=""))]
    for verb in VERBS:
        if verb != "train":
            module = import_module(f"vitkit.cli.{verb}")
            verbs.append(_subcommand(verb, constructor=getattr(module, f"{verb}_command")))
    return Union[tuple(verbs)]  # noqa: UP007 - made at run time


def _subcommand(verb: str, **what: Any) -> Any:
    subcommand = tyro.conf.subcommand(verb, prefix_name=False, **what)
    return Annotated[type(what["default"]) if "default" in what else Any, subcommand]
