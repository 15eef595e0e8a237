"""`vitkit summary MODEL|CHECKPOINT`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import tyro
from rich.console import Console
from tyro.conf import Positional

from vitkit.cli.models import listing_weights
from vitkit.cli.output import suggest, terminal_width
from vitkit.cli.parsing import as_flags
from vitkit.errors import SettingError
from vitkit.models.presets import preset, table
from vitkit.other_names import usual_name

PLAIN_WIDTH = 140
"""Columns where the output is not a terminal, so that nothing is cut."""
FULL_TABLE_WIDTH = 120
"""Columns that the table needs with all its columns."""


EXAMPLES = (
    "vitkit summary vit_tiny_patch16_224  # equal blocks are one row",
    "vitkit summary vit_tiny_patch16_224 --depth 1 --img-size 384  # shorter, at another size",
    "vitkit summary runs/photos-vit-1  # the model of a run",
)


def summary_command(model: Positional[str], *, depth: int = 3, img_size: int | None = None) -> None:
    """Print the layer table of a model: shapes, parameters, multiply-adds and memory.

    Args:
        model: a model's name, or a checkpoint of any known format.
        depth: levels of nested modules to show; 0 shows the whole model alone.
        img_size: image size in pixels; default the model's own.
    """
    if depth < 0:
        raise SettingError.about("depth", depth, "must be 0 or more")
    if img_size is not None and img_size < 1:
        raise SettingError.about("img_size", img_size, "must be 1 or more")
    model = model if os.path.exists(model) else usual_name(model, table())
    # timm's names of models have neither a dot nor a slash
    is_file = os.path.exists(model) or bool(Path(model).suffix) or "/" in model
    if not is_file:
        preset(model)  # a name that does not exist is refused before torch is imported
    import torch

    from vitkit.layer_table import summary
    from vitkit.models.vit import ViT
    from vitkit.weights.load import load

    if is_file:
        vit = load(model).model
    else:
        with torch.device("meta"):  # shapes suffice
            vit = ViT(preset(model))
    spec = vit.spec
    size = spec.image_size if img_size is None else (img_size, img_size)
    layers = summary(vit, (1, spec.in_channels, *size))
    # a file or a pipe gets the columns of a narrow terminal, too, and cells of any length
    width = terminal_width()
    console = Console(highlight=False, width=width or PLAIN_WIDTH)
    with console.capture() as captured:
        console.print(layers.render(depth, narrow=(width or 0) < FULL_TABLE_WIDTH))
    sys.stdout.write(captured.get())
    if is_file:
        suggest(("inspect", model))
    else:
        suggest(*listing_weights(model))


def run(arguments: list[str]) -> None:
    """Parse the arguments and print the table."""
    with as_flags("depth", "img_size"):
        tyro.cli(summary_command, args=arguments, prog="vitkit summary")
