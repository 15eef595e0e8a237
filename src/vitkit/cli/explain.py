"""`vitkit explain CHECKPOINT IMAGES...`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro
from tyro.conf import Positional

from vitkit.cli.images import UsableImages, files_of_checkpoint, find_files, refuse_images_first
from vitkit.cli.parsing.fields import as_flags
from vitkit.cli.printing.next_steps import flags, print_results
from vitkit.errors import ImageError
from vitkit.io.results import check_outputs
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
    usable = UsableImages(find_files(images), strict=strict)
    # imported here: --help and wrong paths do not wait for torch
    from vitkit import api
    from vitkit.devices import on_device, resolve_device
    from vitkit.explaining.overlay import EXPLANATION_FILE
    from vitkit.weights.load import load

    outputs = _output_paths(usable.paths, Path(output))
    inputs = [*usable.paths, *files_of_checkpoint(checkpoint)]
    check_outputs(outputs, EXPLANATION_FILE, inputs=inputs, overwrite=overwrite, flag="--output")
    loaded = load(checkpoint)
    # moved once, not for every image
    loaded = replace(loaded, model=on_device(loaded.model, resolve_device(device)))

    explain = partial(api.explain, loaded, method=method, layer=layer, head=head, device=device)
    for image, (explanation, path) in usable.with_outputs(_saved(explain, usable.paths, outputs)):
        _print_line(image, explanation, path)
    written = plural(len(outputs) - usable.broken, "explanation")
    another = flags(layer="0", output=f"{output}-layer-0")
    then = [("explain", checkpoint, str(usable.paths[0]), *another)] if layer else []
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


def _output_paths(images: Sequence[Path], folder: Path) -> list[Path]:
    """Return a path for each explanation; images of two folders may share a name."""
    names: dict[str, None] = {}  # in their order
    for image in images:
        name = image.stem
        count = 1
        while name in names:
            count += 1
            name = f"{image.stem}-{count}"
        names[name] = None
    return [folder / f"{name}.png" for name in names]
