"""`vitkit explain CHECKPOINT IMAGES...`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Literal

import tyro
from tyro.conf import Positional

from vitkit.cli.images import UsableImages, files_of_checkpoint, find_files, refuse_images_first
from vitkit.cli.parsing.fields import as_flags
from vitkit.cli.printing.next_steps import flags, print_results
from vitkit.errors import ImageError
from vitkit.io.results import ResultPlaces, check_outputs
from vitkit.messages import escape, plural

if TYPE_CHECKING:
    from vitkit.explaining.overlay import Explanation

Method = Literal["attention"]
"""Written out, as the methods themselves are written with torch."""


EXAMPLES = (
    "vitkit explain runs/photos-1 cat.jpg  # where the last layer looks",
    "vitkit explain runs/photos-1 cat.jpg --layer 0 --head 2 --output first-layer",
    "vitkit explain model.safetensors photos/cat  # every image of a folder",
)


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
        images: files, folders, quoted patterns ('photos/**/*.png'), or - (reads paths from the
            standard input).
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
    usable = UsableImages(find_files(images), strict=strict)
    # imported here: --help and wrong paths do not wait for torch
    from vitkit import api
    from vitkit.devices import on_device, resolve_device
    from vitkit.explaining.overlay import EXPLANATION_FILE
    from vitkit.weights.load import load

    places = ResultPlaces(Path(output), ".png")
    outputs = [places.path(PurePath(image.name)) for image in usable.paths]
    inputs = [*usable.paths, *files_of_checkpoint(checkpoint)]
    check_outputs(outputs, EXPLANATION_FILE, inputs=inputs, overwrite=overwrite, flag="--output")
    loaded = load(checkpoint)
    # moved once, not for every image
    loaded = replace(loaded, model=on_device(loaded.model, resolve_device(device)))

    explain = partial(api.explain, loaded, method=method, layer=layer, head=head, device=device)
    for image, (explanation, path) in usable.with_outputs(_saved(explain, usable.paths, outputs)):
        _print_line(image, explanation, path)
    written = plural(len(outputs) - usable.broken, "explanation")
    then = []
    if layer != 0:  # the first layer, to compare with
        another = flags(layer="0", output=f"{output}-layer-0")
        then = [("explain", checkpoint, str(usable.paths[0]), *another)]
    print_results(f"{written} in {output}", then=then)
    usable.refuse_broken()


def _saved(
    explain: Callable[[Path], Explanation], images: Iterable[Path], outputs: Iterable[Path]
) -> Iterator[tuple[Explanation, Path] | ImageError]:
    """Yield the explanation of each image and the file that has it, or the error instead."""
    for image, path in zip(images, outputs, strict=True):
        try:
            explanation = explain(image)
        except ImageError as error:
            yield error
            continue
        yield explanation, explanation.save(path)


def _print_line(image: Path, explanation: Explanation, path: Path) -> None:
    prediction = ""
    if explanation.label:
        prediction = f"{escape(explanation.label)} {explanation.probability:.3f} "
    sys.stdout.write(f"{escape(image)}: {prediction}-> {escape(path)}\n")


def run(arguments: list[str]) -> None:
    """Parse the arguments and explain."""
    with as_flags("layer", "head"):
        tyro.cli(explain_command, args=arguments, prog="vitkit explain")
