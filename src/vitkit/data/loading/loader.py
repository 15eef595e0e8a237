"""Batches of images in an order that is a pure function of (seed, epoch).

A loader is asked for steps, not for epochs: step s of a run always holds the same images, changed
in the same way, with any number of worker processes and from whatever step the run goes on.
"""

from __future__ import annotations

import atexit
import copy
import signal
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitkit.data.augmentation.crop_flip import Augmentation, augment_batch, training_pixels
from vitkit.data.datasets.replacements import failures
from vitkit.data.images.preprocess import fit, normalise
from vitkit.data.loading import worker_watch
from vitkit.data.loading.sampler import EpochOrder, remote_store
from vitkit.data.loading.worker_watch import watched
from vitkit.data.sources.open import Split
from vitkit.errors import DataError, VitkitError
from vitkit.randomness import augmentation_key
from vitkit.spec import Preprocess


@dataclass(frozen=True)
class Batch:
    """One batch, still as pixels.

    Attributes:
        pixels: (B, H, W, C) uint8.
        labels: class numbers (B,).
        indices: the images' places in the split (B,).
        epoch: whose draws changed the images, counted from 0: the epoch, or its number in
            the cycle where the draws come again; -1 in evaluation.
        views: which of its repetitions in that epoch each image is (B,), counted from 0.
        failed: images that could not be read and have others in their places, a line each.
    """

    pixels: UInt8[Tensor, "B H W C"]
    labels: Int64[Tensor, "B"]
    indices: Int64[Tensor, "B"]
    epoch: int
    views: Int64[Tensor, "B"]
    failed: tuple[str, ...] = ()

    def images(self, preprocess: Preprocess, device: torch.device) -> Float[Tensor, "B C H W"]:
        """The normalised images, on `device`: bytes travel, floats are made there."""
        return normalise(self.pixels.to(device, non_blocking=True), preprocess)

    def first(self, count: int) -> Batch:
        """The first images alone."""
        return self._of([whole[:count] for whole in self._tensors()])

    def parts(self, count: int) -> Iterator[Batch]:
        """The batch in `count` parts of one size; part n takes the places n, n + count ...

        So the views of one image, which are neighbours, go to different parts, and what is mixed
        with an image is another one.
        """
        return (self._of([whole[n::count] for whole in self._tensors()]) for n in range(count))

    def _tensors(self) -> tuple[Tensor, ...]:
        return self.pixels, self.labels, self.indices, self.views

    def _of(self, tensors: Sequence[Tensor]) -> Batch:
        pixels, labels, indices, views = tensors
        return Batch(pixels, labels, indices, self.epoch, views)


class BatchSource(Dataset[Batch]):
    """Batches by number, of the images of one split."""

    split: Split

    def contents(self, number: int) -> str:
        """What to call a batch in a message."""
        return f"batch {number}"

    def _named(self, indices: Sequence[int] | Int64[np.ndarray, " B"]) -> str:
        return ", ".join(self.split.name(int(index)) for index in indices[:3])


class TrainingSteps(BatchSource):
    """The whole run as a list of steps: item s is the batch of step s, counted from 0.

    The images of an epoch that do not fill a batch wait for another epoch's order. Of several
    processes, process r takes the places r, r + n, r + 2n ... of every batch, so that all of them
    together hold the same images whatever n is.

    Attributes:
        cycle: with V > 0, every image has V variants and no more: epoch e has the draws of epoch
            e mod V. The order is that of the epoch all the same.
        sizes: side of the images of each epoch, in pixels; the last one is that of later epochs,
            too. Without any, all are of the size that `preprocess` names.
        repeats: how often in a row an epoch has an image, each time in another view: DeiT's
            repeated augmentation (arXiv 1901.09335). An epoch has as many steps as ever, so it
            ends before all images have come.

    Raises:
        DataError: fewer images than one batch.
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
        cycle: int = 0,
        balance: bool = False,
        sizes: Sequence[int] = (),
        repeats: int = 1,
    ) -> None:
        if len(split) < batch_size:
            raise DataError(
                f"{len(split)} training images do not fill one batch of {batch_size}; "
                f"pass --batch-size {len(split)} or less"
            )
        self.split, self.preprocess, self.augmentation = split, preprocess, augmentation
        self.batch_size, self.seed, self.cycle = batch_size, seed, cycle
        self.rank, self.world_size = rank, world_size
        self.steps_per_epoch = len(split) // batch_size
        self.sizes, self.repeats = tuple(sizes), repeats
        self._order = EpochOrder(split, seed, balance=balance)

    def with_batch_size(self, batch_size: int) -> TrainingSteps:
        """The same in batches of another size."""
        other = copy.copy(self)
        other.batch_size = batch_size
        other.steps_per_epoch = len(self.split) // batch_size
        return other

    def indices(self, step: int) -> Int64[np.ndarray, "B"]:
        """Which images step `step` holds, over all processes."""
        return self._order(step // self.steps_per_epoch)[self._places(step) // self.repeats]

    def contents(self, number: int) -> str:
        """The step, and the first images of this process."""
        mine = self.indices(number)[self.rank :: self.world_size]
        return f"the batch of step {number} ({self._named(mine)} ...)"

    def _places(self, step: int) -> Int64[np.ndarray, "B"]:
        """Of the batch in its epoch, where every repetition has a place."""
        return step % self.steps_per_epoch * self.batch_size + np.arange(self.batch_size)

    def __getitem__(self, step: int) -> Batch:
        epoch, places = step // self.steps_per_epoch, self._places(step)
        mine = slice(self.rank, None, self.world_size)
        views = places % self.repeats
        if not self.cycle:
            views += self.repeats * self._order.turns(epoch)[places // self.repeats]
        batch = self.variants(self.indices(step)[mine], epoch, views[mine])
        self._order.fetch_ahead(epoch, int(places[-1]) // self.repeats)
        return batch

    def variants(
        self,
        indices: Int64[np.ndarray, "B"],
        epoch: int,
        views: Int64[np.ndarray, "B"] | None = None,
    ) -> Batch:
        """The images at `indices` of the split, as they are in an epoch; in its first view."""
        preprocess = self.preprocess
        if self.sizes:
            size = self.sizes[min(epoch, len(self.sizes) - 1)]
            preprocess = preprocess.replace(image_size=size)
        epoch = epoch % self.cycle if self.cycle else epoch
        views = np.zeros_like(indices) if views is None else views
        occasions = augmentation_key(epoch, views)
        made = []
        for index, same in groupby(zip(indices, occasions, strict=True), key=itemgetter(0)):
            image = self.split.read(int(index))
            made += [
                training_pixels(
                    image, preprocess, self.augmentation, self.seed, int(when), int(index)
                )
                for _, when in same
            ]
        pixels = augment_batch(np.stack(made), self.augmentation, self.seed, occasions, indices)
        return _batch(pixels, self.split, indices, epoch, views)


def sizes_of_epochs(sizes: Sequence[int], epochs: int) -> tuple[int, ...]:
    """One image size for every epoch: each of `sizes` for an equal part of them, in order.

    >>> sizes_of_epochs((128, 160, 192), 7)
    (128, 128, 128, 160, 160, 192, 192)
    """
    return tuple(sizes[epoch * len(sizes) // epochs] for epoch in range(epochs) if sizes)


class EvaluationBatches(BatchSource):
    """A split in its own order, every image once, by the evaluation transform.

    Process r of n has the images r, r + n, r + 2n ...; the last ones may have one less, or none.
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

    def contents(self, number: int) -> str:
        """The number, and the first images."""
        return f"batch {number} ({self._named(self._of(number))} ...)"

    def _of(self, number: int) -> Sequence[int]:
        return self._mine[number * self.batch_size : (number + 1) * self.batch_size]

    def __getitem__(self, number: int) -> Batch:
        indices = np.array(self._of(number))
        pixels = np.stack([fit(self.split.read(int(i)), self.preprocess) for i in indices])
        return _batch(pixels, self.split, indices, epoch=-1, views=np.zeros_like(indices))


_OPEN: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()
"""Batches that worker processes are still making; closed when the interpreter exits."""


def batches(
    source: BatchSource,
    numbers: range,
    *,
    workers: int = 0,
    stopped: Callable[[], bool] = lambda: False,
) -> Generator[Batch, None, None]:
    """The batches `numbers` of a source, in that order, made by `workers` processes (0: here).

    The processes end with the generator: when it is used up, closed or dropped, when it raises,
    and at the latest when the interpreter exits.

    Args:
        source: of the batches.
        numbers: which of them.
        workers: processes.
        stopped: asked every second while a batch of the processes is waited for; where it is true,
            nobody wants the batch any more.

    Raises:
        ImageError: an image that can no longer be read, by name, from whichever process met it.
        LoaderError: a process was killed or hangs, or `stopped`; see `watching.watched`.
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
            timeout=worker_watch.LOOK_EVERY if workers else 0.0,
        )
        arriving: Iterator[Batch | VitkitError] = iter(loader)
    if workers:
        arriving = watched(
            arriving,
            contents=lambda number: source.contents(numbers[number]),
            remote=remote_store(source.split) is not None,
            stopped=stopped,
        )
    handed_over = _hand_over(arriving)
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

    def __init__(self, source: BatchSource) -> None:
        self.source = source

    def __getitem__(self, number: int) -> Batch | VitkitError:
        try:
            return self.source[number]
        except VitkitError as error:
            return error


def _batch(
    pixels: UInt8[np.ndarray, "B H W C"],
    split: Split,
    indices: Int64[np.ndarray, "B"],
    epoch: int,
    views: Int64[np.ndarray, "B"],
) -> Batch:
    labels = torch.from_numpy(split.labels[indices])
    places = torch.from_numpy(indices.copy())
    drawn = torch.from_numpy(views.copy())
    return Batch(torch.from_numpy(pixels), labels, places, epoch, drawn, failures(split))


def _leave_signals_to_the_parent(worker: int) -> None:
    """A signal may reach every process of a job; the parent finishes its step and ends us.

    Should it fail to, a worker outlives SIGTERM by a minute: a process that waits for it goes on.
    """
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.alarm(60))


def _as_it_is(batch: Any) -> Any:
    return batch
