"""`vitkit models [PATTERN]`."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase

import tyro
from tyro.conf import Positional

from vitkit.errors import SettingError
from vitkit.models.presets import list_models, preset, table
from vitkit.weights.catalogue import catalogue


def models_command(pattern: Positional[str] = "*", *, pretrained: bool = False) -> None:
    """List the models: name, parameters, image size in pixels, family.

    Args:
        pattern: names to list, with shell wildcards, such as 'vit_base*'.
        pretrained: list the published checkpoints instead: name, classes, licence, source, address.
    """
    lines = _checkpoints(pattern) if pretrained else _presets(pattern)
    if not lines:
        kind = "checkpoint" if pretrained else "model"
        verb = "models --pretrained" if pretrained else "models"
        raise SettingError(f"no {kind}'s name matches {pattern!r}; `vitkit {verb}` lists all")
    sys.stdout.writelines(f"{line}\n" for line in lines)


def run(arguments: list[str]) -> None:
    """Parse the arguments and list."""
    tyro.cli(models_command, args=arguments, prog="vitkit models")


def _presets(pattern: str) -> list[str]:
    lines = []
    entries = table()
    for name in list_models(pattern):
        size = "x".join(map(str, preset(name).image_size))
        millions = entries[name].parameters / 1e6
        lines.append(f"{name:<40} {millions:>8.2f} M  {size:<9} {entries[name].family}")
    return lines


def _checkpoints(pattern: str) -> list[str]:
    lines = []
    for name, entry in catalogue().items():
        # a pattern may name checkpoints or their architecture
        if fnmatchcase(name, pattern) or fnmatchcase(entry.preset, pattern):
            lines.append(
                f"{name:<58} {entry.classes:>6}  {entry.licence or 'not stated':<28} "
                f"{entry.source:<12}  {entry.address}"
            )
    return lines
