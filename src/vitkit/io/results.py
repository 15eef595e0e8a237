"""The files that commands write as results, and which existing files a result may replace.

One rule for every command: a file that is an input is never replaced; another existing file only if
its content is an earlier result of the same kind, or with `--overwrite`.
"""

from __future__ import annotations

import csv
import json
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from vitkit.errors import OutputError
from vitkit.io.atomic import refuse_unwritable

FileId: TypeAlias = tuple[int, int]
"""Device and inode: equal for two paths of the same file, also through links."""
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_KEY = "Software"
"""Key of the PNG text that names the command which wrote the file."""


@dataclass(frozen=True)
class ResultKind:
    """A kind of result file, recognised by its content.

    Attributes:
        name: for messages, with its article.
        ending: of the file's name, such as `.csv`.
        recognise: returns True for the file of an earlier result; may raise `OSError` or
            `ValueError` for any other file.
    """

    name: str
    ending: str
    recognise: Callable[[Path], bool]

    def is_result(self, path: Path) -> bool:
        """Return True for a regular file, not a link, that holds an earlier result."""
        # a pipe is not opened, as reading it would wait for a writer
        if path.is_symlink() or not path.is_file():
            return False
        try:
            return self.recognise(path)
        except (OSError, ValueError, RecursionError, csv.Error, zipfile.BadZipFile):
            return False


def check_outputs(
    paths: Sequence[Path],
    kind: ResultKind,
    *,
    inputs: Iterable[Path],
    overwrite: bool,
    flag: str,
) -> None:
    """Check that results may be written, before the work that they take.

    Args:
        paths: the files to write.
        kind: of all of them.
        inputs: the files that the command reads; missing ones are passed over. They are looked at
            only if one of `paths` exists.
        overwrite: also replace files that are no earlier results.
        flag: that named the paths.

    Raises:
        OutputError: another ending, an input, a file that is no earlier result, a folder, or a path
            that cannot be written.
    """
    for path in paths:
        if path.is_dir():
            raise OutputError(f"{flag} {path} is a folder; name a file")
        if path.suffix.lower() != kind.ending:
            raise OutputError(f"{flag} {path}: expected a name that ends in {kind.ending}")
    existing = [path for path in paths if os.path.lexists(path)]
    input_ids = {file_id(file) for file in inputs} - {None} if existing else set()
    for path in existing:
        if file_id(path) in input_ids:
            raise OutputError(
                f"{flag} {path}: this file is one of the inputs, which are never replaced; choose "
                "another place"
            )
        if not overwrite and not kind.is_result(path):
            raise OutputError(
                f"{flag} {path}: this file exists and is not {kind.name} of vitkit; choose another "
                "place, or replace it with --overwrite"
            )
    # one file of each folder shows whether the folder can be written
    for path in {path.parent: path for path in paths}.values():
        refuse_unwritable(path)


def file_id(path: Path) -> FileId | None:
    """Return the identity of the file that a path leads to; None if there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def csv_result(name: str, header: Sequence[str]) -> ResultKind:
    """Return the kind of CSV files with this header."""
    line = ",".join(header).encode() + b"\n"

    def recognise(path: Path) -> bool:
        with path.open("rb") as file:
            return file.read(len(line)) == line

    return ResultKind(name, ".csv", recognise)


def square_csv_result(name: str) -> ResultKind:
    """Return the kind of CSV files with a table of counts, whose rows and columns are the same."""

    def recognise(path: Path) -> bool:
        with path.open(encoding="utf-8", newline="") as file:
            (corner, *columns), *rows = csv.reader(file)
        if corner or [row[0] for row in rows] != columns:
            return False
        return all(len(row) == 1 + len(columns) and "".join(row[1:]).isdecimal() for row in rows)

    return ResultKind(name, ".csv", recognise)


def json_result(name: str, keys: Iterable[str]) -> ResultKind:
    """Return the kind of JSON files that hold one object with these keys."""
    expected = set(keys)

    def recognise(path: Path) -> bool:
        document = json.loads(path.read_bytes())
        return isinstance(document, dict) and set(document) == expected

    return ResultKind(name, ".json", recognise)


def npz_result(name: str, arrays: Iterable[str]) -> ResultKind:
    """Return the kind of .npz files that hold these arrays."""
    expected = {f"{array}.npy" for array in arrays}

    def recognise(path: Path) -> bool:
        with zipfile.ZipFile(path) as archive:
            return set(archive.namelist()) == expected

    return ResultKind(name, ".npz", recognise)


def png_result(name: str, command: str) -> ResultKind:
    """Return the kind of PNG files whose text `Software`, the first after the header, is this."""
    text = f"{PNG_KEY}\0{command}".encode("latin-1")
    # a chunk: length of the data, type, data
    chunk = struct.pack(">I", len(text)) + b"tEXt" + text

    def recognise(path: Path) -> bool:
        with path.open("rb") as file:
            head = file.read(1024)
        return head.startswith(PNG_SIGNATURE) and chunk in head

    return ResultKind(name, ".png", recognise)
