"""`vitkit explain CHECKPOINT IMAGES...`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import tyro
from tyro.conf import Positional

from vitkit import api
from vitkit.cli.arguments import as_flags
from vitkit.cli.images import UsableImages, files_of_checkpoint, find_images, refuse_images_first
from vitkit.devices import on_device, resolve_device
from vitkit.errors import ImageError
from vitkit.explaining.methods import METHODS
from vitkit.explaining.overlay import EXPLANATION_FILE, Explanation
from vitkit.io.results import check_outputs
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
    overwrite: bool = False,
    device: str = "auto",
    strict: bool = False,
) -> None:
    """Show what a model looks at: each image beside its heat map, as a PNG file.

    An image that cannot be used is named on stderr and left out; the others are explained, and the
    exit code is 2 at the end.

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        images: files, or folders of them.
        method: the method that computes the heat map.
        layer: encoder block, from 0; negative numbers count from the end.
        head: attention head, from 0; default the mean of all heads.
        output: folder for the PNG files.
        overwrite: replace any existing file that is not an input; default: only earlier
            explanations.
        device: cpu, cuda, mps or auto.
        strict: stop at the first image that cannot be used.
    """
    refuse_images_first("explain", checkpoint, "IMAGES")
    usable = UsableImages(find_images(images), strict=strict)
    names: set[str] = set()
    outputs = [Path(output) / f"{_unique(image.stem, names)}.png" for image in usable.paths]
    inputs = [*usable.paths, *files_of_checkpoint(checkpoint)]
    check_outputs(outputs, EXPLANATION_FILE, inputs=inputs, overwrite=overwrite, flag="--output")
    loaded = load(checkpoint)
    # moved once, not for every image
    loaded = replace(loaded, model=on_device(loaded.model, resolve_device(device)))

    def explanations() -> Iterator[tuple[Explanation, Path] | ImageError]:
        for image, path in zip(usable.paths, outputs, strict=True):
            try:
                explanation = api.explain(
                    loaded, image, method=method, layer=layer, head=head, device=device
                )
            except ImageError as error:
                yield error
                continue
            yield explanation, explanation.save(path)

    for image, (explanation, path) in usable.with_outputs(explanations()):
        prediction = ""
        if explanation.label:
            prediction = f"{escape(explanation.label)} {explanation.probability:.3f} "
        sys.stdout.write(f"{escape(image)}: {prediction}-> {escape(path)}\n")
    usable.refuse_broken()


def run(arguments: list[str]) -> None:
    """Parse the arguments and explain."""
    with as_flags("layer", "head"):
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
