"""Results of a user: which existing file may be replaced; imports by name.

One rule for every command: a file that is an input is never replaced, and another existing file
only with `--overwrite`.
"""

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from pkgutil import resolve_name
from typing import Any

from vitkit.errors import OutputError, SettingError, VitkitError
from vitkit.io.atomic import refuse_unwritable

LONGEST_STEM = 200
"""Bytes of a result's name without its ending; systems allow 255, of a temporary name, too."""


def check_outputs(
    paths: Iterable[Path],
    endings: Sequence[str] = (),
    *,
    inputs: Iterable[Path] = (),
    overwrite: bool,
    flag: str,
) -> None:
    """Check that results may be written, before the work that they take.

    Args:
        paths: the files to write.
        endings: the endings that their names may have; any where empty.
        inputs: the files that the command reads; missing ones are passed over. They are looked at
            only if one of `paths` exists and may be replaced.
        overwrite: replace existing files that are not inputs.
        flag: flag that named the paths.

    Raises:
        OutputError: another ending, an existing file, an input, a folder, or a path that cannot be
            written.
    """
    folders: set[Path] = set()
    existing: list[Path] = []
    for path in paths:
        if os.path.isdir(path):  # never raises, as `Path.is_dir` does for too long a name
            raise OutputError(f"{flag} {path} is a folder; name a file")
        if endings and path.suffix.lower() not in endings:
            expected = " or ".join(endings)
            raise OutputError(f"{flag} {path}: expected a name that ends in {expected}")
        if os.path.lexists(path):
            if not overwrite:
                raise OutputError(
                    f"{flag} {path}: this file exists; choose another place, or replace it with "
                    "--overwrite (overwrite=True)"
                )
            existing.append(path)
        # one file of each folder shows whether the folder can be written
        if path.parent not in folders:
            folders.add(path.parent)
            refuse_unwritable(path)
    known = set(map(_file_id, inputs)) - {None} if existing else set()
    for path in existing:
        if _file_id(path) in known:
            raise OutputError(
                f"{flag} {path}: this file is one of the inputs, which are never replaced; choose "
                "another place"
            )


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return device and inode, equal for all paths of a file; None if there is none."""
    try:
        found = path.stat()
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


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


class ResultPlaces:
    """Output paths below a folder, in the order of the inputs.

    Args:
        folder: where all of them are.
        ending: ending of their names, such as `.png`.
    """

    def __init__(self, folder: Path, ending: str) -> None:
        self.folder = folder
        self.ending = ending
        # names that are taken, and the last number of each
        self._taken: Counter[str] = Counter()

    def path(self, place: PurePath) -> Path:
        """Return the path for the next result: `dogs/a.jpg` gives `dogs/a.png`.

        Where another input has that, the result gets a number, `dogs/a-2.png`.

        Args:
            place: relative path of the input; what would lead out of the folder is left out.
        """
        parts = [part for part in place.parts if part not in (place.anchor, os.pardir)]
        inside = PurePath(*(parts or ["image"])).with_suffix("")
        # in bytes, which file systems limit; the last part of an address may be longer
        short = inside.name[:LONGEST_STEM]
        while len(os.fsencode(short)) > LONGEST_STEM:
            short = short[:-1]  # whole characters, as half of one is no text
        stem = free = str(inside.with_name(short))
        while self._taken[free]:
            self._taken[stem] += 1
            free = f"{stem}-{self._taken[stem]}"
        self._taken[free] = 1
        return self.folder / f"{free}{self.ending}"


# User functions and objects by name: imported, or passed in the call.
#
# Settings are text, so that config.yaml can hold them. A dataset in memory or a function of a
# notebook has a name there, and is found by it as long as the call lasts.

NOT_IMPORTABLE = ("__main__:", "<", "()")
"""Parts of the names of objects that no other process can import."""
MEMORY_PREFIX = "memory://"
"""Begins the name of data that were passed as an object: `memory://arrays-1f3a5c7e`."""
GIVEN: dict[str, Any] = {}
"""Name -> the object that a call in progress was given."""


@contextmanager
def given(objects: Mapping[str, Any]) -> Iterator[None]:
    """Keep objects under their names while the block runs; an inner block may replace some."""
    before = dict(GIVEN)
    GIVEN.update(objects)
    try:
        yield
    finally:
        GIVEN.clear()
        GIVEN.update(before)


def import_by_name(name: str) -> Any:
    """Return the object of this name; its module may lie in the current folder.

    An object that the call passed under this name comes first.

    Raises:
        ImportError, AttributeError, ValueError: no such module, no such name in it, or not a name;
            also whatever the module itself raises.
    """
    if name in GIVEN:
        return GIVEN[name]
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
