"""A CSV that lists images: `path,label` and, if there is one, `split`.

Paths are relative to the CSV's folder, or to another one that is given. Nothing outside of it is
read, whatever the list contains; symbolic links may lead out of it where the user allows that.
"""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitkit.data.datasets import pixel_cache, splitting
from vitkit.data.datasets.dataset import SPLIT_WORDS, Dataset, FileSplit
from vitkit.data.datasets.split import csv_rows
from vitkit.errors import DataError
from vitkit.messages import escape, plural

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
    notes = []
    if repeated:
        notes = [f"{plural(repeated, 'row')} of an image listed before"]
    return splitting.assemble(
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
        DataError: the first problem of all rows, by line number; or no path that exists.
    """
    where = escape(path)
    # links are resolved once, not for every row
    real_root = None if follow_links else os.path.realpath(root)
    rows: list[ListRow] = []
    first: dict[str, ListRow] = {}
    problems: list[str] = []
    columns: dict[str, int] = {}
    for line, cells in csv_rows(path, where):
        if not columns:
            columns = _columns(cells, where, needs_labels)
            continue
        cells += [""] * (1 + max(columns.values()))  # a row may be too short
        named = {column: cells[index].strip() for column, index in columns.items()}
        row = _parse_row(line, named, root, real_root, needs_labels)
        if isinstance(row, ListRow):
            rows.append(row)
            known = first.setdefault(row.path, row)
            if known[2:] == row[2:]:
                continue
            row = f"{escape(row.path)!r} has another class or split in line {known.line}"
        problems.append(f"line {line}: {row}")
    # Some missing files are bad images; if all are missing, the root folder is wrong.
    if rows and not problems and not any(os.path.lexists(root / row.path) for row in rows):
        problems = [
            f"none of its {len(rows):,} paths exists below {escape(root)}; pass the folder that "
            "they are relative to as --data-root (data_root=...)"
        ]
    if problems:
        more = ""
        if problems[1:]:
            more = f" (and {len(problems) - 1:,} more lines)"
        raise DataError(f"{where}: {problems[0]}{more}")
    return rows


def _columns(header: list[str], where: str, needs_labels: bool) -> dict[str, int]:
    """Return the index of the columns of the path, the label and the split."""
    names = [name.strip().casefold() for name in header]
    columns: dict[str, int] = {}
    for column, groups in COLUMNS.items():
        indices: list[int] = []
        for group in groups:
            indices = indices or [index for index, name in enumerate(names) if name in group]
        if len(indices) == 1:
            columns[column] = indices[0]
        elif indices or column == "path" or (column == "label" and needs_labels):
            raise DataError(
                f"{where}: expected one column {column!r}, found {len(indices)} in the first line "
                f"{escape(','.join(header))!r}; it may be called "
                f"{', '.join(itertools.chain(*groups))}"
            )
    return columns


def _parse_row(
    line: int, cells: Mapping[str, str], root: Path, real_root: str | None, needs_labels: bool
) -> ListRow | str:
    """Return the row, or the problem with it.

    Args:
        line: its number in the file.
        cells: by column.
        root: the folder that paths begin at.
        real_root: the same without links, which no link may lead out of; None if it may.
        needs_labels: a row without a label is a problem.
    """
    path, label, split = cells["path"], cells.get("label", ""), cells.get("split")
    if not path:
        return "no path"
    if needs_labels and not label:
        return "no label"
    if split is not None and split.casefold() not in SPLIT_WORDS:
        return f"split {split!r}; expected train, val or test"
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
    split = splitting.POOL if split is None else SPLIT_WORDS[split.casefold()]
    return ListRow(line, os.path.relpath(place, absolute), label, split)


def _part(rows: list[ListRow], root: Path) -> splitting.NamedImages:
    paths = [os.path.join(root, row.path) for row in rows]
    lines = np.array([row.line for row in rows], np.int64)
    # The labels are numbered by `assemble`, when all class names are known.
    images = FileSplit(paths, np.zeros(len(rows), np.int64), root, lines)
    return splitting.NamedImages(
        images, [row.label for row in rows], [*map(bytes, pixel_cache.file_digests(paths))]
    )
