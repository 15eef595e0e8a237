"""`vitkit models [PATTERN]`."""

from __future__ import annotations

import sys

import torch
import tyro
from tyro.conf import Positional

from vitkit.errors import SettingError
from vitkit.models.presets import build, list_models


def models(pattern: Positional[str] = "*") -> None:
    """The models there are, with their parameters.

    Args:
        pattern: shell-style, such as 'vit_base*'.
    """
    names = list_models(pattern)
    if not names:
        raise SettingError(f"no model's name matches {pattern!r}; `vitkit models` lists all")
    with torch.device("meta"):
        for name in names:
            parameters = sum(p.numel() for p in build(name).parameters())
            sys.stdout.write(f"{name:<28} {parameters / 1e6:>8.2f} M parameters\n")


def run(arguments: list[str]) -> None:
    """Parse and list."""
    tyro.cli(models, args=arguments, prog="vitkit models")
