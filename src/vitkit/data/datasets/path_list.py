"""The paths of many files, packed: a `Path` object for each would take most of the memory."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Int, Int64


class Paths:
    """Paths as one string of bytes, 16 bytes and its name each; a `Path` is made when asked for.

    Args:
        paths: they are told from `root`; absolute ones are as they are.
        root: the folder that they have in common.
    """

    def __init__(self, paths: Iterable[str | os.PathLike[str]], root: Path = Path()) -> None:
        packed, ends = bytearray(), array("q", [0])
        for path in paths:
            packed += os.fsencode(path)
            ends.append(len(packed))
        self._root, self._packed = str(root), bytes(packed)
        edges = np.array(ends, np.int64)
        self._bounds = np.stack([edges[:-1], edges[1:]], axis=1)

    def __len__(self) -> int:
        return len(self._bounds)

    def __getitem__(self, index: int) -> Path:
        return Path(self._text(self._bounds[index]))

    def __iter__(self) -> Iterator[Path]:
        return map(Path, self.texts())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Paths) and [*self] == [*other]

    __hash__ = None  # type: ignore[assignment]

    def take(self, indices: Int[np.ndarray, " M"]) -> Paths:
        """The paths at these places, in that order; the bytes are shared."""
        taken = Paths((), Path(self._root))
        taken._packed, taken._bounds = self._packed, self._bounds[indices]
        return taken

    def texts(self) -> Iterator[str]:
        """Every path as text, which is faster than as a `Path`."""
        return map(self._text, self._bounds)

    def _text(self, bounds: Int64[np.ndarray, " 2"]) -> str:
        start, end = bounds
        return os.path.join(self._root, os.fsdecode(self._packed[start:end]))
