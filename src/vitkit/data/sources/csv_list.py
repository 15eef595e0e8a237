"""A CSV that lists images: `path,label` and, if there is one, `split`.

Paths are relative to the CSV's folder, or to another one that is given. Nothing outside of it is
read, whatever the list contains; symbolic links may lead out of it where the user allows that.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitkit.data.datasets.dataset import SPLIT_WORDS, Dataset, FileSplit
from vitkit.data.datasets.pixel_cache import file_digests
from vitkit.data.datasets.splitting import POOL, NamedImages, assemble
from vitkit.errors import DataError
from vitkit.messages import csv_encoding, csv_separator, escape, plural

COLUMNS = {
    "path": (
        ("path", "image_path", "filename"),
        ("file_name", "filepath", "file_path", "image", "img_path"),
        ("id", "image_id"),
    ),
    "label": (("label",), ("class", "target", "class_name", "category")),
    "split": (("split",),),
}
"""Names of each column; a later group is used only if no name of an earlier one is present.

`split` may be absent.
"""
ROWS_SHOWN = 5


class ListRow(NamedTuple):
    """A row of a list of images."""

    line: int
    """Its number in the file."""
    path: str
    """Relative to the list's folder."""
    label: str
    """The class; empty where the list has no labels."""
    split: str
    """`train`, `val` or `test`; `POOL` where the list has no splits."""


def open_csv(
    path: Path,
    *,
    root: Path | None = None,
    ignore_extra_classes: bool = False,
    follow_links: bool = False,
) -> Dataset:
    """Open the images that a CSV lists; none is decoded, every file is hashed.

    Single files that are missing are bad images like any others, named with their lines.

    Args:
        path: UTF-8, or UTF-16 with its mark; its first line the columns' names; commas, semicolons
            or tabs.
        root: the folder that paths begin at; the CSV's own where absent.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        follow_links: follow symbolic links that lead out of that folder.

    Raises:
        DataError: columns that are not there; rows without path or label, with an unknown split,
            with a path out of the folder, or that contradict another, by line number; a list none
            of whose files exists; and the errors of `assemble`.
    """
    where = escape(path)
    if root is None:
        root = path.parent
    rows = read_rows(path, root, follow_links)
    # Every row is a separate image, even if two rows list one file.
    groups: dict[str, list[ListRow]] = {}
    for row in rows:
        groups.setdefault(row.split, []).append(row)
    parts = {split: _part(group, root) for split, group in groups.items()}
    repeated = len(rows) - len({row.path for row in rows})
    repeat = "repeats" if repeated == 1 else "repeat"
    notes = [f"{plural(repeated, 'row')} {repeat} an image"] if repeated else []
    return assemble(
        escape(path.stem), where, parts, ignore_extra_classes=ignore_extra_classes, notes=notes
    )


def read_rows(
    path: Path, root: Path, follow_links: bool, *, needs_labels: bool = True
) -> list[ListRow]:
    """Return all rows of a list, in its order; no image is opened.

    Args:
        path: as for `open_csv`.
        root: the folder that paths begin at.
        follow_links: as for `open_csv`.
        needs_labels: refuse a list or a row without labels.

    Raises:
        DataError: one error for the first problems of all rows; or no path that exists.
    """
    where = escape(path)
    # links are resolved once, not for every row
    real_root = None if follow_links else os.path.realpath(root)
    rows: list[ListRow] = []
    # rows often share one problem, such as a mistyped split
    lines_by_problem: dict[str, list[int]] = {}
    for line, cells in _cells(path, where, needs_labels):
        row = _parse_row(line, cells, root, real_root, needs_labels)
        if isinstance(row, ListRow):
            rows.append(row)
        else:
            lines_by_problem.setdefault(row, []).append(line)
    problems = [f"{_lines(lines)}: {text}" for text, lines in lines_by_problem.items()]
    problems = problems or _contradictions(rows)
    # Some missing files are bad images; if all are missing, the root folder is wrong.
    if not problems and rows and not any(os.path.lexists(root / row.path) for row in rows):
        problems = [
            f"{len(rows):,} of {len(rows):,} paths do not exist below {escape(root)}; "
            "pass the folder they are relative to as --data-root (data_root=...)"
        ]
    if problems:
        more = f"; and {len(problems) - ROWS_SHOWN:,} more" if len(problems) > ROWS_SHOWN else ""
        raise DataError(f"{where}: {'; '.join(problems[:ROWS_SHOWN])}{more}")
    return rows


def _lines(numbers: list[int]) -> str:
    """Name lines in ascending order: `line 7`, `lines 2 to 5`, `3 lines from 2 to 9`."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"line {first}"
    if last - first + 1 == len(numbers):
        return f"lines {first} to {last}"
    return f"{len(numbers):,} lines from {first} to {last}"


def _cells(
    path: Path, where: str, needs_labels: bool
) -> Iterator[tuple[int, Mapping[str, str | None]]]:
    """Generate the line number and the cells by column of every row that is not empty."""
    last_line = 0
    try:
        with path.open("rb") as start:
            encoding = csv_encoding(start.read(2))
        with path.open(encoding=encoding, newline="") as file:
            header = file.readline()
            separator = csv_separator(header)
            names = next(csv.reader([header], delimiter=separator), [])
            columns = _columns(names, where, needs_labels)
            reader = csv.reader(file, delimiter=separator, strict=True)
            last_line = 1
            for cells in reader:
                line = last_line + 1
                last_line = reader.line_num + 1  # a quoted cell may go over several lines
                if any(cell.strip() for cell in cells):
                    # None where the row is too short
                    padded: list[str | None] = [*map(str.strip, cells), *[None] * len(names)]
                    yield line, {column: padded[index] for column, index in columns.items()}
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: expected UTF-8, or UTF-16 with a byte order mark: {error}"
        ) from None
    except csv.Error as error:
        raise DataError(f"{where}: not a CSV file from line {last_line + 1} on: {error}") from None
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}") from None


def _columns(header: list[str], where: str, needs_labels: bool) -> dict[str, int]:
    """Return the index of the columns of the path, the label and the split."""
    names = [name.strip().casefold() for name in header]
    columns: dict[str, int] = {}
    for column, known in COLUMNS.items():
        indices: list[int] = []
        for group in known:
            indices = [index for index, name in enumerate(names) if name in group]
            if indices:
                break
        if len(indices) > 1:
            candidates = [header[index] for index in indices]
            raise DataError(
                f"{where}: columns {candidates} could all be the {column}; keep one of them"
            )
        if indices:
            columns[column] = indices[0]
        elif column == "path" or (column == "label" and needs_labels):
            raise DataError(
                f"{where}: no column {column!r}; expected a first line such as path,label or "
                f"path,label,split, got {escape(','.join(header))!r}; the column may be called "
                f"{', '.join(itertools.chain(*known))}"
            )
    return columns


def _parse_row(
    line: int,
    cells: Mapping[str, str | None],
    root: Path,
    real_root: str | None,
    needs_labels: bool,
) -> ListRow | str:
    """Return the row, or the problem with it.

    Args:
        line: its number in the file.
        cells: by column; None where the row is too short.
        root: the folder that paths begin at.
        real_root: the same without links, which no link may lead out of; None if it may.
        needs_labels: a row without a label is a problem.
    """
    path, label, split = cells["path"], cells.get("label", ""), cells.get("split", POOL)
    if not path:
        return "no path"
    if needs_labels and not label:
        return "no label"
    if "split" in cells and (split or "").casefold() not in SPLIT_WORDS:
        return f"split {split or ''!r}; expected train, val or test"
    # Lexically: `..` behind a link must not lead out of the folder.
    absolute = os.path.abspath(root)
    place = os.path.normpath(os.path.join(absolute, path))
    if not place.startswith(absolute.rstrip("/") + "/") or "\0" in path:
        return f"path {escape(path)!r} leads out of the folder {escape(root)}"
    if real_root is not None and not os.path.realpath(place).startswith(
        real_root.rstrip("/") + "/"
    ):
        return (
            f"path {escape(path)!r} leads out of the folder by a symbolic link; "
            f"pass --follow-links to follow it"
        )
    split = SPLIT_WORDS[split.casefold()] if split else POOL
    return ListRow(line, os.path.relpath(place, absolute), label or "", split)


def _contradictions(rows: list[ListRow]) -> list[str]:
    """Return a line for each row that gives an image another label or split than an earlier one."""
    first: dict[str, ListRow] = {}
    problems = []
    for row in rows:
        known = first.setdefault(row.path, row)
        if (known.label, known.split) != (row.label, row.split):
            before = "/".join(filter(None, (known.split, known.label)))
            now = "/".join(filter(None, (row.split, row.label)))
            problems.append(
                f"line {row.line}: {escape(row.path)!r} is {now!r} here and {before!r} in line "
                f"{known.line}"
            )
    return problems


def _part(rows: list[ListRow], root: Path) -> NamedImages:
    paths = [os.path.join(root, row.path) for row in rows]
    lines = np.array([row.line for row in rows], np.int64)
    # The labels are numbered by `assemble`, when all class names are known.
    images = FileSplit(paths, np.zeros(len(rows), np.int64), root, lines)
    return NamedImages(images, [row.label for row in rows], [*map(bytes, file_digests(paths))])
