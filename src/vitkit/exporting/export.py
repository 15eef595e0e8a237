"""Export a checkpoint for another runtime, and check the result before it gets its name."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitkit.data.sources.open import DataSource, kept_data
from vitkit.devices import on_device
from vitkit.errors import CheckpointError, OutputError, SettingError
from vitkit.evaluation.evaluate import split_metadata
from vitkit.exporting.artefact import ArtefactDescription, RuntimeFailure
from vitkit.exporting.check import (
    NOT_WRITTEN,
    GateBounds,
    artefact_inputs,
    compare_outputs,
    measure_latency,
    paired_logits,
    refuse_fake_int8,
    refuse_other_batches,
    refuse_slower,
    refuse_worse,
)
from vitkit.exporting.check_images import (
    CalibrationImages,
    GateImages,
    open_calibration,
    open_gate_images,
)
from vitkit.exporting.fresh_process import FreshProcess
from vitkit.exporting.write_artefact import (
    ExportChoice,
    describe_artefact,
    linear_layers,
    script_without_vitkit,
    write_artefact,
)
from vitkit.io.atomic import output_error, sync, sync_folder
from vitkit.io.caches import file_sha256
from vitkit.io.results import file_id, refused_input
from vitkit.messages import plural
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import as_checkpoint

# `ExportReport`: what was exported, and how it compares with torch.


@dataclass(frozen=True)
class ExportReport:
    """An exported model that has passed the gate.

    `print` shows it as lines of text.

    Attributes:
        path: path of the artefact.
        files: all files that were written.
        description: description that is inside the artefact.
        figures: figures of the comparison with torch, as in `OUT.json`.
    """

    path: Path
    files: tuple[Path, ...]
    description: ArtefactDescription
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
        if figures["int8_layers"]:
            executed = sum(figures["int8_layers"].values())
            lines.append(f"int8: {plural(executed, 'layer')} executed in int8")
            used = figures["calibration"]
            lines.append(
                f"calibrated on {plural(used['images'], 'image')} of {used['split']} of "
                f"{used['data']}; {used['left_out']:,} left out, which the check has, too"
            )
        latency = figures["latency"]
        other = "torch" if latency["baseline"] == "torch" else "the same runtime in float32"
        lines.append(
            f"latency of one image: {latency['exported_ms']:.2f} ms, by {other} "
            f"{latency['baseline_ms']:.2f} ms"
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


MAX_POINTS = 100.0


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
    allow_slower: bool = False,
    overwrite: bool = False,
) -> ExportReport:
    """Write a checkpoint for another runtime; keep the result only if it is as good as torch.

    The file is run in a fresh process without network. Its logits are compared with torch's, its
    accuracy on your images with that of `vitkit eval`, its latency with torch's. Class names,
    preprocessing, temperature and the figures are inside, and the figures in `OUT.json`, too.

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
        max_drop: points of a hundred that top-1 may fall; a class of 50 images or more may lose
            twice as many, or one image.
        allow_slower: accept more than 1.5 times torch's latency, for int8 and half precision more
            than 1.05 times that of the same runtime in float32.
        overwrite: replace existing files.

    Raises:
        CheckpointError: it cannot be exported, or is refused; nothing is left behind.
        DataError, DeviceError, MissingExtraError, OutputError, SettingError: as their names say.
    """
    choice = ExportChoice(to, precision, int8, with_preprocessing, opset)
    bounds = GateBounds(max_drop, allow_slower)
    with kept_data(data) as checked_on, kept_data(calibrate) as calibrated_on:
        source = _Sources(checked_on, split, data_root, calibrated_on)
        return _export(checkpoint, Path(out), choice, source, bounds, overwrite=overwrite)


@dataclass(frozen=True)
class _Sources:
    """The data of an export, named as the arguments of `export`."""

    data: str | None
    split: str | None
    data_root: str | Path | None
    calibrate: str | None


def _export(
    checkpoint: Checkpoint | str | Path,
    out: Path,
    choice: ExportChoice,
    sources: _Sources,
    bounds: GateBounds,
    *,
    overwrite: bool,
) -> ExportReport:
    """Check the arguments first, then write and check the artefact."""
    choice.check(out)
    if not 0 <= bounds.max_drop <= MAX_POINTS:
        raise SettingError.about("max_drop", bounds.max_drop, "must be from 0 to 100 points")
    if choice.int8 != (sources.calibrate is not None):
        raise SettingError(
            "--int8 needs --calibrate DATA (calibrate=), and --calibrate needs --int8: images to "
            "measure the ranges of activations on, such as the training data"
        )
    if sources.split is not None and sources.data is None:
        raise SettingError(
            f"--split {sources.split} has no effect without --data; name DATA, or leave it out"
        )
    _refuse_existing_files(out, overwrite=overwrite)
    checkpoint = as_checkpoint(checkpoint)
    _refuse_inputs(out, checkpoint)
    if checkpoint.model.spec.num_classes == 0:
        raise CheckpointError(
            f"{checkpoint.path or 'this model'} has no head and predicts no classes; "
            "vitkit train --pretrained trains one"
        )
    # the reference is computed where the result runs
    model = on_device(checkpoint.model, torch.device("cpu"))
    checkpoint = replace(checkpoint, model=model)
    images = open_gate_images(checkpoint, sources.data, sources.split, sources.data_root)
    calibration = None
    if sources.calibrate is not None:
        calibration = open_calibration(
            checkpoint,
            sources.calibrate,
            images,
            sources.data_root,
            whole=choice.with_preprocessing,
        )
    job = _Job(out, checkpoint, choice, images, calibration, bounds)
    with _temporary_folder(out) as folder:
        with _named_after(out, folder):
            description = job.make(folder / out.name)
        files = move_into_place(folder, out, overwrite=overwrite)
    return ExportReport(out, files, description, description.figures)


class _Job:
    """An export in progress: a candidate in a temporary folder, and its check."""

    def __init__(
        self,
        out: Path,
        checkpoint: Checkpoint,
        choice: ExportChoice,
        images: GateImages,
        calibration: CalibrationImages | None,
        bounds: GateBounds,
    ) -> None:
        self.out = out
        self.checkpoint = checkpoint
        self.choice = choice
        self.images = images
        self.calibration = calibration
        self.bounds = bounds

    def make(self, path: Path) -> ArtefactDescription:
        """Write the artefact, check it, and add the figures; return its description.

        Args:
            path: path of the candidate, in a folder of its own.

        Raises:
            CheckpointError: it is refused.
            OutputError: it cannot be written.
        """
        description = self._describe(self.choice)
        calibration = () if self.calibration is None else self.calibration.images
        with _writing(self.out):
            write_artefact(self.checkpoint, self.choice, path, description, calibration)
        figures, outputs = self._check(path, description)
        described = replace(description, figures=figures)
        with _writing(self.out):
            describe_artefact(path, described)
            text = json.dumps(figures, indent=2) + "\n"
            path.with_name(path.name + FIGURES_ENDING).write_text(text, encoding="utf-8")
        # the file with the figures inside is the one that is kept
        with FreshProcess(path) as process:
            first_image = [self.images.read(0)]
            again = process.run(artefact_inputs(first_image, description))
        for first, second in zip(outputs, again, strict=True):
            if not np.array_equal(first, second):
                raise CheckpointError(
                    f"{path.name}: gives other outputs after its figures were added; report this"
                )
        return described

    def _describe(self, choice: ExportChoice) -> ArtefactDescription:
        checkpoint = self.checkpoint
        source: dict[str, Any] = {"metadata": split_metadata(checkpoint)}
        if checkpoint.path is not None:
            source["name"] = checkpoint.path.name
            if checkpoint.path.is_file():
                source["sha256"] = file_sha256(checkpoint.path)
        return ArtefactDescription(
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

    def _check(
        self, path: Path, description: ArtefactDescription
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Return the figures of the candidate, and its outputs for the first batch.

        Raises:
            CheckpointError: it is refused.
        """
        with ExitStack() as stack:
            process = stack.enter_context(FreshProcess(path))
            if description.int8:
                refuse_fake_int8(process.layers, linear_layers(self.checkpoint))
            pairs = paired_logits(self.checkpoint, self.images, process, description)
            figures = compare_outputs(pairs, self.images, description)
            refuse_worse(figures, description, self.bounds)
            image = self.images.read(0)
            refuse_other_batches(process.run, image, description)
            baseline = None
            if description.int8 or description.precision != "float32":
                baseline = stack.enter_context(self._float32_twin(path))
            latency = measure_latency(self.checkpoint, image, process, description, baseline)
            refuse_slower(latency, description, self.bounds)
            outputs = process.run(artefact_inputs([image], description))
        figures |= {
            "latency": latency,
            "int8_layers": process.layers if description.int8 else {},
            "calibration": self.calibration.to_json() if self.calibration else {},
            "network": process.network,
            "bounds": self.bounds.to_json(),
        }
        return figures, outputs

    def _float32_twin(self, path: Path) -> FreshProcess:
        """Return the same model in float32 by the same runtime, in a separate process."""
        folder = path.parent / FLOAT32_FOLDER
        choice = replace(self.choice, int8=False, precision="float32")
        twin = folder / path.name
        with _writing(self.out):
            folder.mkdir()
            write_artefact(self.checkpoint, choice, twin, self._describe(choice))
        process = FreshProcess(twin)
        shutil.rmtree(folder)  # it is in memory
        return process


# The files of an export: made in a temporary folder, checked there, then moved to their place.

FIGURES_ENDING = ".json"
"""Ending of the file with the figures, after the artefact's name."""
INDEX_ENDING = ".index.json"
"""Ending of the index file of sharded weights."""
FLOAT32_FOLDER = "float32"
"""Folder of the same model in float32, beside a candidate in another precision."""


def _companions(out: Path) -> list[Path]:
    """Return the files that may be written beside an artefact."""
    figures = out.with_name(out.name + FIGURES_ENDING)
    if out.suffix.lower() == ".xml":
        return [out.with_suffix(".bin"), figures]
    if out.suffix.lower() == ".onnx":
        return [out.with_name(out.name + ".data"), figures]
    return [figures]


def _refuse_existing_files(out: Path, *, overwrite: bool) -> None:
    """Raise `OutputError` for a file that exists, unless it may be replaced, and for a folder."""
    for path in (out, *_companions(out)):
        if path.is_dir():
            raise OutputError(f"{path} is a folder; name another file OUT, or move the folder")
        if os.path.lexists(path) and not overwrite:
            raise OutputError(
                f"{path} exists; choose another place, or replace it with --overwrite "
                "(overwrite=True)"
            )


def _refuse_inputs(out: Path, checkpoint: Checkpoint) -> None:
    """Raise `OutputError` for a file that the checkpoint was read from."""
    given = checkpoint.path
    if given is None:
        return
    # the path of sharded weights is the path of their index
    files = given.parent.iterdir() if given.name.endswith(INDEX_ENDING) else (given,)
    inputs = {file_id(path) for path in files}
    for path in (out, *_companions(out)):
        if file_id(path) in inputs - {None}:
            raise refused_input(path, "OUT")


@contextmanager
def _named_after(out: Path, folder: Path) -> Iterator[None]:
    """Make errors name the requested file, not the temporary one, and the files that are left."""
    try:
        yield
    except CheckpointError as error:
        message = str(error)
        for candidate in (folder / out.name, folder / FLOAT32_FOLDER / out.name):
            message = message.replace(str(candidate), str(out))
        if NOT_WRITTEN not in message:
            message += f"; {NOT_WRITTEN}"
        if isinstance(error, RuntimeFailure):
            message += ": try another --to or --precision"
        raise CheckpointError(message) from error


@contextmanager
def _temporary_folder(out: Path) -> Iterator[Path]:
    """Yield a folder on the file system of `out`, which is deleted at the end."""
    # missing folders are created only for a result
    parent = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    with _writing(out):
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=f".{out.name}.", suffix=".tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    """Turn a system error while writing into an `OutputError` about OUT."""
    try:
        yield
    except OSError as error:
        raise output_error(out, error) from error


def move_into_place(folder: Path, out: Path, *, overwrite: bool) -> tuple[Path, ...]:
    """Move the finished files into place, the artefact last; after an error, undo it.

    Args:
        folder: with the files, on the file system of `out`; deleted afterwards.
        out: the artefact.
        overwrite: whether files that are there may be replaced.

    Raises:
        OutputError: a file has appeared meanwhile, or cannot be written.
    """
    written = sorted(folder.iterdir(), key=lambda path: path.name == out.name)
    before = folder / "before"
    placed: list[Path] = []
    with _writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        before.mkdir()
        try:
            for file in written:
                sync(file)
                place = out.parent / file.name
                if overwrite and os.path.lexists(place):
                    _second_name(place, before / file.name)
                if overwrite:
                    os.replace(file, place)
                else:
                    _second_name(file, place)  # fails if a file has appeared
                placed.append(place)
            sync_folder(out.parent)
        except BaseException:
            for place in placed:
                if os.path.lexists(before / place.name):
                    os.replace(before / place.name, place)
                else:
                    place.unlink()
            raise
    return tuple(sorted(placed))


def _second_name(file: Path, name: Path) -> None:
    """Give a file a second name: a hard link, or a copy on a file system without them.

    Raises:
        FileExistsError: the name is taken.
        OSError: the system refuses.
    """
    try:
        os.link(file, name, follow_symlinks=False)
    except OSError:
        if os.path.lexists(name):
            raise
        shutil.copy2(file, name, follow_symlinks=False)
