"""Writing a checkpoint in any format: fitted to the format's classes, renamed, written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vitkit.errors import CheckpointError, OutputError
from vitkit.io.atomic import FileWriter, write_new
from vitkit.io.strict_json import DOCUMENT_FILES
from vitkit.spec import ViTSpec
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.converting.fit import fit_to_format
from vitkit.weights.converting.other_words import right_word
from vitkit.weights.files.open import WEIGHTS_FILES
from vitkit.weights.files.pickles import PICKLE_ENDINGS
from vitkit.weights.formats.description import OWN_FORMAT, refuse_contradictions
from vitkit.weights.formats.format import WEIGHTS_FILE, Bundle, Fitted, Step
from vitkit.weights.formats.key_table import write_tensors
from vitkit.weights.formats.registry import FORMATS
from vitkit.weights.formats.saved_model import as_saved
from vitkit.weights.formats.vitkit import own_file_writer

FILE_ENDINGS = (".safetensors", ".npz", *PICKLE_ENDINGS)
"""Endings of output paths that are files, not folders."""


class _PreparedFiles(NamedTuple):
    """Files that are ready to be written.

    Attributes:
        writers: file name -> writer.
        fitted: the model that they hold.
    """

    writers: dict[str, FileWriter]
    fitted: Fitted


class WrittenCheckpoint(NamedTuple):
    """A checkpoint on disk.

    Attributes:
        files: written.
        spec: spec of the model in them.
        steps: the changes that the format needed.
        unchanged: number of tensors with the same bits as before.
    """

    files: tuple[Path, ...]
    spec: ViTSpec
    steps: tuple[Step, ...]
    unchanged: int


def refuse_unknown_format(to: str) -> None:
    """Raise `CheckpointError` if there is no format of this name."""
    if to not in (OWN_FORMAT, *FORMATS):
        near = right_word(to, [OWN_FORMAT, *FORMATS])
        raise CheckpointError(
            f"--to (to=) {to!r} is not a format; pass one of {OWN_FORMAT}, {', '.join(FORMATS)}"
            f"{near}"
        )


def write_checkpoint(
    checkpoint: Checkpoint, out: Path, to: str, allow_lossy: bool, before: Mapping[str, Tensor]
) -> WrittenCheckpoint:
    """Write a checkpoint in a format.

    Args:
        checkpoint: the model with its metadata.
        out: a folder, or a file with the format's ending.
        to: the format.
        allow_lossy: also take steps that approximate or lose something.
        before: the tensors to count unchanged ones against; no copy of them is kept.

    Raises:
        CheckpointError: a model that the format cannot hold, or cannot without loss.
        OutputError: a file exists already, or cannot be written.
    """
    writers, (spec, state, steps) = prepare_files(checkpoint, to, allow_lossy)
    unchanged = sum(name in before and _same(before[name], state[name]) for name in state)
    return WrittenCheckpoint(_write_files(out, writers, to), spec, tuple(steps), unchanged)


def prepare_files(checkpoint: Checkpoint, to: str, allow_lossy: bool) -> _PreparedFiles:
    """Return the files of the target, the model in them, and the steps of the conversion.

    Raises:
        CheckpointError: as for `write_checkpoint`; nothing is written.
    """
    dtype: torch.dtype = getattr(torch, checkpoint.dtype)
    path = checkpoint.path or Path("checkpoint")
    spec, before = as_saved(checkpoint.model, path)
    if to == OWN_FORMAT:
        writer = own_file_writer(
            checkpoint.model,
            checkpoint.preprocess,
            checkpoint.classes,
            {**checkpoint.metadata, "source_format": checkpoint.format},
            dtype,
            path=path,
        )
        return _PreparedFiles({WEIGHTS_FILE: writer}, Fitted(spec, before, []))
    # A file that `load` would refuse is not written; the writer of our own format checks the same.
    refuse_contradictions(path, spec, checkpoint.preprocess, checkpoint.classes)
    form = FORMATS[to]
    with _named_errors(path, to):
        fitted = form.settle(fit_to_format(spec, before, *form.capabilities))
    # "folded" is the same function with other numbers.
    lossy = [step.text for step in fitted.steps if step.kind != "folded"]
    if lossy and not allow_lossy:
        raise CheckpointError(
            f"{path}: {to} cannot store: {'; '.join(lossy)}; to write it anyway, "
            "pass --allow-lossy (allow_lossy=True)"
        )
    with _named_errors(path, to):
        tensors = write_tensors(form.table(fitted.spec), fitted.spec, fitted.state)
        # Computed numbers keep all their bits; copied ones had no more than `dtype` has.
        if not fitted.steps:
            tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        # other formats cannot mark names as assumed: who reads the file would take them as stated
        classes = () if checkpoint.classes_assumed else checkpoint.classes
        bundle = Bundle(fitted.spec, tensors, checkpoint.preprocess, classes)
        return _PreparedFiles(form.write(bundle), fitted)


@contextmanager
def _named_errors(path: Path, to: str) -> Iterator[None]:
    """Prefix an error of the format's code with the file and the format."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: as {to}: {error}") from None


def _same(left: Tensor, right: Tensor) -> bool:
    # Most steps rename tensors and do not touch them.
    if left.data_ptr() == right.data_ptr():
        return True  # the same memory, without reading it
    return left.shape == right.shape and torch.equal(left, right)


def _write_files(out: Path, writers: Mapping[str, FileWriter], to: str) -> tuple[Path, ...]:
    """Write into the folder `out`, or the one file of that name."""
    if not out.name.endswith(FILE_ENDINGS):
        _refuse_company(out, set(writers), to)
        return write_new(out, writers)
    if len(writers) > 1:
        raise CheckpointError(
            f"{out}: {to} writes {len(writers)} files ({', '.join(writers)}); name a folder instead"
        )
    ((name, writer),) = writers.items()
    if out.suffix != Path(name).suffix:
        raise CheckpointError(
            f"{out}: expected a name that ends in {Path(name).suffix}, as {to} files do"
        )
    _refuse_company(out.parent, {out.name}, to)
    return write_new(out.parent, {out.name: writer})


def _refuse_company(folder: Path, names: set[str], to: str) -> None:
    """Refuse a folder whose files would be read together with the new ones.

    A folder is read by the first of `WEIGHTS_FILES` in it, and weights by the JSON beside them.

    Raises:
        OutputError: another folder must be chosen.
    """
    if not folder.is_dir() or any((folder / name).exists() for name in names):
        return  # a file that exists is reported by `write_new`
    existing = {file.name for file in folder.iterdir()}
    if not names.isdisjoint(WEIGHTS_FILES):
        _refuse_other_weights(folder, existing)
    documents = set(DOCUMENT_FILES.values())
    endings = (*FILE_ENDINGS, ".safetensors.index.json")
    weights = sorted(name for name in existing if name.endswith(endings))
    if names & documents and weights:
        raise OutputError(
            f"{folder / weights[0]} would be read with the new {min(names & documents)}; choose "
            "another folder"
        )
    if to != OWN_FORMAT and existing & documents and not names & documents:
        raise OutputError(
            f"{', '.join(sorted(names))} would be read with "
            f"{folder / min(existing & documents)}, which belongs to another model; choose another "
            "folder"
        )


def _refuse_other_weights(folder: Path, existing: set[str]) -> None:
    if "config.yaml" in existing and existing & {"state", "weights"}:
        raise OutputError(f"{folder} is the folder of a run; choose another folder")
    for name in WEIGHTS_FILES:
        if (folder / name).is_file():
            raise OutputError(
                f"{folder} has {name}, which would be loaded instead of the new file; choose "
                "another folder"
            )
