"""`vitkit models [PATTERN]`."""

from __future__ import annotations

import sys

import tyro
from tyro.conf import Positional

from vitkit.errors import SettingError
from vitkit.models.presets import list_models, preset, table


def models(pattern: Positional[str] = "*") -> None:
    """The models there are: name, parameters, picture size in pixels, family.

    Args:
        pattern: shell-style, such as 'vit_base*'.
    """
    names = list_models(pattern)
    if not names:
        raise SettingError(f"no model's name matches {pattern!r}; `vitkit models` lists all")
    entries = table()
    for name in names:
        spec, entry = preset(name), entries[name]
        size = "x".join(map(str, spec.image_size))
        sys.stdout.write(f"{name:<40} {entry.parameters / 1e6:>8.2f} M  {size:<9} {entry.family}\n")


def run(arguments: list[str]) -> None:
    """Parse and list."""
    tyro.cli(models, args=arguments, prog="vitkit models")
