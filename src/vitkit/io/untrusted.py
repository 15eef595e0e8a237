"""Files of others: strict JSON, and checks of zip archives before anything is unpacked."""

import json
import stat
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from vitkit.errors import CheckpointError

MAX_TENSORS = 50_000
"""Tensors of a file; the largest published model and its optimiser's state have some 5000."""
INFLATION = 20
"""Largest compression ratio of an array; real weights hardly compress."""
ZIP_SLACK = 16_000_000
"""Bytes that an archive may declare beyond that ratio, so that small files of zeros pass."""
READ_ERRORS = (
    OSError,
    ValueError,
    EOFError,
    RuntimeError,
    MemoryError,
    SyntaxError,
    TypeError,
    LookupError,
    OverflowError,
    UserWarning,
    SafetensorError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    tokenize.TokenError,
)
"""Exceptions that the readers of all containers raise for damaged bytes."""


def checked_entries(path: Path, archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Return the entries of an archive, if its file can hold them.

    All that is checked comes from the directory at the end of the archive: nothing is unpacked.

    Raises:
        CheckpointError: too many entries, one twice, links, names that lead elsewhere, a
            compression that no writer of weights uses, or sizes that the file cannot hold.
    """
    entries = archive.infolist()
    size = path.stat().st_size
    (name, times), *_ = Counter(entry.filename for entry in entries).most_common(1) or [("", 0)]
    methods = {entry.compress_type for entry in entries}
    packed = sum(entry.compress_size for entry in entries)
    declared = sum(entry.file_size for entry in entries)
    problems = {
        f"{len(entries)} entries are too many; at most {MAX_TENSORS} are read": (
            len(entries) > MAX_TENSORS
        ),
        f"{name.removesuffix('.npy')!r} occurs twice": times > 1,
        "it has an entry that leads out of it": any(map(_leads_out, entries)),
        "it is compressed by a method other than deflate": (
            not methods <= {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
        ),
        # entries that share bytes (a zip bomb) have more of them than the file
        f"its entries need {packed} bytes of a file of {size}, so they overlap": packed > size,
        f"{size} bytes declare {declared} bytes of arrays, more than weights can be compressed": (
            declared > INFLATION * size + ZIP_SLACK
        ),
    }
    refuse(path, problems)
    return entries


def refuse(path: object, problems: Mapping[str, object]) -> None:
    """Raise `CheckpointError` for the first problem whose value is true.

    Args:
        path: the file, for the message.
        problems: what is wrong, as the message says it -> whether it is.
    """
    for problem, is_there in problems.items():
        if is_there:
            raise CheckpointError(f"{path}: {problem}")


def _leads_out(entry: zipfile.ZipInfo) -> bool:
    location = PurePosixPath(entry.filename.replace("\\", "/"))
    # The upper half of the attributes is the Unix mode of the file.
    is_link = stat.S_ISLNK(entry.external_attr >> 16)
    return location.is_absolute() or ".." in location.parts or is_link


# Strict, size-limited parsing of JSON.

MAX_BYTES = 8_000_000
"""Bytes of a JSON file; parsed, the worst of them takes thirty times as much memory."""
MAX_VALUES = 1_000_000
"""Values of a JSON text; the header of 50,000 tensors has half of it."""
DOCUMENT_FILES = {"config": "config.json", "preprocessor": "preprocessor_config.json"}
"""JSON files beside weights, by their names in `Documents`."""


class Documents(Mapping[str, dict[str, Any]]):
    """The JSON files beside weights, each read when a format needs it.

    So a broken file does no harm where no format needs it. Reading one raises `CheckpointError` as
    `read_json` does.

    Args:
        folder: the folder that holds the weights.
    """

    def __init__(self, folder: Path) -> None:
        self._paths: dict[str, Path] = {}
        for name, file in DOCUMENT_FILES.items():
            if (folder / file).is_file():
                self._paths[name] = folder / file
        self._contents: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._contents:
            self._contents[name] = read_json(self._paths[name])
        return self._contents[name]

    def __contains__(self, name: object) -> bool:
        return name in self._paths  # the inherited method would read the file

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: anything else, or more than 8 MB.
    """
    try:
        # before it is read: memory is the limit
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{size} bytes are too many for a JSON description")
        document = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return document


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON value.

    Raises:
        ValueError: not JSON; also NaN, infinities, duplicate keys, deep nesting, and more values
            than a description has, each of which would take a hundred bytes.

    >>> parse_json('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' occurs twice
    """
    # counted before parsing: each of these characters begins at most one value
    values = 0
    for mark in "{[,":
        values += text.count(mark) if isinstance(text, str) else text.count(mark.encode())
    if values > MAX_VALUES:
        raise ValueError(f"{values} objects, lists and values are too many")
    try:
        return json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {key!r} occurs twice")
    return document


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
