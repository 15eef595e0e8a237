"""The files of an export: made in a temporary folder, checked there, then moved to their place."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitkit.errors import CheckpointError, OutputError
from vitkit.exporting.files.runtime_errors import RuntimeFailure
from vitkit.exporting.gate.checks import NOT_WRITTEN
from vitkit.io.atomic import output_error, sync, sync_folder
from vitkit.io.results import file_id, refused_input
from vitkit.weights.checkpoint import Checkpoint

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


def refuse_existing_files(out: Path, *, overwrite: bool) -> None:
    """Raise `OutputError` for a file that exists, unless it may be replaced, and for a folder."""
    for path in (out, *_companions(out)):
        if path.is_dir():
            raise OutputError(f"{path} is a folder; name another file OUT, or move the folder")
        if os.path.lexists(path) and not overwrite:
            raise OutputError(
                f"{path} exists; choose another place, or replace it with --overwrite "
                "(overwrite=True)"
            )


def refuse_inputs(out: Path, checkpoint: Checkpoint) -> None:
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
def named_after(out: Path, folder: Path) -> Iterator[None]:
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
def temporary_folder(out: Path) -> Iterator[Path]:
    """Yield a folder on the file system of `out`, which is deleted at the end.

    Raises:
        OutputError: it cannot be written.
    """
    # missing folders are created only for a result
    parent = next(folder for folder in out.absolute().parents if os.path.lexists(folder))
    with writing(out):
        folder = Path(tempfile.mkdtemp(dir=parent, prefix=f".{out.name}.", suffix=".tmp"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def writing(out: Path) -> Iterator[None]:
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
    with writing(out):
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
