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
    for line in script.getvalue().splitlines():
        if line.startswith("COMPLETION_SPEC"):
            line = line.replace("\\n", " ")
        sys.stdout.write(f"{line}\n")


def run(arguments: list[str]) -> None:
    """Parse the arguments and print."""
    tyro.cli(completion_command, args=arguments, prog="vitkit completion")


def _all_verbs() -> Any:
    """Return the verbs as one type for tyro, with one subcommand each."""
    from vitkit.cli import VERBS
    from vitkit.frozen import frozen
    from vitkit.training.config.train_config import TrainConfig

    @frozen(raises=SettingError)
    class Train(TrainConfig):
        """Every setting of a run, and the flags that are not settings."""

        prove_resume: bool = False
        show_batch: bool = False
        help_all: bool = False

    # the settings of a run are fields of a class; the other verbs are functions
    train = tyro.conf.subcommand("train", prefix_name=False, default=Train(data=""))
    verbs: list[Any] = [Annotated[Train, train]]
    for verb in VERBS:
        if verb != "train":
            function = getattr(import_module(f"vitkit.cli.{verb}"), f"{verb}_command")
            subcommand = tyro.conf.subcommand(verb, prefix_name=False, constructor=function)
            verbs.append(Annotated[Any, subcommand])
    return Union[tuple(verbs)]  # noqa: UP007 - made at run time
