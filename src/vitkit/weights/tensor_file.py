"""An open file of weights, and the checks of archives before anything is unpacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from vitkit.errors import CheckpointError
from vitkit.weights.zip_checks import READ_ERRORS

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""The dtypes of tensors that count as weights."""


@dataclass(frozen=True)
class Header:
    """The description of a file of weights: everything but the numbers.

    Attributes:
        path: the file, or the folder.
        shapes: tensor name -> shape.
        dtypes: tensor name -> dtype as the file names it, such as `F32` or `<f4`.
        metadata: the safetensors header's own text entries.
        documents: the JSON files beside it: `config`, `preprocessor`.
        notes: containers and prefixes that were removed, one line each.
        stated: the model as a training checkpoint describes it, with the keys of timm's
            `config.json`.
    """

    path: Path
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    metadata: dict[str, str] = field(default_factory=dict)
    documents: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stated: Mapping[str, Any] = field(default_factory=dict)


class ComputedTensor(NamedTuple):
    """A tensor that is computed from others of its file.

    Attributes:
        shape: shape of the tensor.
        dtype: as the file names it.
        read: computes it.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]


class Source(Mapping[str, Tensor]):
    """The tensors of an open file by name, each read when it is asked for; a context manager.

    Each tensor has memory of its own: later changes of the file do not reach it.

    Args:
        header: header of the file.
        readers: tensor name -> the function that reads it.
        files: the open files, closed with the source.
    """

    def __init__(
        self, header: Header, readers: Mapping[str, Callable[[], Tensor]], files: ExitStack
    ) -> None:
        self.header = header
        self._readers = readers
        self._files = files

    def __getitem__(self, name: str) -> Tensor:
        """Read a tensor that holds weights.

        Raises:
            CheckpointError: the tensor is damaged, holds no floating-point numbers, or holds
                numbers that are not finite.
        """
        read = self._readers[name]
        try:
            # Errors of any container become one line with the file and the tensor.
            tensor = read()
            _refuse_unusable_numbers(name, tensor)
        except CheckpointError as error:
            raise CheckpointError(f"{self.header.path}: {error}") from None
        except READ_ERRORS as error:
            raise CheckpointError(f"{self.header.path}: {name}: cannot be read: {error}") from None
        return tensor

    def __contains__(self, name: object) -> bool:
        # Mapping's own version would read the tensor to find out.
        return name in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def reader(self, name: str) -> Callable[[], Tensor]:
        """Return the function that reads a tensor, without the checks of `source[name]`."""
        return self._readers[name]

    def renamed(self, names: Mapping[str, str], *notes: str) -> Source:
        """Return the same tensors under other names.

        Args:
            names: old name -> new name; tensors that are not in it are left out.
            *notes: added to the header's.
        """
        # Names, shapes, dtypes and readers change together; documents and the open files stay.
        old = self.header
        shapes: dict[str, tuple[int, ...]] = {}
        dtypes: dict[str, str] = {}
        readers: dict[str, Callable[[], Tensor]] = {}
        for old_name, new_name in names.items():
            shapes[new_name] = old.shapes[old_name]
            dtypes[new_name] = old.dtypes[old_name]
            readers[new_name] = self._readers[old_name]
        header = replace(old, shapes=shapes, dtypes=dtypes, notes=(*old.notes, *notes))
        return Source(header, readers, self._files)

    def with_computed(
        self, computed: Mapping[str, ComputedTensor], *notes: str, instead_of: Set[str]
    ) -> Source:
        """Return the same tensors, with some replaced by tensors computed from them.

        Args:
            computed: name -> the tensor.
            *notes: added to the header's.
            instead_of: names of tensors that are left out.
        """
        others = self.renamed({name: name for name in self if name not in instead_of}, *notes)
        # `renamed` made these for the new source, so they may be filled in place.
        shapes, dtypes = others.header.shapes, others.header.dtypes
        readers = dict(others._readers)
        for name, tensor in computed.items():
            shapes[name] = tensor.shape
            dtypes[name] = tensor.dtype
            readers[name] = tensor.read
        return Source(others.header, readers, self._files)

    def with_note(self, note: str) -> Source:
        """Return the same tensors with a line added to the header's notes."""
        header = replace(self.header, notes=(*self.header.notes, note))
        return Source(header, self._readers, self._files)

    def renamed_by(
        self, rename: Callable[[str], str], *notes: str, clash: str | None = None
    ) -> Source:
        """Return the same tensors with each name changed by a function.

        Args:
            rename: old name -> new name.
            *notes: added to the header's.
            clash: message of the error for two tensors that would get one name.

        Raises:
            CheckpointError: such a clash, if there is a message for it.
        """
        names = {name: rename(name) for name in self}
        if clash is not None and len(set(names.values())) < len(names):
            raise CheckpointError(clash)
        unchanged = all(old == new for old, new in names.items())
        if unchanged and not notes:
            return self
        return self.renamed(names, *notes)


def _refuse_unusable_numbers(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that a model cannot compute with."""
    if tensor.dtype not in WEIGHT_DTYPES:
        kind = str(tensor.dtype).removeprefix("torch.")
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in WEIGHT_DTYPES)
        raise CheckpointError(f"{name}: {kind} is not a dtype of weights; expected {known}")
    not_finite = count_not_finite(tensor)
    if not_finite:
        raise CheckpointError(
            f"{name}: {not_finite} of {tensor.numel()} numbers are NaN or infinite; use a "
            "checkpoint from before training diverged"
        )


def count_not_finite(tensor: Tensor) -> int:
    """Return how many numbers of a tensor are NaN or infinite in float32."""
    # A sum never loses a NaN or an infinity, so the slow test runs only where one is likely.
    if torch.isfinite(tensor.sum(dtype=torch.float32)):
        return 0
    return int((~torch.isfinite(tensor.float())).sum())
