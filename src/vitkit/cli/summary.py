"""`vitkit summary MODEL|CHECKPOINT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import tyro
from rich.console import Console
from tyro.conf import Positional

from vitkit.layer_table import summary
from vitkit.models.presets import build
from vitkit.weights.load import load

PLAIN_WIDTH = 140
"""Columns where the output is not a terminal, so that nothing is cut."""
FULL_TABLE_WIDTH = 120
"""Columns that the table needs with all its columns."""


def summary_command(model: Positional[str], *, depth: int = 3, img_size: int | None = None) -> None:
    """Print the layer table: sizes, parameters, true multiply-adds, memory.

    Args:
        model: a model's name, or a checkpoint of any known format.
        depth: how many levels of modules to show.
        img_size: image size in pixels; default the model's own.
    """
    # names of models have neither a dot nor a slash
    if os.path.exists(model) or Path(model).suffix or "/" in model:
        vit = load(model).model
    else:
        with torch.device("meta"):  # shapes suffice
            vit = build(model)
    spec = vit.spec
    size = spec.image_size if img_size is None else (img_size, img_size)
    table = summary(vit, (1, spec.in_channels, *size))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    with console.capture() as captured:
        console.print(table.render(depth, narrow=console.width < FULL_TABLE_WIDTH))
    sys.stdout.write(captured.get())


def run(arguments: list[str]) -> None:
    """Parse the arguments and print the table."""
    tyro.cli(summary_command, args=arguments, prog="vitkit summary")
