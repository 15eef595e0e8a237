"""`vitkit explain CHECKPOINT IMAGES...`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from vitkit.cli.arguments import Command, describe_function
from vitkit.cli.images import (
    StreamedImages,
    files_of_checkpoint,
    find_arguments,
    refuse_images_first,
)
from vitkit.cli.output import flags, print_now, print_results
from vitkit.data.images.integrity import IMAGE_ENDINGS
from vitkit.errors import ImageError, SettingError
from vitkit.explaining.methods import METHODS, choose_method, method_options
from vitkit.io.results import check_outputs
from vitkit.messages import escape, flag_name, percent, plural
from vitkit.training.config.meaning import Aliases

if TYPE_CHECKING:
    from vitkit.explaining.explanation import Explanation
    from vitkit.explaining.faithfulness import Faithfulness
    from vitkit.explaining.files import ExplanationFiles
    from vitkit.prediction.images import ImageList
    from vitkit.weights.checkpoint import Checkpoint

    MethodName: TypeAlias = str
else:
    # the registry's names, which the help and the check of a value read
    MethodName = Literal[(*METHODS, "all")]

ALL = "all"
"""The word for every method of the registry."""
FILES = (".png", ".svg")
"""Endings of a file that one explanation can be written to."""
EXTRAS = ("sheet", "faithfulness")
"""Flags that write further files."""
OF_IMAGES = ("method", "class_name", "layer", "head", "option", "format")
"""Further flags that have no effect with --model."""
DEFAULT_OUTPUT = "explanations"
REPORT = "faithfulness.json"
EXAMPLES = (
    "vitkit explain runs/photos-vit-1 cat.jpg  # which patches speak for the class",
    "vitkit explain runs/photos-vit-1 cat.jpg --layer 0 --head 2 --output first.png",
    "vitkit explain runs/photos-vit-1 cat.jpg --method all  # every method, and a page of them",
    "vitkit explain runs/photos-vit-1 cat.jpg --sheet  # also the attention of each layer and head",
    "vitkit explain runs/photos-vit-1 photos/cat --faithfulness  # may the maps be trusted?",
    "vitkit explain model.safetensors mnist --split test  # every image of a dataset",
    "vitkit explain runs/photos-vit-1 photos --model  # filters, positions, attention over depth",
)


@dataclass(frozen=True)
class ExplainCommand:
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
        faithfulness: measure whether the maps name the patches that the model uses, also in
            faithfulness.json: deletion and insertion are 0 for random orders and 1 at best.
        output: folder for the files; or, of one image and one method, a .png or .svg file.
        format: png or svg, of the figures in a folder.
        split: train, val or test: only this split of datasets and of folders with class folders.
        data_root: folder of the named datasets, or the folder that the paths of a CSV begin at.
        overwrite: replace existing files that are not inputs.
        device: cpu, cuda, mps or auto.
        strict: stop at the first image that cannot be used.
    """

    checkpoint: str
    images: tuple[str, ...] = ()
    _: KW_ONLY
    model: bool = False
    method: MethodName | None = None
    class_name: Annotated[str | None, Aliases(("--class",))] = None
    layer: int | None = None
    head: int | None = None
    option: tuple[str, ...] = ()
    sheet: bool = False
    faithfulness: bool = False
    output: str = DEFAULT_OUTPUT
    format: Literal["png", "svg"] = "png"
    split: str | None = None
    data_root: str | None = None
    overwrite: bool = False
    device: str = "auto"
    strict: bool = False

    def find(self, expected: str) -> ImageList:
        """Find the images; `expected` stands for them in a message."""
        refuse_images_first("explain", self.checkpoint, expected)
        return find_arguments(
            self.images, split=self.split, data_root=self.data_root, strict=self.strict
        )


def describe(_: Sequence[str] = ()) -> Command:
    """Describe the verb."""
    return describe_function("explain", explain_command, EXAMPLES, ExplainCommand)


def explain_command(**given: Any) -> None:
    """Draw what the model has learned, or explain images.

    Args:
        **given: fields of `ExplainCommand`.
    """
    asked = ExplainCommand(**given)
    if asked.model:
        _explain_model(asked)
    else:
        _explain_images(asked)


def _explain_model(given: ExplainCommand) -> None:
    """Draw what the model has learned."""
    for argument in fields(given):
        is_set = getattr(given, argument.name) != argument.default
        if is_set and argument.name in (*OF_IMAGES, *EXTRAS):
            name = flag_name(argument.name)
            raise SettingError(f"{name} has no effect with --model; leave one of them out")
    found = given.find("--model IMAGES") if given.images else None
    # imported here: wrong paths do not wait for torch
    from vitkit.explaining.model import check_model_files
    from vitkit.prediction.explain_image import CheckpointMeasurement

    inputs, output = files_of_checkpoint(given.checkpoint), given.output
    overwrite = given.overwrite
    check_model_files(Path(output), overwrite=overwrite, inputs=inputs, flag="--output")
    measurement = CheckpointMeasurement(given.checkpoint, device=given.device)
    usable, then = None, []
    if found is None:
        then = [("explain", given.checkpoint, "IMAGES", "--model", *flags(output=output))]
    else:
        usable = StreamedImages(found, strict=given.strict)
        for _ in usable.with_outputs(measurement.add(usable)):
            pass  # the numbers are sums, which grow with each image
    explanation = measurement.result()
    files = explanation.save(output, overwrite=given.overwrite)
    place = f"{plural(len(files), 'file')} in {output}, {files[0].name} first"
    print_results(*explanation.lines(), place, then=then)
    if usable is not None:
        usable.refuse_broken()


def _explain_images(given: ExplainCommand) -> None:
    """Write the explanations of images, and print a line for each."""
    chosen = {"layer": given.layer, "head": given.head, **_read_options(given.option)}
    options = _options_of(given.method, chosen)
    if not given.images:
        raise SettingError(
            "IMAGES is missing; expected: vitkit explain CHECKPOINT IMAGES ... [flags]"
        )
    found = given.find("IMAGES")
    output, is_file = Path(given.output), _is_file(given.output)
    if is_file:
        _check_one_file(given, found.total)
    # imported here: --help and wrong paths do not wait for torch
    from vitkit.explaining.files import ExplanationFiles

    files = ExplanationFiles(
        output,
        given.method,
        options,
        ending=output.suffix.lower() if is_file else f".{given.format}",
        sheet=given.sheet,
        is_file=is_file,
    )
    inputs = [*files_of_checkpoint(given.checkpoint), *found.files()]
    report = [output / REPORT] if given.faithfulness else []
    check_outputs(report, inputs=inputs, overwrite=given.overwrite, flag="--output")
    files.check((image.place for image in found), inputs, overwrite=given.overwrite)
    _Explained(given, StreamedImages(found, strict=given.strict), files).write(options)


def _read_options(words: Iterable[str]) -> dict[str, object]:
    """Return the options written `NAME=VALUE`; values are numbers where they can be."""
    pairs: dict[str, object] = {}
    for word in words:
        name, _, value = word.partition("=")
        if not name or not value:
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


def _options_of(method: str | None, options: Mapping[str, object]) -> dict[str, object]:
    """Return the options that were set; refuse one that no chosen method has."""
    if method != ALL:
        return method_options(choose_method(method, options)[0], options)
    known = sorted({option for other in METHODS.values() for option in other.options})
    chosen = {name: value for name, value in options.items() if value is not None}
    for name, value in chosen.items():
        if name not in known:
            expected = f"no method has this option; options are {', '.join(known)}"
            raise SettingError.about(name, value, expected)
    return chosen


def _is_file(output: str) -> bool:
    """Return True if --output names a file, not a folder; refuse one of another kind."""
    path = Path(output)
    ending = path.suffix.lower()
    if path.is_dir() or ending not in (*FILES, *IMAGE_ENDINGS, ".pdf"):
        return False
    if ending not in FILES:
        raise SettingError(
            f"--output {output}: expected a folder, or one file that ends in {', '.join(FILES)}"
        )
    return True


def _check_one_file(given: ExplainCommand, count: int) -> None:
    """Refuse one file where several are written."""
    output = given.output
    extras = [flag_name(name) for name in EXTRAS if getattr(given, name)]
    if given.method == ALL:
        extras.append("--method all")
    if count != 1 or extras:
        what = extras[0] if count == 1 else "more than one image"
        raise SettingError(
            f"--output {output} is one file, and {what} needs several; name a folder"
        )
    if given.format == "svg" and not output.lower().endswith(".svg"):
        raise SettingError(
            f"--output {output} does not end in .svg; leave --format svg out, or change the ending"
        )


def _load(given: ExplainCommand) -> Checkpoint:
    """Return the checkpoint on its device."""
    from vitkit.devices import on_device, resolve_device
    from vitkit.explaining.explain import find_class
    from vitkit.weights.load import load

    loaded = load(given.checkpoint)
    if given.class_name is not None:
        find_class(loaded, given.class_name)  # before the first image is read
    # moved once, not for every image
    return replace(loaded, model=on_device(loaded.model, resolve_device(given.device)))


@dataclass
class _Explained:
    """Explanations of images, which are written and printed one by one."""

    given: ExplainCommand
    images: StreamedImages
    files: ExplanationFiles
    names: list[str] = field(default_factory=list)
    measured: dict[str, list[Faithfulness | None]] = field(default_factory=dict)

    def write(self, options: Mapping[str, object]) -> None:
        """Explain the images; write their files, the report and the page; print what there is."""
        from vitkit.explaining.faithfulness import check_measurable

        given, files = self.given, self.files
        checkpoint = _load(given)
        has_head = checkpoint.model.spec.num_classes > 0
        method = None
        if given.method != ALL:
            method, notes = choose_method(given.method, options, has_head=has_head)
            sys.stderr.writelines(f"vitkit: {note}\n" for note in notes)
        if given.faithfulness:
            check_measurable(checkpoint.model, method)
        explained = self._explain(checkpoint)
        for image, (explanation, path) in self.images.with_outputs(explained):
            prediction = ""
            if explanation.label:
                prediction = f"{escape(explanation.label)} {percent(explanation.probability)} "
            _print(f"{escape(image.name)}: {prediction}-> {escape(path)}")
            if given.method != ALL and explanation.faithfulness is not None:
                _print(f"  {explanation.faithfulness.line}")  # of all methods, the page has it
        for name, reason in files.refused.items():
            sys.stderr.write(f"vitkit: {name} is left out: {reason}\n")
        if given.faithfulness and self.names:
            self._write_report(checkpoint.path, options)
        place = files.finish(f"What {given.checkpoint} looks at")
        noun = "image" if place.suffix == ".html" else "explanation"
        then = []
        if noun == "explanation" and os.path.isfile(self.images.first):
            folder = DEFAULT_OUTPUT if files.is_file else place
            every = flags(method=ALL, class_name=given.class_name, output=f"{folder}-{ALL}")
            then = [("explain", given.checkpoint, self.images.first, *every)]
        done = self.images.count - self.images.broken
        print_results(f"{plural(done, noun)} in {place}", then=then)
        self.images.refuse_broken()

    def _explain(self, checkpoint: Checkpoint) -> Iterator[tuple[Explanation, Path] | ImageError]:
        """Yield the explanation of each image and the place of its files, or the error instead."""
        from vitkit.explaining.explain import ImageExplainer

        wanted = self.given.faithfulness or None
        for image in self.images:
            try:
                pixels = image.read()
            except ImageError as error:
                yield error
                continue
            explainer = ImageExplainer(checkpoint, pixels, self.given.class_name, wanted)
            saved = self.files.save(image.name, image.place, explainer)
            self.names.append(image.name)
            for method, found in explainer.measured.items():
                self.measured.setdefault(method, []).append(found)
            yield saved

    def _write_report(self, checkpoint: Path | None, options: Mapping[str, object]) -> None:
        """Print the faithfulness of each method over the images, and write it as JSON."""
        from vitkit.explaining.faithfulness import FaithfulnessReport, write_reports

        reports = []
        for name, found in self.measured.items():
            if METHODS[name].colours or name in self.files.refused:
                continue
            scores = tuple(score for score in found if score is not None)
            if len(scores) < len(found):
                _print(f"{name}: not measured: maps are not finite; use the model in float32")
                continue
            own = {key: value for key, value in options.items() if key in METHODS[name].options}
            report = FaithfulnessReport(name, own, scores)
            reports.append(report)
            _print(f"{name}: {report.lines[0]}")
            _print(f"  {report.lines[1]}")
        write_reports(Path(self.given.output, REPORT), checkpoint, self.names, reports)


def _print(line: str) -> None:
    """Print at once; all files are written even if the reader of stdout has exited."""
    print_now(f"{line}\n", keeps_running=True)
