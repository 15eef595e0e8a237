"""Results of a user: which existing file may be replaced; strict JSON; imports by name.

One rule for every command: a file that is an input is never replaced; another existing file only if
its content is an earlier result of the same kind, or with `--overwrite`.
"""

from __future__ import annotations

import csv
import json
import os
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePath
from pkgutil import resolve_name
from typing import Any, TypeAlias

from vitkit.errors import OutputError, SettingError, VitkitError
from vitkit.io.atomic import refuse_unwritable

FileId: TypeAlias = tuple[int, int]
"""Device and inode: equal for two paths of the same file, also through links."""
HEAD_BYTES = 4096
"""First bytes of a file in which its kind is found."""
PNG_KEY = "Software"
"""Key of the PNG text that names the command which wrote the file."""
NOT_A_RESULT = (
    OSError,
    ValueError,
    LookupError,
    RecursionError,
    NotImplementedError,
    csv.Error,
    struct.error,
    zipfile.BadZipFile,
)
"""Exceptions raised by reading a file of another kind, or a damaged one."""
LONGEST_STEM = 200
"""Bytes of a result's name without its ending; systems allow 255, of a temporary name, too."""
CONFUSION_CORNER = r"true\predicted"
"""First cell of a CSV file with a confusion matrix: what its rows and its columns are."""


@dataclass(frozen=True)
class ResultKind:
    """A kind of result file, recognised by its content.

    Attributes:
        name: for messages, with its article.
        ending: ending of the file's name, such as `.csv`.
        recognise: returns True for the file of an earlier result; may raise any of
            `NOT_A_RESULT` for another file.
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
        except NOT_A_RESULT:
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
        kind: kind of all of them.
        inputs: the files that the command reads; missing ones are passed over. They are looked at
            only if one of `paths` exists.
        overwrite: also replace files that are no earlier results.
        flag: flag that named the paths.

    Raises:
        OutputError: another ending, an input, a file that is no earlier result, a folder, or a path
            that cannot be written.
    """
    for path in paths:
        if os.path.isdir(path):  # never raises, as `Path.is_dir` does for too long a name
            raise OutputError(f"{flag} {path} is a folder; name a file")
        if path.suffix.lower() != kind.ending:
            raise OutputError(f"{flag} {path}: expected a name that ends in {kind.ending}")
    existing = [path for path in paths if os.path.lexists(path)]
    input_ids = {file_id(file) for file in inputs} - {None} if existing else set()
    for path in existing:
        if file_id(path) in input_ids:
            raise refused_input(path, flag)
        if not overwrite and not kind.is_result(path):
            raise OutputError(
                f"{flag} {path}: this file exists and is not {kind.name} of vitkit; choose another "
                "place, or replace it with --overwrite"
            )
    # one file of each folder shows whether the folder can be written
    for path in {path.parent: path for path in paths}.values():
        refuse_unwritable(path)


def nonempty_path(path: str | os.PathLike[str], name: str) -> Path:
    """Return the path of an output.

    Args:
        path: path of a file or a folder.
        name: name of the argument, for the message.

    Raises:
        OutputError: an empty path, which would mean the working folder.
    """
    if not os.fspath(path):
        raise OutputError(f"{name} is empty; pass a path ('.' is the working folder)")
    return Path(path)


def check_new_files(
    paths: Iterable[Path], *, inputs: Iterable[Path], overwrite: bool, flag: str
) -> None:
    """Check that files may be written that replace nothing, unless the user allows it.

    Args:
        paths: the files to write, all in one folder or below it.
        inputs: the files that the command reads; they are looked at only if one of `paths` exists.
        overwrite: replace existing files that are not inputs.
        flag: flag that named the folder.

    Raises:
        OutputError: a file that exists, or a folder that cannot be written.
    """
    existing: list[Path] = []
    folders: set[Path] = set()
    for path in paths:
        if os.path.lexists(path):
            existing.append(path)
            if not overwrite:
                break  # one is enough to refuse
        if path.parent not in folders:
            folders.add(path.parent)
            refuse_unwritable(path)
    if existing and not overwrite:
        raise OutputError(
            f"{flag} {existing[0]}: this file exists; choose another folder, or replace it with "
            "--overwrite"
        )
    input_ids = {file_id(file) for file in inputs} - {None} if existing else set()
    for path in existing:
        if path.is_dir():
            raise OutputError(f"{flag} {path} is a folder, not a file; choose another folder")
        if file_id(path) in input_ids:
            raise refused_input(path, flag)


class ResultPlaces:
    """Output paths below a folder, in the order of the inputs.

    Args:
        folder: where all of them are.
        ending: ending of their names, such as `.png`.
    """

    def __init__(self, folder: Path, ending: str) -> None:
        self.folder = folder
        self.ending = ending
        self._taken: set[str] = set()
        # where the search for a free name continues, so that many equal names are fast, too
        self._counts: dict[str, int] = {}

    def path(self, place: PurePath) -> Path:
        """Return the path for the next result: `dogs/a.jpg` gives `dogs/a.png`.

        Where another input has that, the result gets a number, `dogs/a-2.png`.

        Args:
            place: relative path of the input; what would lead out of the folder is left out.
        """
        stem = free = _stem(place)
        count = self._counts.get(stem, 1)
        while free in self._taken:
            count += 1
            free = f"{stem}-{count}"
        self._counts[stem] = count
        self._taken.add(free)
        return self.folder / f"{free}{self.ending}"


def _stem(place: PurePath) -> str:
    """Return a path inside the folder of the results, without an ending."""
    parts = [part for part in place.parts if part not in (place.anchor, os.pardir)]
    inside = PurePath(*(parts or ["image"])).with_suffix("")
    # in bytes, which file systems limit; the last part of an address may be longer
    short = inside.name[:LONGEST_STEM]
    while len(os.fsencode(short)) > LONGEST_STEM:
        short = short[:-1]  # whole characters, as half of one is no text
    return str(inside.with_name(short))


def refused_input(path: Path, flag: str) -> OutputError:
    """Return the error for an output that is one of the inputs."""
    return OutputError(
        f"{flag} {path}: this file is one of the inputs, which are never replaced; choose another "
        "place"
    )


def file_id(path: Path) -> FileId | None:
    """Return device and inode of the file at a path; None if there is no file."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _has_mark(marks: Iterable[bytes], *, first: bool = False) -> Callable[[Path], bool]:
    """Return a function that tells whether a file has a mark in its head, or begins with it."""

    def recognise(path: Path) -> bool:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        return any(head.startswith(mark) if first else mark in head for mark in marks)

    return recognise


def csv_result(name: str, *headers: Sequence[str]) -> ResultKind:
    """Return the kind of CSV files with one of these headers."""
    lines = [",".join(header).encode() + b"\n" for header in headers]
    return ResultKind(name, ".csv", _has_mark(lines, first=True))


def square_csv_result(name: str) -> ResultKind:
    """Return the kind of CSV files with a confusion matrix, marked by their first cell."""
    return ResultKind(name, ".csv", _has_mark([f"{CONFUSION_CORNER},".encode()], first=True))


def json_result(name: str, keys: Iterable[str]) -> ResultKind:
    """Return the kind of JSON files that hold one object with these keys."""
    expected = set(keys)

    def recognise(path: Path) -> bool:
        document = json.loads(path.read_bytes())
        return isinstance(document, dict) and set(document) == expected

    return ResultKind(name, ".json", recognise)


def npz_result(name: str, arrays: Iterable[str], optional: Iterable[str] = ()) -> ResultKind:
    """Return the kind of .npz files that hold these arrays, and of optional ones any."""
    expected = {f"{array}.npy" for array in arrays}
    allowed = expected | {f"{array}.npy" for array in optional}

    def recognise(path: Path) -> bool:
        with zipfile.ZipFile(path) as archive:
            return expected <= set(archive.namelist()) <= allowed

    return ResultKind(name, ".npz", recognise)


def png_result(name: str, command: str) -> ResultKind:
    """Return the kind of PNG files whose text `Software`, the first after the header, is this."""
    text = f"{PNG_KEY}\0{command}".encode("latin-1")
    # a chunk: length of the data, type, data
    chunk = struct.pack(">I", len(text)) + b"tEXt" + text
    return ResultKind(name, ".png", _has_mark([chunk]))


def svg_result(name: str, command: str) -> ResultKind:
    """Return the kind of SVG files whose metadata name this command as their creator."""
    return ResultKind(name, ".svg", _has_mark([f"<dc:title>{command}</dc:title>".encode()]))


# User functions and objects by name: imported, or passed in the call.
#
# Settings are text, so that config.yaml can hold them. A dataset in memory or a function of a
# notebook has a name there, and is found by it as long as the call lasts.

NOT_IMPORTABLE = ("__main__:", "<", "()")
"""Parts of the names of objects that no other process can import."""
MEMORY_PREFIX = "memory://"
"""Begins the name of data that were passed as an object: `memory://arrays-1f3a5c7e`."""
_GIVEN: dict[str, Any] = {}


@contextmanager
def given(objects: Mapping[str, Any]) -> Iterator[None]:
    """Keep objects under their names while the block runs; an inner block may replace some."""
    before = dict(_GIVEN)
    _GIVEN.update(objects)
    try:
        yield
    finally:
        _GIVEN.clear()
        _GIVEN.update(before)


def is_given(name: str) -> bool:
    """Return True if an object was passed under this name."""
    return name in _GIVEN


def find_given(name: str) -> Any:
    """Return the object of a name. Raises `KeyError`."""
    return _GIVEN[name]


def import_by_name(name: str) -> Any:
    """Return the object of this name; its module may lie in the current folder.

    An object that the call passed under this name comes first.

    Raises:
        ImportError, AttributeError, ValueError: no such module, no such name in it, or not a name;
            also whatever the module itself raises.
    """
    if is_given(name):
        return find_given(name)
    if names_an_object(name):
        raise ImportError("it is an object of a script or a notebook, which must be passed itself")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # appended, so that installed modules take precedence
    return resolve_name(name)


def import_setting(setting: str, name: str) -> Any:
    """Return the object that a setting names, such as `package.module:function`.

    Args:
        setting: name of the setting, for messages.
        name: its value.

    Raises:
        SettingError: there is no such object, or its module fails while it is imported.
    """
    try:
        return import_by_name(name)
    except VitkitError:  # a signal, too
        raise
    except (ImportError, AttributeError, ValueError) as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
    raise SettingError(f"--{setting} {name} cannot be imported: {reason}")


def names_an_object(name: str) -> bool:
    """Return True for the name of an object that no import finds, such as a notebook's function."""
    return ":" in name and any(part in name for part in NOT_IMPORTABLE)


def import_name(thing: object) -> str:
    """Return `module:name` of a function or a class; of any other object, that of its class + `()`.

    >>> from collections import OrderedDict
    >>> import_name(OrderedDict), import_name(OrderedDict())
    ('collections:OrderedDict', 'collections:OrderedDict()')
    """
    if hasattr(thing, "__qualname__"):
        return f"{thing.__module__}:{thing.__qualname__}"
    return f"{type(thing).__module__}:{type(thing).__qualname__}()"


def is_importable(thing: object) -> bool:
    """Return True if another process can import an object by its name."""
    name = import_name(thing)
    found: object = None
    # in another process `__main__` is another module
    if not names_an_object(name):
        with suppress(ImportError, AttributeError, ValueError):
            found = resolve_name(name)
    return found is thing
