"""`vitkit explain CHECKPOINT IMAGES...`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import tyro
from tyro.conf import Positional

from vitkit import api
from vitkit.cli.images import find_images
from vitkit.devices import on_device, resolve_device
from vitkit.explaining import METHODS
from vitkit.messages import escape
from vitkit.weights.load import load

# tyro reads the choices when the command runs; a type checker cannot
if TYPE_CHECKING:
    Method: TypeAlias = str
else:
    Method = tyro.extras.literal_type_from_choices(METHODS)


def explain_command(
    checkpoint: Positional[str],
    images: Positional[tuple[str, ...]],
    *,
    method: Method = "attention",
    layer: int = -1,
    head: int | None = None,
    output: str = "explanations",
    device: str = "auto",
) -> None:
    """Draw what a model looks at: each image beside its heat map, as a PNG.

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        images: files, or folders of them.
        method: the method that computes the heat map.
        layer: encoder block; negative ones count from the end.
        head: one attention head; default their mean.
        output: the folder for the PNGs.
        device: cpu, cuda, mps or auto.
    """
    loaded = load(checkpoint)
    # moved once, not for every image
    loaded = replace(loaded, model=on_device(loaded.model, resolve_device(device)))
    names: set[str] = set()
    for image in find_images(images):
        explanation = api.explain(
            loaded, image, method=method, layer=layer, head=head, device=device
        )
        path = explanation.save(Path(output) / f"{_unique(image.stem, names)}.png")
        prediction = ""
        if explanation.label:
            prediction = f"{escape(explanation.label)} {explanation.probability:.3f} "
        sys.stdout.write(f"{escape(image)}: {prediction}-> {escape(path)}\n")


def run(arguments: list[str]) -> None:
    """Parse the arguments and explain."""
    tyro.cli(explain_command, args=arguments, prog="vitkit explain")


def _unique(stem: str, names: set[str]) -> str:
    """Return a name that is not among `names`, and add it: images of two folders may share one."""
    name = stem
    count = 1
    while name in names:
        count += 1
        name = f"{stem}-{count}"
    names.add(name)
    return name
