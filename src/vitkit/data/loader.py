"""Batches of pictures in an order that is a pure function of (seed, epoch).

A loader is asked for steps, not for epochs: step s of a run always holds the same pictures, changed
in the same way, with any number of worker processes and from whatever step the run goes on.
"""

from __future__ import annotations

import atexit
import signal
import warnings
import weakref
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitkit.data.augment import Augmentation, augment_batch, training_pixels
from vitkit.data.preprocess import fit, normalise
from vitkit.data.randomness import permutation
from vitkit.data.sources import Split
from vitkit.errors import DataError, VitkitError
from vitkit.spec import Preprocess


@dataclass(frozen=True)
class Batch:
    """One batch, still as pixels.

    Attributes:
        pixels: (B, H, W, C) uint8.
        labels: class numbers (B,).
        indices: the pictures' places in the split (B,).
        epoch: counted from 0; -1 in evaluation.
    """

    pixels: UInt8[Tensor, "B H W C"]
    labels: Int64[Tensor, "B"]
    indices: Int64[Tensor, "B"]
    epoch: int

    def images(self, preprocess: Preprocess, device: torch.device) -> Float[Tensor, "B C H W"]:
        """The normalised pictures, on `device`: bytes travel, floats are made there."""
        return normalise(self.pixels.to(device, non_blocking=True), preprocess)


class TrainingSteps(Dataset[Batch]):
    """The whole run as a list of steps: item s is the batch of step s, counted from 0.

    The pictures of an epoch that do not fill a batch wait for another epoch's order. Of several
    processes, process r takes the places r, r + n, r + 2n ... of every batch, so that all of them
    together hold the same pictures whatever n is.

    Raises:
        DataError: fewer pictures than one batch.
    """

    def __init__(
        self,
        split: Split,
        preprocess: Preprocess,
        augmentation: Augmentation,
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if len(split) < batch_size:
            raise DataError(
                f"{len(split)} training pictures do not fill one batch of {batch_size}; "
                f"pass --batch-size {len(split)} or less"
            )
        self.split, self.preprocess, self.augmentation = split, preprocess, augmentation
        self.batch_size, self.seed = batch_size, seed
        self.rank, self.world_size = rank, world_size
        self.steps_per_epoch = len(split) // batch_size

    def indices(self, step: int) -> Int64[np.ndarray, "B"]:
        """Which pictures step `step` holds, over all processes."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = _order(self.seed, epoch, len(self.split))
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def __getitem__(self, step: int) -> Batch:
        epoch = step // self.steps_per_epoch
        indices = self.indices(step)[self.rank :: self.world_size]
        pixels = np.stack(
            [
                training_pixels(
                    self.split.read(int(i)),
                    self.preprocess,
                    self.augmentation,
                    self.seed,
                    epoch,
                    int(i),
                )
                for i in indices
            ]
        )
        pixels = augment_batch(pixels, self.augmentation, self.seed, epoch, indices)
        return _batch(pixels, self.split, indices, epoch)


class EvaluationBatches(Dataset[Batch]):
    """A split in its own order, every picture once, by the evaluation transform.

    Process r of n has the pictures r, r + n, r + 2n ...; the last ones may have one less, or none.
    """

    def __init__(
        self,
        split: Split,
        preprocess: Preprocess,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.split, self.preprocess, self.batch_size = split, preprocess, batch_size
        self._mine = range(rank, len(split), world_size)

    def __len__(self) -> int:
        return (len(self._mine) + self.batch_size - 1) // self.batch_size

    def __getitem__(self, number: int) -> Batch:
        start = number * self.batch_size
        indices = np.array(self._mine[start : start + self.batch_size])
        pixels = np.stack([fit(self.split.read(int(i)), self.preprocess) for i in indices])
        return _batch(pixels, self.split, indices, epoch=-1)


_OPEN: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()
"""Batches that worker processes are still making; closed when the interpreter exits."""


def batches(
    source: Dataset[Batch], numbers: range, *, workers: int = 0
) -> Generator[Batch, None, None]:
    """The batches `numbers` of a source, in that order, made by `workers` processes (0: here).

    The processes end with the generator: when it is used up, closed or dropped, when it raises,
    and at the latest when the interpreter exits.

    Raises:
        ImageError: a picture that can no longer be read, by name, from whichever process met it.
    """
    with warnings.catch_warnings():
        # More workers than cores are the caller's choice; the training plan notes it in one line.
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        loader = DataLoader(
            _Careful(source),
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            generator=torch.Generator(),  # else the loader would draw its seed from the global one
            collate_fn=_as_it_is,
            worker_init_fn=_leave_signals_to_the_parent,
        )
        handed_over = _hand_over(iter(loader))
    if workers:
        _OPEN.add(handed_over)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # again, so that it runs before what torch registered just now
    return handed_over


def _hand_over(arriving: Iterator[Batch | VitkitError]) -> Generator[Batch, None, None]:
    try:
        for made in arriving:
            if isinstance(made, VitkitError):
                raise made
            yield made
    finally:
        del arriving  # ends its processes; a traceback would keep them alive with this frame


def _close_all() -> None:
    for handed_over in list(_OPEN):
        handed_over.close()


class _Careful(Dataset[Any]):
    """Hands an error of ours over as an item: a loader would turn it into text on the way."""

    def __init__(self, source: Dataset[Batch]) -> None:
        self.source = source

    def __getitem__(self, number: int) -> Batch | VitkitError:
        try:
            return self.source[number]
        except VitkitError as error:
            return error


def _batch(
    pixels: UInt8[np.ndarray, "B H W C"], split: Split, indices: Int64[np.ndarray, "B"], epoch: int
) -> Batch:
    labels = torch.from_numpy(split.labels[indices])
    return Batch(torch.from_numpy(pixels), labels, torch.from_numpy(indices.copy()), epoch)


def _leave_signals_to_the_parent(worker: int) -> None:
    """A signal may reach every process of a job; the parent finishes its step and ends us.

    Should it fail to, a worker outlives SIGTERM by a minute: a process that waits for it goes on.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.alarm(60))


def _as_it_is(batch: Any) -> Any:
    return batch


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Int64[np.ndarray, "N"]:
    return permutation(seed, epoch, count)
