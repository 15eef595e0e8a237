"""A CSV that lists images: `path,label` and, if there is one, `split`.

Paths are relative to the CSV's folder, or to another one that is given. Nothing outside of it is
read, whatever the list says; symbolic links may lead out of it where the user allows that.
"""

from __future__ import annotations

import csv
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitkit.data.datasets.build import POOL, Part, assemble
from vitkit.data.datasets.dataset import SPLIT_WORDS, Dataset, FileSplit
from vitkit.data.datasets.file_digests import file_digests
from vitkit.data.datasets.path_list import Paths
from vitkit.data.images.decode import escape
from vitkit.errors import DataError

COLUMNS = {
    "path": (
        ("path", "image_path", "filename"),
        ("file_name", "filepath", "file_path", "image", "img_path"),
        ("id", "image_id"),
    ),
    "label": (("label",), ("class", "target", "class_name", "category")),
    "split": (("split",),),
}
"""What each column may be called; a later group counts where none of an earlier one is there;
`split` may be absent."""
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
"""How a file in UTF-16 begins, such as Excel's "Unicode text"."""
SEPARATORS = ",;\t"
SHOWN = 5


@dataclass(frozen=True)
class _Row:
    line: int
    path: str
    label: str
    split: str


def open_csv(
    path: Path,
    *,
    root: Path | None = None,
    ignore_extra_classes: bool = False,
    follow_links: bool = False,
) -> Dataset:
    """Open the images that a CSV lists; none is decoded, every file is hashed.

    A file that is not there is a bad image like any other, told by its line.

    Args:
        path: UTF-8, or UTF-16 with its mark; its first line the columns' names; commas, semicolons
            or tabs.
        root: the folder that paths begin at; the CSV's own where absent.
        ignore_extra_classes: leave out classes of val and test that train lacks.
        follow_links: follow symbolic links that lead out of that folder.

    Raises:
        DataError: columns that are not there; rows without path or label, with an unknown split,
            with a path out of the folder, or that contradict another, by line number; and what
            `assemble` raises.
    """
    where, root = escape(path), path.parent if root is None else root
    rows, problems = [], []
    for line, cells in _rows(path, where):
        row, problem = _read_row(line, cells, root, follow_links)
        if row is not None:
            rows.append(row)
        else:
            problems.append(f"line {line}: {problem}")
    problems = problems or _contradictions(rows)
    if problems:
        more = len(problems) - SHOWN
        shown = "; ".join(problems[:SHOWN]) + (f"; and {more:,} more" if more > 0 else "")
        raise DataError(f"{where}: {shown}")
    groups: dict[str, list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.split, []).append(row)
    parts = {split: _part(group, root) for split, group in groups.items()}
    repeated = len(rows) - len({row.path for row in rows})
    notes = [f"{repeated:,} rows list an image once more"] if repeated else []
    return assemble(
        escape(path.stem), where, parts, ignore_extra_classes=ignore_extra_classes, notes=notes
    )


def _rows(path: Path, where: str) -> Iterator[tuple[int, Mapping[str, str | None]]]:
    """(line number, the cells by what they mean) of every row that is not empty."""
    before = 0
    try:
        with path.open("rb") as start:
            encoding = "utf-16" if start.read(2) in UTF_16 else "utf-8-sig"
        with path.open(encoding=encoding, newline="") as file:
            header = file.readline()
            separator = max(SEPARATORS, key=header.count)
            places = _places(next(csv.reader([header], delimiter=separator), []), where)
            reader = csv.reader(file, delimiter=separator, strict=True)
            before = 1
            for cells in reader:
                line, before = before + 1, reader.line_num + 1
                if any(cell.strip() for cell in cells):
                    yield (
                        line,
                        {
                            column: cells[place].strip() if place < len(cells) else None
                            for column, place in places.items()
                        },
                    )
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected UTF-8 text, or UTF-16 with its mark: {error}") from None
    except csv.Error as error:
        raise DataError(f"{where}: not a CSV from line {before + 1} on: {error}") from None
    except OSError as error:
        raise DataError(f"{where}: cannot be read: {error.strerror}") from None


def _places(header: list[str], where: str) -> dict[str, int]:
    """Which column holds the path, the label and the split."""
    names = [name.strip().casefold() for name in header]
    places = {}
    for column, known in COLUMNS.items():
        groups = ([place for place, name in enumerate(names) if name in group] for group in known)
        found = next(filter(None, groups), [])
        if len(found) > 1:
            raise DataError(
                f"{where}: columns {[header[place] for place in found]} could all be the {column}; "
                f"keep one of them"
            )
        if found:
            places[column] = found[0]
        elif column != "split":
            raise DataError(
                f"{where}: no column {column!r}; expected a first line such as "
                f"path,label or path,label,split, got {escape(','.join(header))!r}; it may be "
                f"called {', '.join(itertools.chain(*known))}"
            )
    return places


def _read_row(
    line: int, cells: Mapping[str, str | None], root: Path, follow_links: bool
) -> tuple[_Row | None, str]:
    """The row, or what is wrong with it."""
    path, label, split = cells["path"], cells["label"], cells.get("split", POOL)
    if not path:
        return None, "no path"
    if not label:
        return None, "no label"
    if "split" in cells and (split or "").casefold() not in SPLIT_WORDS:
        return None, f"split {split or ''!r}, expected train, val or test"
    inside = _inside(path, os.path.abspath(root))
    if inside is None or "\0" in path:
        return None, f"path {escape(path)!r} leads out of the folder {escape(root)}"
    if not follow_links and not _stays(inside, os.path.realpath(root)):
        return None, (
            f"path {escape(path)!r} leads out of the folder by a symbolic link; "
            f"pass --follow-links to follow it"
        )
    split = SPLIT_WORDS[split.casefold()] if split else POOL
    return _Row(line, os.path.relpath(inside, os.path.abspath(root)), label, split), ""


def _inside(path: str, root: str) -> str | None:
    """The absolute path, by its text alone; None where that is not below the root."""
    whole = os.path.normpath(os.path.join(root, path))
    return whole if whole.startswith(root.rstrip("/") + "/") else None


def _stays(path: str, real_root: str) -> bool:
    """Whether a path is below the root when its links are followed."""
    return os.path.realpath(path).startswith(real_root.rstrip("/") + "/")


def _contradictions(rows: list[_Row]) -> list[str]:
    """Rows that give an image another label or another split than an earlier one."""
    first: dict[str, _Row] = {}
    problems = []
    for row in rows:
        known = first.setdefault(row.path, row)
        if (known.label, known.split) != (row.label, row.split):
            said = "/".join(filter(None, (known.split, known.label)))
            now = "/".join(filter(None, (row.split, row.label)))
            problems.append(
                f"line {row.line}: {escape(row.path)!r} is {now!r} here and {said!r} in "
                f"line {known.line}"
            )
    return problems


def _part(rows: list[_Row], root: Path) -> Part:
    paths = Paths((row.path for row in rows), root)
    lines = np.array([row.line for row in rows], np.int64)
    images = FileSplit(paths, np.zeros(len(rows), np.int64), root, lines)
    return Part(images, [row.label for row in rows], [*map(bytes, file_digests(paths))])
