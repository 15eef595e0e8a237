"""`vitkit explain CHECKPOINT IMAGES...`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import tyro
from tyro.conf import Positional

from vitkit.cli.explaining.checkpoint import load_on_device, model_of_passes
from vitkit.cli.explaining.model import draw_what_was_learned, refuse_without_effect
from vitkit.cli.explaining.options import ALL, named_as_options, options_of, read_options
from vitkit.cli.explaining.outputs import check_files, check_one_file, explanation_files, is_file
from vitkit.cli.parsing.fields import as_flags
from vitkit.cli.parsing.images import (
    StreamedImages,
    files_of_checkpoint,
    find_arguments,
    refuse_images_first,
)
from vitkit.cli.printing.next_steps import flags, print_results
from vitkit.errors import SettingError
from vitkit.explaining.methods import METHODS
from vitkit.messages import plural

if TYPE_CHECKING:
    from vitkit.cli.explaining.images import ExplainedImages, Reports
    from vitkit.explaining.files import ExplanationFiles
    from vitkit.prediction.image_list import ImageList

    MethodName: TypeAlias = str
else:
    # the registry's names, which the help and the check of a value read
    MethodName = Literal[(*METHODS, "all")]

DEFAULT_OUTPUT = "explanations"
EXAMPLES = (
    "vitkit explain runs/photos-vit-1 cat.jpg  # which patches speak for the class",
    "vitkit explain runs/photos-vit-1 cat.jpg --layer 0 --head 2 --output first.png",
    "vitkit explain runs/photos-vit-1 cat.jpg --method all  # every method, and a page of them",
    "vitkit explain runs/photos-vit-1 cat.jpg --method rollout --animate  # layer by layer, as GIF",
    "vitkit explain runs/photos-vit-1 photos/cat --truth  # how far the maps may be trusted",
    "vitkit explain model.safetensors mnist --split test  # every image of a dataset",
    "vitkit explain runs/photos-vit-1 photos --model  # filters, positions, attention over depth",
)


def explain_command(
    checkpoint: Positional[str],
    images: Positional[tuple[str, ...]] = (),
    *,
    model: bool = False,
    method: MethodName | None = None,
    class_name: Annotated[str | None, tyro.conf.arg(aliases=("--class",))] = None,
    layer: int | None = None,
    head: int | None = None,
    option: tuple[str, ...] = (),
    sheet: bool = False,
    animate: bool = False,
    truth: bool = False,
    test_time_registers: bool = False,
    output: str = DEFAULT_OUTPUT,
    format: Literal["png", "svg"] = "png",
    split: str | None = None,
    data_root: str | None = None,
    overwrite: bool = False,
    device: str = "auto",
    engine: Literal["auto", "torch"] = "torch",
    precision: Literal["float32", "bfloat16"] = "float32",
    strict: bool = False,
) -> None:
    """Show what a model looks at: each image beside its heat map, as a PNG or SVG file.

    With --method all, each image gets a folder with the maps of every method, and index.html shows
    them. Images that cannot be used are named; the exit code is then 2.

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        images: files, folders, quoted patterns ('photos/**/*.png'), http(s) addresses, - (reads
            paths from the standard input), or datasets (list.csv, x.parquet, 'wds:*.tar', mnist).
        model: draw what the model has learned, on all IMAGES together; they may be left out.
        method: the method that computes the heat map, or all; default libragrad, attention where a
            layer or a head is chosen, rollout where the model has no head.
        class_name: the class to explain, by its name or number; default the predicted class.
        layer: encoder block, from 0; negative numbers count from the end; default the method's own.
        head: attention head, from 0; default the mean of all heads.
        option: further options of the method, such as steps=20.
        sheet: also draw the attention of all layers and heads, in the folder heads of the output.
        animate: also write the maps of all layers as an animated GIF; with --method all, rollout's.
        truth: measure how far the maps may be trusted, in truth.json. Deletion and insertion are 1
            at best and 0 for random orders, SaCo is from -1 to 1; p below 0.05 beats chance.
        test_time_registers: move high norms to an extra token; count them in registers.json.
        output: folder for the files; or, of one image and one method, a .png, .svg or .gif file.
        format: png or svg, of the figures in a folder.
        split: train, val or test: only this split of datasets and of folders with class folders.
        data_root: folder of the named datasets, or the folder that the paths of a CSV begin at.
        overwrite: replace any file that is not an input; default: only earlier explanations.
        device: cpu, cuda, mps or auto.
        engine: auto runs truth scores and occlusion with the fastest kernels here.
        precision: of those forward passes.
        strict: stop at the first image that cannot be used.
    """
    given = _Given(**locals())
    if model:
        _explain_model(given)
    else:
        _explain_images(given)


@dataclass(frozen=True, kw_only=True)
class _Given:
    """The arguments of `explain_command`."""

    checkpoint: str
    images: tuple[str, ...]
    model: bool
    method: str | None
    class_name: str | None
    layer: int | None
    head: int | None
    option: tuple[str, ...]
    sheet: bool
    animate: bool
    truth: bool
    test_time_registers: bool
    output: str
    format: str
    split: str | None
    data_root: str | None
    overwrite: bool
    device: str
    engine: str
    precision: str
    strict: bool

    def find(self, expected: str) -> ImageList:
        """Find the images; `expected` stands for them in a message."""
        refuse_images_first("explain", self.checkpoint, expected)
        return find_arguments(
            self.images, split=self.split, data_root=self.data_root, strict=self.strict
        )

    @property
    def extras(self) -> dict[str, bool]:
        """Flags that write further files -> whether each was given."""
        return {
            "sheet": self.sheet,
            "animate": self.animate,
            "truth": self.truth,
            "test-time-registers": self.test_time_registers,
        }


def _explain_model(given: _Given) -> None:
    others: dict[str, object] = {"class": given.class_name, "layer": given.layer}
    others |= {"head": given.head, "method": given.method, "option": given.option}
    others |= {"engine": given.engine != "torch", "precision": given.precision != "float32"}
    refuse_without_effect({**others, "format": given.format != "png", **given.extras})
    found = given.find("--model IMAGES") if given.images else None
    draw_what_was_learned(
        given.checkpoint, found, given.output, given.overwrite, given.device, given.strict
    )


def _explain_images(given: _Given) -> None:
    checkpoint, method, output = given.checkpoint, given.method, given.output
    extra = read_options(given.option)
    with named_as_options(extra):
        options = options_of(method, {"layer": given.layer, "head": given.head, **extra})
        if not given.images:
            raise SettingError(
                "IMAGES is missing; expected: vitkit explain CHECKPOINT IMAGES ... [flags]"
            )
        found = given.find("IMAGES")
        if is_file(output):
            check_one_file(output, method, given.format, found.total, given.extras)
        files = _files(output, method, options, f".{given.format}", given.sheet, given.animate)
        inputs = files_of_checkpoint(checkpoint)
        check_files(files, found, inputs, overwrite=given.overwrite)
        reports = _reports(output, [*found.files(), *inputs], given.extras, given.overwrite)
        images = StreamedImages(found, strict=given.strict, outputs={})
        explained = _explained(checkpoint, images, files, reports, given)
        explained.write([*METHODS] if method == ALL else [method], options)
    _print_end(checkpoint, explained, given.class_name)


def _files(
    output: str,
    method: str | None,
    options: Mapping[str, object],
    ending: str,
    sheet: bool,
    animate: bool,
) -> ExplanationFiles:
    # imported here: --help and wrong paths do not wait for torch
    from vitkit.explaining.files import Figures

    return explanation_files(output, method, options, Figures(ending, sheet, animate))


def _reports(
    output: str, inputs: list[Path], wanted: Mapping[str, bool], overwrite: bool
) -> Reports:
    """Return the report files over all images, checked; None for those not requested."""
    from vitkit.cli.explaining.images import Reports
    from vitkit.cli.explaining.registers import registers_file
    from vitkit.explaining.truth_of_images import truth_file

    folder, truth, registers = Path(output), None, None
    if wanted["truth"]:
        truth = truth_file(folder, inputs, overwrite=overwrite)
    if wanted["test-time-registers"]:
        registers = registers_file(folder, inputs, overwrite=overwrite)
    return Reports(truth, registers)


def _explained(
    checkpoint: str,
    images: StreamedImages,
    files: ExplanationFiles,
    reports: Reports,
    given: _Given,
) -> ExplainedImages:
    from vitkit.cli.explaining.images import ExplainedImages

    loaded = load_on_device(checkpoint, given.class_name, given.device)
    passes = model_of_passes(loaded, given.engine, given.precision)
    return ExplainedImages(loaded, images, files, reports, given.class_name, passes)


def _print_end(checkpoint: str, explained: ExplainedImages, class_name: str | None) -> None:
    """Write the page, and print where the files are and what comes next."""
    images, files = explained.images, explained.files
    place = files.finish(f"What {checkpoint} looks at")
    noun = "image" if place.suffix == ".html" else "explanation"
    then = []
    if noun == "explanation" and os.path.isfile(explained.example):
        folder = DEFAULT_OUTPUT if place != files.folder else place
        every = flags(method=ALL, class_name=class_name, output=f"{folder}-{ALL}")
        then = [("explain", checkpoint, explained.example, *every)]
    also = f", which also shows {plural(files.earlier, 'earlier one')}" if files.earlier else ""
    print_results(f"{plural(images.count - images.broken, noun)} in {place}{also}", then=then)
    images.refuse_broken()


def run(arguments: list[str]) -> None:
    """Parse the arguments and explain."""
    with as_flags("layer", "head", "class_name", "split"):
        tyro.cli(explain_command, args=arguments, prog="vitkit explain")
