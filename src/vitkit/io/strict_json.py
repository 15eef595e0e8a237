"""JSON that strangers wrote: strictly as its standard has it, and not much of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vitkit.errors import CheckpointError

LARGEST = 8_000_000
"""Bytes of a JSON file; parsed, the worst of them takes thirty times as much memory."""

VALUES = 1_000_000
"""Values of a JSON text; the header of 50,000 tensors has half of it."""
BESIDE = {"config": "config.json", "preprocessor": "preprocessor_config.json"}
"""JSON that lies beside weights, by the name it has in `Documents`."""


class Documents(Mapping[str, dict[str, Any]]):
    """The JSON files beside weights, each read when a format asks for it.

    So one that is nobody's business, or broken, is in nobody's way. Reading one raises
    `CheckpointError` as `read_json` does.
    """

    def __init__(self, folder: Path) -> None:
        found = {name: folder / file for name, file in BESIDE.items()}
        self._places = {name: place for name, place in found.items() if place.is_file()}
        self._read: dict[str, dict[str, Any]] = {}

    def __getitem__(self, name: str) -> dict[str, Any]:
        if name not in self._read:
            self._read[name] = read_json(self._places[name])
        return self._read[name]

    def __contains__(self, name: object) -> bool:
        return name in self._places  # a mapping's own would read the file to know

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `CheckpointError` for anything else, or more than 8 MB of it."""
    try:
        if (size := path.stat().st_size) > LARGEST:
            raise CheckpointError(f"{path}: {size} bytes are too many for a description")
        document = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(document, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return document


def parse(text: str | bytes) -> Any:
    """A JSON value. Raises `ValueError` also for NaN, infinities, keys given twice, depth, and
    more values than any description has, each of which would take a hundred bytes.

    >>> parse('{"a": [1, 2.5]}')
    {'a': [1, 2.5]}
    >>> parse('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' is there twice
    """
    marks = [text.count(mark) if isinstance(text, str) else text.count(mark.encode())
             for mark in "{[,"]  # fmt: skip
    if sum(marks) > VALUES:
        raise ValueError(f"{sum(marks)} objects, lists and values are too many")
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        counts = Counter(key for key, _ in pairs)
        key = next(key for key, count in counts.items() if count > 1)
        raise ValueError(f"the key {key!r} is there twice")
    return made


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON's")
