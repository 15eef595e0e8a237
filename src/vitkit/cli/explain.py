"""`vitkit explain CHECKPOINT IMAGES...`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import tyro
from tyro.conf import Positional

from vitkit import api
from vitkit.cli.image_arguments import find_images
from vitkit.data.images.decode import escape
from vitkit.devices import on_device, resolve_device
from vitkit.weights.load import load


def explain(
    checkpoint: Positional[str],
    images: Positional[tuple[str, ...]],
    *,
    method: Literal["attention"] = "attention",
    layer: int = -1,
    head: int | None = None,
    output: str = "explanations",
    device: str = "auto",
) -> None:
    """What a checkpoint looks at: each image beside its heat map, as a PNG.

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        images: files, or folders of them.
        method: how the map is made.
        layer: encoder block; negative ones count from the end.
        head: one attention head; default their mean.
        output: the folder for the PNGs.
        device: cpu, cuda, mps or auto.
    """
    stored = load(checkpoint)
    stored = replace(stored, model=on_device(stored.model, resolve_device(device)))
    taken: set[str] = set()
    for image in find_images(images):
        made = api.explain(stored, image, method=method, layer=layer, head=head, device=device)
        name, count = image.stem, 1
        while name in taken:
            count += 1
            name = f"{image.stem}-{count}"
        taken.add(name)
        path = made.save(Path(output) / f"{name}.png")
        said = f"{escape(made.label)} {made.probability:.3f} " if made.label else ""
        sys.stdout.write(f"{escape(image)}: {said}-> {escape(path)}\n")


def run(arguments: list[str]) -> None:
    """Parse and explain."""
    tyro.cli(explain, args=arguments, prog="vitkit explain")
