"""Batches of images in an order that is a pure function of (seed, epoch).

A loader is indexed by steps, not by epochs: step s of a run always holds the same images, changed
in the same way, with any number of worker processes and after any resume.
"""

from __future__ import annotations

import atexit
import signal
import warnings
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pickle import PicklingError
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from vitkit import errors, randomness, spec
from vitkit.data.datasets.split import Split
from vitkit.data.images.decode import Decoded
from vitkit.data.images.preprocess import fit, normalise
from vitkit.data.loading.crop_flip import Augmentation
from vitkit.process import check_processes

# `Batch`: the pixels, labels and places of some images; the order of the images of an epoch.


@dataclass(frozen=True)
class Batch:
    """One batch, still as pixels.

    Attributes:
        pixels: (B, H, W, C) uint8 [0, 255].
        labels: class numbers (B,).
        indices: the images' indices in the split (B,).
        epoch: the epoch whose random numbers changed the images, counted from 0; -1 in evaluation.
        views: the number of each image's repetition in that epoch (B,), counted from 0.
    """

    pixels: UInt8[Tensor, "B H W C"]
    labels: Int64[Tensor, "B"]
    indices: Int64[Tensor, "B"]
    epoch: int
    views: Int64[Tensor, "B"]

    def images(self, preprocess: spec.Preprocess, device: torch.device) -> Float[Tensor, "B C H W"]:
        """Return the normalised images on `device`; uint8 is transferred and converted there.

        Args:
            preprocess: channels C, mean and std.
            device: where the images are wanted.

        Returns:
            (B, C, H, W) float32.

        Raises:
            ShapeError: pixels of another number of channels.
        """
        return normalise(self.pixels.to(device, non_blocking=True), preprocess)

    def first(self, count: int) -> Batch:
        """Return a batch of the first images alone."""
        return self._select(slice(count))

    def parts(self, count: int) -> Iterator[Batch]:
        """Split the batch into `count` parts of one size; part n takes the rows n, n + count ...

        `count` must divide the number of images. The views of one image, which are neighbours, go
        to different parts, and an image is mixed with another one.
        """
        return (self._select(slice(number, None, count)) for number in range(count))

    def _select(self, rows: slice) -> Batch:
        return Batch(
            self.pixels[rows], self.labels[rows], self.indices[rows], self.epoch, self.views[rows]
        )


PixelTransform = Callable[[UInt8[np.ndarray, "H W C"], int, int, str], UInt8[np.ndarray, "h w c"]]
"""A function of an image's pixels, its epoch and view in one key, its index and its name."""


# The order in which the images of a split are trained on: a pure function of (seed, epoch).


def steps_of_epoch(images: int, batch_size: int, *, fill: bool = False) -> int:
    """Return the optimizer steps of an epoch.

    Args:
        images: images of the epoch.
        batch_size: images of a step.
        fill: images that do not fill a batch make one more, with others of the epoch.
    """
    if fill:
        return -(-images // batch_size)
    return images // batch_size


def sizes_of_epochs(sizes: Sequence[int], epochs: int) -> tuple[int, ...]:
    """Return one image size for every epoch: each of `sizes` for an equal part of them, in order.

    Args:
        sizes: sides in pixels; none where all epochs have the usual size.
        epochs: their number.

    >>> sizes_of_epochs((128, 160, 192), 7)
    (128, 128, 128, 160, 160, 192, 192)
    """
    if not sizes:
        return ()
    return tuple(sizes[epoch * len(sizes) // epochs] for epoch in range(epochs))


class EpochOrder:
    """One permutation of all images.

    The order is that of the split, whether or not its pixels are read from a cache. With `balance`
    every class comes as often as any other, and images of the rare ones several times.
    """

    def __init__(self, split: Split, seed: int, *, balance: bool = False) -> None:
        self._split = split
        self._seed = seed
        self._labels = split.labels if balance else None

    @lru_cache(maxsize=2)  # noqa: B019 - there is one order a run
    def __call__(self, epoch: int) -> Int64[np.ndarray, " N"]:
        """Return N indices of images in the split, in the order of this epoch."""
        if self._labels is not None:
            return balanced_order(self._seed, epoch, self._labels)
        return randomness.permutation(self._seed, epoch, len(self._split))

    @lru_cache(maxsize=2)  # noqa: B019 - likewise
    def repeat_index(self, epoch: int) -> Int64[np.ndarray, " N"]:
        """Return how often each image of the order has come before in this epoch (N,)."""
        order = self(epoch)
        if self._labels is None:
            return np.zeros_like(order)
        # Sorted by image, the repetitions of one image are a run of equal numbers.
        by_image = np.argsort(order, kind="stable")
        starts = np.flatnonzero(np.diff(order[by_image], prepend=-1))
        lengths = np.diff(starts, append=len(order))
        repeats = np.empty_like(order)
        repeats[by_image] = np.arange(len(order)) - np.repeat(starts, lengths)
        return repeats


def balanced_order(
    seed: int, epoch: int, labels: Int64[np.ndarray, " N"]
) -> Int64[np.ndarray, " N"]:
    """Return N indices in which every class that has images comes equally often, give or take one.

    The images of a rare class come again and again, each as often as any other of it, or once
    more; of a frequent class there are others in every epoch. The classes that come once more
    change from epoch to epoch, too.
    """
    # Images grouped by class, shuffled inside of each: a class draws its quota from its group.
    shuffled = randomness.permutation(seed, epoch, len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    _, starts, counts = np.unique(labels[by_class], return_index=True, return_counts=True)
    share, rest = divmod(len(labels), len(counts))
    # The remainder goes to different classes in every epoch.
    quotas = share + ((np.arange(len(counts)) + epoch) % len(counts) < rest)
    position = np.arange(len(labels)) - np.repeat(np.cumsum(quotas) - quotas, quotas)
    # A quota larger than the class starts again with its first image.
    drawn = by_class[np.repeat(starts, quotas) + position % np.repeat(counts, quotas)]
    return drawn[
        np.argsort(
            randomness.hash64(seed, epoch, randomness.Draw.BALANCED_ORDER, np.arange(len(labels))),
            kind="stable",
        )
    ]


def class_counts(labels: Int64[np.ndarray, " N"], classes: Sequence[str]) -> str:
    """Return a line on how uneven the classes are, and how often a balanced epoch draws each.

    Args:
        labels: class numbers (N,).
        classes: the class names.
    """
    counts = np.bincount(labels, minlength=len(classes))
    present = np.flatnonzero(counts)
    fewest = present[counts[present].argmin()]
    most = present[counts[present].argmax()]
    share = len(labels) / len(present)
    return (
        f"balance: {counts[fewest]:,} ({classes[fewest]}) to {counts[most]:,} ({classes[most]}) "
        f"images per class; each class is drawn {share:,.0f} times per epoch, and an image of "
        f"{classes[fewest]} {share / counts[fewest]:.1f} times"
    )


SECONDS_AFTER_SIGTERM = 60
"""Seconds after which a worker process exits although its parent has not stopped it."""


class BatchSource(TorchDataset[Batch]):
    """Batches by number, of the images of one split."""

    split: Split


class TrainingSteps(BatchSource):
    """The whole run as a list of steps: item s is the batch of step s, counted from 0.

    The images of an epoch that do not fill a batch wait for another epoch's order; with `fill`
    they are in a batch with the first images of the epoch, in another view. Of n processes,
    process r takes the rows r, r + n, r + 2n ... of every batch, so that all of them together hold
    the same images whatever n is.

    Attributes:
        augmentation: augmentation of the pixels, an `Augmentation`.
        sizes: side of the images of each epoch, in pixels; the last one is that of later epochs,
            too. Without any, all are of the size of `preprocess`.
        transform: changes the decoded pixels of an image, (pixels, epoch and view, index, name) ->
            pixels; a user's own.
        repeats: how often in a row an epoch has an image, each time in another view: DeiT's
            repeated augmentation (arXiv 1901.09335). An epoch has as many steps as without, so it
            ends before all images have come.
        fill: no image is left out of an epoch.

    Raises:
        DataError: fewer images than one batch.
    """

    def __init__(
        self,
        split: Split,
        preprocess: spec.Preprocess,
        augmentation: Augmentation,
        *,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        balance: bool = False,
        sizes: Sequence[int] = (),
        repeats: int = 1,
        fill: bool = False,
        transform: PixelTransform | None = None,
    ) -> None:
        if len(split) < batch_size:
            raise errors.DataError(
                f"{len(split)} training images do not fill one batch of {batch_size}; pass "
                f"--batch-size {len(split)} or less"
            )
        self.split = split
        self.preprocess = preprocess
        self.augmentation = augmentation
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.sizes = tuple(sizes)
        self.repeats = repeats
        self.fill = fill
        self.transform = transform
        self.steps_per_epoch = steps_of_epoch(len(split), batch_size, fill=fill)
        self._order = EpochOrder(split, seed, balance=balance)

    def indices(self, step: int) -> Int64[np.ndarray, "B"]:
        """Return the indices of the images of a step, over all processes."""
        order = self._order(step // self.steps_per_epoch)
        # after its end, the order starts again
        return order[self._positions(step) // self.repeats % len(order)]

    def _positions(self, step: int) -> Int64[np.ndarray, "B"]:
        """Return the batch's positions in its epoch, where every repetition has a position."""
        return step % self.steps_per_epoch * self.batch_size + np.arange(self.batch_size)

    def __getitem__(self, step: int) -> Batch:
        epoch = step // self.steps_per_epoch
        positions = self._positions(step)
        mine = slice(self.rank, None, self.world_size)
        views = positions % self.repeats
        rounds, rows = np.divmod(positions // self.repeats, len(self.split))
        earlier = self._order.repeat_index(epoch)
        views += self.repeats * earlier[rows]
        if rounds.any():  # images repeated to fill the last batch have a separate view
            views += rounds * self.repeats * (earlier.max() + 1)
        return self.variants(self.indices(step)[mine], epoch, views[mine])

    def variants(
        self,
        indices: Int64[np.ndarray, "B"],
        epoch: int,
        views: Int64[np.ndarray, "B"] | None = None,
    ) -> Batch:
        """Return some images of the split as they are in an epoch.

        Args:
            indices: indices of the images (B,).
            epoch: counted from 0.
            views: the number of each image's repetition (B,); the first one where absent.
        """
        preprocess = self.preprocess
        if self.sizes:
            size = self.sizes[min(epoch, len(self.sizes) - 1)]
            preprocess = preprocess.replace(image_size=size)
        if views is None:
            views = np.zeros_like(indices)
        keys = randomness.augmentation_key(epoch, views)
        pixels = np.empty((len(indices), *preprocess.image_size, preprocess.channels), np.uint8)
        # The views of one image are neighbours: it is decoded once for all of them.
        for index, rows in groupby(range(len(indices)), key=indices.tolist().__getitem__):
            image = None
            for row in rows:
                key = int(keys[row])
                image = self.read(index, key, preprocess, image)
                changed, full_size = image.pixels, image.size
                if self.transform is not None:
                    changed = self.transform(changed, key, index, self.split.name(index))
                    full_size = (changed.shape[0], changed.shape[1])
                pixels[row] = self.augmentation.resize(
                    changed, preprocess, self.seed, key, index, full_size
                )
        pixels = self.augmentation.flip_and_shift(pixels, self.seed, keys, indices)
        return _batch(pixels, self.split, indices, epoch, views)

    def read(
        self, index: int, key: int, preprocess: spec.Preprocess, earlier: Decoded | None = None
    ) -> Decoded:
        """Return an image as it is before its augmentation, a JPEG perhaps decoded smaller.

        Args:
            index: the image's index in the split.
            key: epoch and view in one, `randomness.augmentation_key`.
            preprocess: size of the view.
            earlier: the image as another view had it; taken again where it has the same pixels.

        Raises:
            ImageError: it cannot be read or decoded.
        """
        if self.transform is not None:  # it expects whole images
            return earlier or self.split.decode(index)

        def reduction(size: tuple[int, int]) -> int:
            return self.augmentation.reduction(size, preprocess, self.seed, key, index)

        if earlier and (earlier.factor is None or earlier.factor == reduction(earlier.size)):
            return earlier
        return self.split.decode(index, reduction)


class EvaluationBatches(BatchSource):
    """A split in its own order, every image once, by the evaluation transform.

    Process r of n has the images r, r + n, r + 2n ...; the last ones may have one less, or none.
    """

    def __init__(
        self,
        split: Split,
        preprocess: spec.Preprocess,
        *,
        batch_size: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self.split = split
        self.preprocess = preprocess
        self.batch_size = batch_size
        self._mine = range(rank, len(split), world_size)

    def __len__(self) -> int:
        return (len(self._mine) + self.batch_size - 1) // self.batch_size

    def __getitem__(self, number: int) -> Batch:
        indices = np.array(self._mine[number * self.batch_size : (number + 1) * self.batch_size])
        pixels = np.stack([fit(self.split.read(int(i)), self.preprocess) for i in indices])
        return _batch(pixels, self.split, indices, epoch=-1, views=np.zeros_like(indices))


EXIT_GRACE = 1.0
"""Seconds to wait for the end of a loader process that has closed its connection."""
_OPEN: weakref.WeakSet[Generator[Batch, None, None]] = weakref.WeakSet()
"""Generators whose worker processes are still running; closed when the interpreter exits."""


def batches(
    source: BatchSource, numbers: range, *, workers: int = 0
) -> Generator[Batch, None, None]:
    """Generate the batches `numbers` of a source, in that order.

    The worker processes end with the generator: when it is used up, closed or dropped, when it
    raises, and at the latest when the interpreter exits.

    Args:
        source: source of the batches.
        numbers: numbers of the batches to make.
        workers: processes that make them; 0: this process.

    Raises:
        ImageError: an image that can no longer be read, by name, from whichever process met it.
        LoaderError: a process is gone.
        SettingError: more workers than 16 for each core.
    """
    check_processes("workers", workers)
    with warnings.catch_warnings():
        # More workers than cores are the caller's choice; the training plan notes it in one line.
        warnings.filterwarnings("ignore", message="This DataLoader will create|Got pickle error")
        loader = DataLoader(
            _ErrorsAsItems(source),
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            generator=torch.Generator(),  # else the loader would draw its seed from the global one
            collate_fn=_unchanged,
            worker_init_fn=_leave_signals_to_the_parent,
        )
        try:
            arriving = iter(loader)
        except (AttributeError, TypeError, PicklingError) as error:
            # where processes are spawned, not forked, they get a copy of the dataset
            raise errors.DataError(
                f"the dataset cannot be sent to loader processes: {error}; define everything in it "
                "at the top level of a module, or pass --workers 0"
            ) from error
    generator = _hand_over(arriving, numbers)
    if workers:
        _OPEN.add(generator)
        atexit.unregister(_close_all)
        atexit.register(_close_all)  # again, so that it runs before what torch registered just now
    return generator


def _hand_over(arriving: Any, numbers: range) -> Generator[Batch, None, None]:
    """Yield the batches; raise the error of an image, or of a loader process that is gone."""
    processes: Sequence[BaseProcess] = getattr(arriving, "_workers", ())
    if processes:
        # torch would raise from a signal handler when one of its processes ends: that could be in
        # the middle of an optimizer step. Both lines undo what its constructor did.
        torch._C._remove_worker_pids(id(arriving))
        arriving._worker_pids_set = False
    try:
        for number in numbers:
            try:
                item = next(arriving)
            except (RuntimeError, OSError, EOFError) as error:
                # its files are closed a moment before its exit code is known
                ready = wait([one.sentinel for one in processes], EXIT_GRACE) if processes else []
                ended = [process for process in processes if process.sentinel in ready]
                if not ended:
                    raise
                ended[0].join()
                raise errors.LoaderError(
                    f"loader process {ended[0].pid} ended with exit code {ended[0].exitcode}; if "
                    f"memory ran out, pass fewer --workers; the run waited for batch {number}"
                ) from error
            if isinstance(item, errors.VitkitError):
                raise item
            yield item
    finally:
        del arriving  # ends its processes; a traceback would keep them alive with this frame


def _close_all() -> None:
    for generator in list(_OPEN):  # a copy, since closing removes from the set
        generator.close()


class _ErrorsAsItems(TorchDataset[Any]):
    """A source that returns errors as items, since torch would turn them into text."""

    def __init__(self, source: BatchSource) -> None:
        self.source = source

    def __getitem__(self, number: int) -> Batch | errors.VitkitError:
        try:
            return self.source[number]
        except errors.VitkitError as error:
            return error


def _batch(
    pixels: UInt8[np.ndarray, "B H W C"],
    split: Split,
    indices: Int64[np.ndarray, "B"],
    epoch: int,
    views: Int64[np.ndarray, "B"],
) -> Batch:
    return Batch(
        torch.from_numpy(pixels),
        torch.from_numpy(split.labels[indices]),
        torch.from_numpy(indices.copy()),  # may be a view of the whole order, which is cached
        epoch,
        torch.from_numpy(views.copy()),
    )


def _leave_signals_to_the_parent(worker: int) -> None:
    """Ignore signals in a worker process: they may reach every process of a job.

    The parent finishes its step and ends the workers. If it has not done so 60 s after SIGTERM,
    the worker exits.
    """
    for name in ("SIGINT", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.alarm(SECONDS_AFTER_SIGTERM))


def _unchanged(batch: Any) -> Any:
    return batch
