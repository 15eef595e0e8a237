"""The paths of many files, packed: a `Path` object for each would take most of the memory."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64


class Paths:
    """A list of paths in one string of bytes: 16 bytes and the name for each.

    Args:
        paths: relative to `root`; absolute ones stay as they are.
        root: the folder that they have in common.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]], root: Path = Path()) -> None:
        packed = bytearray()
        ends = array("q", [0])
        for path in paths:
            packed += os.fsencode(path)
            ends.append(len(packed))
        self._root = str(root)
        self._packed = bytes(packed)
        edges = np.array(ends, np.int64)
        # First and last byte of each path, so that a selection can share the bytes.
        self._bounds = np.stack([edges[:-1], edges[1:]], axis=1)

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, index: int) -> Path:
        return Path(self._text(self._bounds[index]))

    def text(self, index: int) -> str:
        """Return a path as text, which is faster than as a `Path`."""
        return self._text(self._bounds[index])

    def __iter__(self) -> Iterator[Path]:
        return map(Path, self.texts())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Paths) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def take(self, indices: Int[np.ndarray, " M"]) -> Paths:
        """Return the paths at these indices, in that order; the bytes are shared."""
        selection = Paths((), Path(self._root))
        selection._packed = self._packed
        selection._bounds = self._bounds[indices]
        return selection

    def texts(self) -> Iterator[str]:
        """Iterate over the paths as text, which is faster than as `Path` objects."""
        return map(self._text, self._bounds)

    def _text(self, bounds: Int64[np.ndarray, " 2"]) -> str:
        start, end = bounds
        return os.path.join(self._root, os.fsdecode(self._packed[start:end]))
