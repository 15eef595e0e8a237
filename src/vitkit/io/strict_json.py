"""Strict, size-limited parsing of untrusted JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vitkit.errors import CheckpointError

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
            raise CheckpointError(f"{path}: {size} bytes are too many for a JSON description")
        document = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
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
