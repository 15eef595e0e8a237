"""`vitkit summary MODEL|CHECKPOINT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import tyro
from rich.console import Console
from tyro.conf import Positional

from vitkit.layer_table import summary as layer_table
from vitkit.models.presets import build
from vitkit.weights.load import load

WIDE = 140
"""Columns where the output is no terminal, so that nothing is cut."""
FRAMED = 120
"""Columns that the whole table needs."""


def summary(model: Positional[str], *, depth: int = 3, img_size: int | None = None) -> None:
    """The layer table: sizes, parameters, true multiply-adds, memory.

    Args:
        model: a model's name, or a checkpoint of any known format.
        depth: how many levels of modules to show.
        img_size: image size in pixels; default the model's own.
    """
    if os.path.exists(model) or Path(model).suffix or "/" in model:
        vit = load(model).model
    else:
        with torch.device("meta"):
            vit = build(model)
    spec = vit.spec
    size = spec.image_size if img_size is None else (img_size, img_size)
    table = layer_table(vit, (1, spec.in_channels, *size))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    with console.capture() as captured:
        console.print(table.render(depth, narrow=console.width < FRAMED))
    sys.stdout.write(captured.get())


def run(arguments: list[str]) -> None:
    """Parse and show."""
    tyro.cli(summary, args=arguments, prog="vitkit summary")
