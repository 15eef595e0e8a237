"""`vitkit explain CHECKPOINT IMAGES...`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import tyro
from tyro.conf import Positional

from vitkit.cli.explaining.checkpoint import load_on_device
from vitkit.cli.explaining.model import draw_what_was_learned, refuse_without_effect
from vitkit.cli.images import UsableImages, files_of_checkpoint, find_files, refuse_images_first
from vitkit.cli.parsing.fields import as_flags
from vitkit.cli.printing.next_steps import flags, print_results
from vitkit.errors import ImageError, SettingError
from vitkit.explaining.choice import find_method, method_options
from vitkit.explaining.methods import METHODS
from vitkit.messages import escape, plural

if TYPE_CHECKING:
    from vitkit.explaining.explanation import Explanation
    from vitkit.explaining.files import ExplanationFiles
    from vitkit.explaining.truth_of_images import TruthOfImages
    from vitkit.weights.checkpoint import Checkpoint

    MethodName: TypeAlias = str
else:
    # the registry's names, which the help and the check of a value read
    MethodName = Literal[(*METHODS, "all")]

ALL = "all"
"""The word for every method of the registry."""

EXAMPLES = (
    "vitkit explain runs/photos-vit-1 cat.jpg  # where the last layer looks",
    "vitkit explain runs/photos-vit-1 cat.jpg --layer 0 --head 2 --output first",
    "vitkit explain runs/photos-vit-1 cat.jpg --method all  # every method, and a page of them",
    "vitkit explain runs/photos-vit-1 photos/cat --truth  # how far the maps may be trusted",
    "vitkit explain model.safetensors photos/cat  # every image of a folder",
    "vitkit explain runs/photos-vit-1 photos --model  # filters, positions, attention over depth",
)


def explain_command(
    checkpoint: Positional[str],
    images: Positional[tuple[str, ...]] = (),
    *,
    model: bool = False,
    method: MethodName = "attention",
    class_name: Annotated[str | None, tyro.conf.arg(aliases=("--class",))] = None,
    layer: int | None = None,
    head: int | None = None,
    option: tuple[str, ...] = (),
    sheet: bool = False,
    truth: bool = False,
    output: str = "explanations",
    format: Literal["png", "svg"] = "png",
    overwrite: bool = False,
    device: str = "auto",
    strict: bool = False,
) -> None:
    """Show what a model looks at: each image beside its heat map, as a PNG or SVG file.

    With --method all, each image gets a folder with the maps of every method that the model can
    carry, and index.html shows them. An image that cannot be used is named on stderr and left out;
    the others are explained, and the exit code is 2 at the end.

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        images: files, folders, quoted patterns ('photos/**/*.png'), or - (reads paths from the
            standard input).
        model: show what the model has learned, on all IMAGES together: filters, positions, and
            attention over depth. IMAGES may also be datasets, or be left out.
        method: the method that computes the heat map, or all.
        class_name: the class to explain, by its name or number; default the predicted class of
            each image. Some maps are the same for every class, and say so.
        layer: encoder block, from 0; negative numbers count from the end; default the method's own.
        head: attention head, from 0; default the mean of all heads.
        option: further options of the method, such as steps=20.
        sheet: also draw the attention of all layers and heads, in the folder heads of the output.
        truth: measure how far the maps may be trusted; print it, and write truth.json. Default: of
            small models only the score of each map.
        output: folder for the files.
        format: png or svg, of the figures.
        overwrite: replace any existing file that is not an input; default: only earlier
            explanations.
        device: cpu, cuda, mps or auto.
        strict: stop at the first image that cannot be used.
    """
    if model:
        others = {"class": class_name, "layer": layer, "head": head, "truth": truth}
        refuse_without_effect(method, format, **others, option=option, sheet=sheet)
        draw_what_was_learned(checkpoint, images, output, overwrite, device, strict)
        return
    options = _options(method, {"layer": layer, "head": head, **_pairs(option)})
    usable = _find_usable(checkpoint, images, strict)
    files, truths = _outputs(
        checkpoint, usable, method, options, Path(output), format, sheet, truth, overwrite
    )
    methods = [*METHODS] if method == ALL else [method]
    loaded = load_on_device(checkpoint, class_name, device)
    _explain(loaded, checkpoint, usable, files, class_name, (methods, options, truths))


def _find_usable(checkpoint: str, images: tuple[str, ...], strict: bool) -> UsableImages:
    """Return the images to explain; `SettingError` where none are named."""
    if not images:
        raise SettingError(
            "IMAGES is missing; expected: vitkit explain CHECKPOINT IMAGES ... [flags]"
        )
    refuse_images_first("explain", checkpoint, "IMAGES")
    return UsableImages(find_files(images), strict=strict)


def _outputs(
    checkpoint: str,
    usable: UsableImages,
    method: str,
    options: dict[str, object],
    output: Path,
    format: str,
    sheet: bool,
    truth: bool,
    overwrite: bool,
) -> tuple[ExplanationFiles, list[Path]]:
    """Return the files to write, checked: those of the images, and that of the truth if asked."""
    # imported here: --help and wrong paths do not wait for torch
    from vitkit.explaining.files import every_file
    from vitkit.explaining.truth_of_images import truth_file

    names = [PurePath(image.name) for image in usable.paths]
    of_one = None if method == ALL else method
    files = every_file(output, names, f".{format}", method=of_one, options=options, sheets=sheet)
    inputs = [*usable.paths, *files_of_checkpoint(checkpoint)]
    files.check(inputs, overwrite=overwrite)
    return files, [truth_file(output, inputs, overwrite=overwrite)] if truth else []


def _explain(
    loaded: Checkpoint,
    checkpoint: str,
    usable: UsableImages,
    files: ExplanationFiles,
    class_name: str | None,
    truth: tuple[list[str], dict[str, object], list[Path]],
) -> None:
    """Explain the images, write their files, and print a line for each.

    `truth` is the methods, their options, and the file of the truth report, if it is wanted.
    """
    from vitkit.explaining.truth_of_images import TruthOfImages

    methods, options, truths = truth
    found = TruthOfImages(loaded, methods, options) if truths else None

    explained = _explained(loaded, usable.paths, class_name, files, found)
    for image, (explanation, path) in usable.with_outputs(explained):
        _print_line(image, explanation, path)
        if len(methods) == 1 and explanation.truth is not None:  # of all methods, the page has it
            sys.stdout.write(f"  {explanation.truth.line}\n")
    for name, reason in files.refused.items():
        sys.stderr.write(f"vitkit: {name} is left out: {reason}\n")
    for path in truths:
        _print_truth(found, files.refused, path)
    place = files.finish(f"What {checkpoint} looks at")
    done = len(usable.paths) - usable.broken
    if place == files.folder:
        every = flags(method=ALL, class_name=class_name, output=f"{place}-{ALL}")
        then = [("explain", checkpoint, str(usable.paths[0]), *every)]
        print_results(f"{plural(done, 'explanation')} in {place}", then=then)
    else:
        print_results(f"{plural(done, 'image')} in {place}")
    usable.refuse_broken()


def _explained(
    checkpoint: Checkpoint,
    images: Sequence[Path],
    class_name: str | None,
    files: ExplanationFiles,
    truth: TruthOfImages | None,
) -> Iterator[tuple[Explanation, Path] | ImageError]:
    """Yield the explanation of each image and the place of its files, or the error instead."""
    from vitkit.explaining.explain import ImageExplainer
    from vitkit.prediction.images import read_any_image

    for number, image in enumerate(images):
        try:
            pixels = read_any_image(image)
        except ImageError as error:
            yield error
            continue
        explainer = ImageExplainer(
            checkpoint, pixels, class_name, truth=None if truth is None else True
        )
        yield files.save(number, explainer)
        if truth is not None:
            truth.add(str(image), explainer)


def _print_truth(truth: TruthOfImages | None, refused: Mapping[str, str], path: Path) -> None:
    """Measure the methods over all images, print the lines, and write the file."""
    if truth is not None and truth.count:
        for line in truth.lines(refused):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()  # the next method may take a while
        truth.write(path)


def _pairs(words: tuple[str, ...]) -> dict[str, object]:
    """Return the options written `NAME=VALUE`; values are numbers where they can be."""
    pairs: dict[str, object] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals or not value:
            raise SettingError(f"--option {word}: expected NAME=VALUE, such as steps=20")
        pairs[name.replace("-", "_")] = _number(value)
    return pairs


def _number(value: str) -> object:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _options(method: str, options: dict[str, object]) -> dict[str, object]:
    """Return the options that were set; `SettingError` for one that no chosen method has."""
    if method != ALL:
        return method_options(find_method(method), options)
    for name, value in options.items():
        if value is not None and not any(name in other.options for other in METHODS.values()):
            known = sorted({option for other in METHODS.values() for option in other.options})
            expected = f"no method has this option; options are {', '.join(known)}"
            raise SettingError.about(name, value, expected)
    return {name: value for name, value in options.items() if value is not None}


def _print_line(image: Path, explanation: Explanation, path: Path) -> None:
    prediction = ""
    if explanation.label:
        prediction = f"{escape(explanation.label)} {explanation.probability:.3f} "
    sys.stdout.write(f"{escape(image)}: {prediction}-> {escape(path)}\n")


def run(arguments: list[str]) -> None:
    """Parse the arguments and explain."""
    with as_flags("layer", "head", "class_name"):
        tyro.cli(explain_command, args=arguments, prog="vitkit explain")
