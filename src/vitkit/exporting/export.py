"""Export a checkpoint for another runtime, and check the result before it gets its name."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from vitkit import devices, errors, other_names
from vitkit.data.datasets.split import Split
from vitkit.data.images.preprocess import preprocess_images
from vitkit.data.sources.open import DataSource, kept_data
from vitkit.engines import choose, openvino_engine, registry
from vitkit.evaluation import evaluate
from vitkit.exporting import artefact, check, graph
from vitkit.exporting.files import (
    RuntimeFailure,
    check_opset,
    linear_layers,
    script_without_vitkit,
    write_artefact,
)
from vitkit.io import atomic, caches, results
from vitkit.messages import did_you_mean, plural
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint

PACKAGES = {"onnx": registry.ONNX, "openvino": ("openvino",)}
"""Format -> packages that write and run it."""
FIGURES_ENDING = ".json"
"""Ending of the file with the figures, after the artefact's name."""


@dataclass(frozen=True)
class ExportReport:
    """An exported model that has passed its check.

    `print` shows it as lines of text.

    Attributes:
        path: path of the artefact.
        files: all files that were written.
        description: description that is inside the artefact.
        figures: figures of the comparison with torch, as in `OUT.json`.
    """

    path: Path
    files: tuple[Path, ...]
    description: artefact.ArtefactDescription
    figures: dict[str, Any]

    @property
    def script(self) -> str:
        """A Python script that runs the artefact without vitkit."""
        return script_without_vitkit(self.description, self.path)

    def __str__(self) -> str:
        return "\n".join([*self._lines(), *map(str, self.files)])

    def _lines(self) -> list[str]:
        figures = self.figures
        lines = [
            f"logits: differ from torch's by {figures['largest_logit_difference']:.2g} at most, "
            f"{figures['relative_logit_error']:.2g} of their spread",
            f"same class: {figures['agreement']:.2%} of {plural(figures['images'], 'image')}",
        ]
        if "torch" in figures:
            before, after = figures["torch"]["top1"], figures["exported"]["top1"]
            lines.append(
                f"top-1 on {figures['split']} of {figures['data']}: {after:.2%}, by torch "
                f"{before:.2%}"
            )
        else:
            lines.append("accuracy: not checked on generated images; name yours with --data")
        if self.description.int8:
            used = figures["calibration"]
            lines.append(f"int8: {plural(figures['int8_layers'], 'layer')} executed in int8")
            lines.append(
                f"calibrated on {plural(used['images'], 'image')} of {used['split']} of "
                f"{used['data']}"
            )
        latency = figures["latency"]
        lines.append(
            f"latency of one image: {latency['exported_ms']:.2f} ms, by torch "
            f"{latency['torch_ms']:.2f} ms"
        )
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "path": str(self.path),
            "files": [str(file) for file in self.files],
            "figures": self.figures,
            "script": self.script,
        }


@dataclass(frozen=True)
class _Choice:
    """The arguments of `export` that do not concern its result's check."""

    to: str
    data: str | None
    split: str | None
    data_root: str | Path | None
    int8: bool
    calibrate: str | None
    precision: str
    with_preprocessing: bool
    opset: int | None
    max_drop: float


def export(
    checkpoint: Checkpoint | str | Path,
    out: str | Path,
    *,
    to: str,
    data: DataSource | None = None,
    split: str | None = None,
    data_root: str | Path | None = None,
    int8: bool = False,
    calibrate: DataSource | None = None,
    precision: str = "float32",
    with_preprocessing: bool = False,
    opset: int | None = None,
    max_drop: float = 0.5,
    overwrite: bool = False,
    **moved: object,
) -> ExportReport:
    """Write a checkpoint for another runtime; keep the result only if it is as good as torch.

    The file is run in a child process. Its logits are compared with torch's, its accuracy on your
    images with that of `vitkit eval`. Class names, preprocessing and temperature are inside; the
    figures are in `OUT.json`.

    Args:
        checkpoint: a checkpoint or its path.
        out: a file ending in `.onnx`, `.xml` (OpenVINO, with a `.bin` beside it) or `.pt2` (torch).
        to: `onnx`, `openvino`, `torch` (an exported program), or `aoti` (machine code).
        data: labelled images to check it on, as for `train`; without them, accuracy is not checked.
        split: split of `data`; default `val`, else `test`.
        data_root: the folder of named datasets.
        int8: quantise the linear layers of the blocks; needs `calibrate` and OpenVINO.
        calibrate: other images, as for `train`, of which 300 show the ranges of activations.
        precision: `float32`, `bfloat16` or `float16`; OpenVINO stores float16 and computes in
            float32.
        with_preprocessing: resize in the graph: (B, H, W, 3) uint8 RGB in, probabilities and logits
            out.
        opset: version of ONNX's operators; default 20.
        max_drop: points of a hundred that top-1 may fall.
        overwrite: replace existing files.
        **moved: none; a keyword that has left the package is answered with its place.

    Raises:
        CheckpointError: it cannot be exported, or is refused; nothing is left behind.
        DataError, DeviceError, MissingExtraError, OutputError, SettingError: as their names say.
    """
    other_names.refuse_moved_keywords(moved)
    out = Path(out)
    with kept_data(data) as checked_on, kept_data(calibrate) as calibrated_on:
        choice = _Choice(
            to, checked_on, split, data_root, int8, calibrated_on, precision, with_preprocessing,
            opset, max_drop,
        )  # fmt: skip
        _check_choice(choice, out)
        checkpoint = as_checkpoint(checkpoint)
        inputs = filter(None, [checkpoint.path])
        results.check_outputs(_files(out), inputs=inputs, overwrite=overwrite, flag="OUT")
        if checkpoint.model.spec.num_classes == 0:
            raise errors.CheckpointError(
                f"{checkpoint.path or 'this model'} has no head and predicts no classes; "
                "vitkit train --pretrained trains one"
            )
        # the reference is computed where the result runs
        model = devices.on_device(checkpoint.model, torch.device("cpu"))
        with _temporary_folder(out) as folder:
            description, figures = _write_and_check(
                replace(checkpoint, model=model), folder / out.name, choice
            )
            return ExportReport(out, _move(folder, out), description, figures)


def _check_choice(choice: _Choice, out: Path) -> None:
    """Refuse what cannot be written, before any work.

    Raises:
        DeviceError: the CPU lacks the instructions of the precision.
        MissingExtraError: a library, or a compiler, is not installed.
        SettingError: an unknown format or precision, a wrong ending, or options that do not go
            together.
    """
    to = choice.to
    for name, value, known in (
        ("to", to, artefact.FORMATS),
        ("precision", choice.precision, [*graph.DTYPES]),
    ):
        if value not in known:
            raise errors.SettingError(
                f"--{name} {value!r} does not exist{did_you_mean(value, known)}; expected "
                f"{', '.join(known)}"
            )
    int8, calibrated = choice.int8, choice.calibrate is not None
    refusals = {
        f"OUT {out}: expected a name that ends in {artefact.ENDINGS[to]} for --to {to}": (
            out.suffix != artefact.ENDINGS[to]
        ),
        "--int8 needs --to openvino and --precision float32, which is that of the other layers": (
            int8 and (to, choice.precision) != ("openvino", "float32")
        ),
        "--int8 needs --calibrate DATA (calibrate=), and --calibrate needs --int8: images to "
        "measure the ranges of activations on, such as the training data": int8 != calibrated,
        f"--opset {choice.opset} is for --to onnx, not {to}": choice.opset and to != "onnx",
        f"--split {choice.split} has no effect without --data; name DATA, or leave it out": (
            choice.split is not None and choice.data is None
        ),
    }
    for message, wrong in refusals.items():
        if wrong:
            raise errors.SettingError(message)
    if not 0 <= choice.max_drop <= 100:
        raise errors.SettingError.about("max_drop", choice.max_drop, "must be from 0 to 100 points")
    for name in (*PACKAGES.get(to, ()), *(registry.QUANTISERS if choice.int8 else ())):
        registry.import_runtime(name)
    if choice.opset is not None:
        check_opset(choice.opset)
    if to == "openvino":
        openvino_engine.refuse_no_instructions(f"--precision {choice.precision}", choice.precision)
    if to == "aoti":
        registry.refuse_no_compiler("--to aoti", "--to torch")


def _write_and_check(
    checkpoint: Checkpoint, path: Path, choice: _Choice
) -> tuple[artefact.ArtefactDescription, dict[str, Any]]:
    """Write the artefact and the figures of its check; return its description and the figures.

    Raises:
        CheckpointError: it cannot be exported, or is refused.
        DataError: images that cannot be opened, or of other classes.
    """
    images, checked_on = None, {"data": "", "split": ""}
    if choice.data is not None:
        images, checked_on = _labelled_images(checkpoint, choice, choice.data)
    inputs, calibrated_on = None, {}
    if choice.calibrate is not None:
        raw, *source = choose.calibration_images(choice.calibrate, checkpoint, choice.data_root)
        calibrated_on = {"images": len(raw), "data": source[0], "split": source[1]}
        if source == [*checked_on.values()]:
            raise errors.DataError(
                f"--calibrate {source[0]}: the split {source[1]} is the one that the model is "
                "checked on with --data; name other images, such as the training data"
            )
        inputs = raw
        if not choice.with_preprocessing:
            inputs = [*preprocess_images(raw, checkpoint.preprocess)]
    description = _describe(checkpoint, choice)
    with _writing(path):
        write_artefact(checkpoint, path, description, choice.opset, inputs)
    figures = checked_on | check.check_export(checkpoint, path, description, images)
    check.refuse_worse(figures, description, linear_layers(checkpoint), choice.max_drop)
    figures |= {"calibration": calibrated_on, "max_drop": choice.max_drop}
    with _writing(path):
        text = json.dumps(figures, indent=2) + "\n"
        path.with_name(path.name + FIGURES_ENDING).write_text(text, encoding="utf-8")
    return description, figures


def _labelled_images(
    checkpoint: Checkpoint, choice: _Choice, data: str
) -> tuple[Split, dict[str, str]]:
    """Return the user's validation images, and the names of their dataset and split."""
    dataset = evaluate.open_as_in_training(checkpoint, data, choice.data_root, None)
    split = choice.split
    if split is None and "val" in dataset.splits:
        split = "val"
    split = evaluate.choose_split(dataset, split)
    return evaluate.with_labels_of(checkpoint, dataset, split), {
        "data": dataset.name,
        "split": split,
    }


def _describe(checkpoint: Checkpoint, choice: _Choice) -> artefact.ArtefactDescription:
    source: dict[str, Any] = {"metadata": evaluate.split_metadata(checkpoint)}
    if checkpoint.path is not None:
        source["name"] = checkpoint.path.name
        if checkpoint.path.is_file():
            source["sha256"] = caches.file_sha256(checkpoint.path)
    return artefact.ArtefactDescription(
        format=choice.to,
        preprocess=checkpoint.preprocess,
        classes=checkpoint.classes,
        num_classes=checkpoint.model.spec.num_classes,
        temperature=checkpoint.temperature,
        precision=choice.precision,
        int8=choice.int8,
        with_preprocessing=choice.with_preprocessing,
        versions={"vitkit": version("vitkit"), "torch": torch.__version__},
        source=source,
    )


# The files of an export: made in a temporary folder, checked there, then moved to their place.


def _files(out: Path) -> list[Path]:
    """Return the files that may be written."""
    beside = {".xml": out.with_suffix(".bin"), ".onnx": out.with_name(out.name + ".data")}
    figures = out.with_name(out.name + FIGURES_ENDING)
    return [out, figures, *(file for ending, file in beside.items() if out.suffix == ending)]


@contextmanager
def _temporary_folder(out: Path) -> Iterator[Path]:
    """Yield a folder on the file system of OUT; errors name OUT in place of the file in it."""
    # missing folders are created only for a result
    parent = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    with _writing(out):
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=f".{out.name}.", suffix=".tmp"))
    try:
        yield folder
    except errors.CheckpointError as error:
        message = str(error).replace(str(folder / out.name), str(out))
        if check.NOT_WRITTEN not in message:
            message += f"; {check.NOT_WRITTEN}"
        if isinstance(error, RuntimeFailure):
            message += ": try another --to or --precision"
        raise errors.CheckpointError(message) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a system error while writing into an `OutputError` about a file."""
    try:
        yield
    except OSError as error:
        raise atomic.output_error(path, error) from error


def _move(folder: Path, out: Path) -> tuple[Path, ...]:
    """Move the finished files of a folder into place, the artefact last.

    Raises:
        OutputError: they cannot be written.
    """
    placed = []
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        for file in sorted(folder.iterdir(), key=lambda file: file.name == out.name):
            atomic.sync(file)
            os.replace(file, out.parent / file.name)
            placed.append(out.parent / file.name)
        atomic.sync_folder(out.parent)
    return tuple(sorted(placed))
