"""Decoded images on disk, so that each is decoded once for all runs.

A cache holds the very pixels that `Split.read` gives, whole, uint8, one after the other in one file
that is mapped into memory: with a cache and without one, a run sees the same bytes. It belongs to
the content of the data set (its fingerprint), the version of our decoder and Pillow's. An image
that cannot be decoded has no pixels in it and is asked for again.

    DIR/<key>/pixels.bin    the pixels
    DIR/<key>/index.npz     each image's first byte, its height, width and channels, and what of
                            its file did not come through as it was stored
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL
from filelock import FileLock
from jaxtyping import Int, Int64, UInt8, UInt16

from vitkit.data.datasets.dataset import (
    ArraySplit,
    Dataset,
    FileSplit,
    Split,
    SplitOver,
    StoredSplit,
)
from vitkit.data.images.decode import ODDITIES, FileProperty, escape, examine
from vitkit.errors import ImageError
from vitkit.io.cache_folder import cache_folder
from vitkit.io.index_cache import DAMAGE

DECODER = 1
"""To be raised whenever `images.decode` gives other pixels than before."""
BLOCK = 256
"""Images that wait in memory to be written."""
HEADROOM = 64 << 20
"""Bytes of the disk that a cache leaves free."""

Progress = Callable[[int, int, int], None]
"""Called with images done, images in all, bytes written."""


def cached(
    dataset: Dataset,
    folder: str | os.PathLike[str] | None = None,
    *,
    workers: int = 0,
    progress: Progress | None = None,
) -> Dataset:
    """The data set with its images read from a cache, which is made if it is not there.

    To be called on a data set as it was opened: what is cut and skipped afterwards uses the cache.

    Args:
        dataset: splits in memory stay as they are.
        folder: where caches lie; default `pixels` in the user's cache folder.
        workers: threads that decode; 0 means one for each core. Memory stays flat.
        progress: told after every block of images.

    Returns:
        The same data set, its splits `CachedSplit`s, with a note; where the cache cannot be
        written, the data set itself with a note that says why.
    """
    stored = {name: s for name, s in dataset.splits.items() if not isinstance(s, ArraySplit)}
    if not stored:
        return _noted(dataset, "cache: the images are in memory already, none is needed")
    base = cache_folder() / "pixels" if folder is None else Path(os.path.expanduser(folder))
    place = base / _key(dataset)
    try:
        pixels = _open(place)
        if pixels is None:
            base.mkdir(parents=True, exist_ok=True)
            with FileLock(place.with_suffix(".lock")):
                pixels = _open(place)  # another run may have made it meanwhile
                if pixels is None:
                    _make(place, stored, workers or os.cpu_count() or 1, progress)
                    pixels = _open(place)
    except OSError as error:
        why = f"{escape(base)}: {error.strerror or error}"
        return _noted(dataset, f"cache: cannot be used, the run goes on without it ({why})")
    if pixels is None:
        return _noted(dataset, f"cache: {escape(place)} cannot be read back, not used")
    starts = np.cumsum([0, *(len(split) for split in stored.values())])
    splits: dict[str, Split] = {
        name: CachedSplit(split, pixels, np.arange(start, start + len(split)))
        for (name, split), start in zip(stored.items(), starts[:-1].tolist(), strict=True)
    }
    note = f"cache: {len(pixels.starts):,} images, {pixels.size:,} bytes in {escape(place)}"
    return _noted(dataclasses.replace(dataset, splits=dataset.splits | splits), note)


@dataclass(frozen=True, eq=False)
class Pixels:
    """The images of a cache; the file is mapped once in every process."""

    path: Path
    size: int
    """Bytes of the file."""
    starts: Int64[np.ndarray, " N"]
    """Each image's first byte (N,)."""
    shapes: Int64[np.ndarray, "N 3"]
    """Each image's height, width and channels (N, 3); 0 where it could not be decoded."""
    properties: UInt16[np.ndarray, " N"]
    """Bits (N,): which of `ODDITIES` each image's file has, the first one lowest."""
    _mapped: list[mmap.mmap] = field(default_factory=list, repr=False)

    def __getitem__(self, number: int) -> UInt8[np.ndarray, "H W C"] | None:
        """One image, read-only; None where it could not be decoded."""
        shape = tuple(self.shapes[number].tolist())
        if 0 in shape:
            return None
        if not self._mapped:
            with self.path.open("rb") as file:
                self._mapped.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        count, start = shape[0] * shape[1] * shape[2], int(self.starts[number])
        return np.frombuffer(self._mapped[0], np.uint8, count, start).reshape(shape)

    def __reduce__(self) -> tuple[object, ...]:
        return (Pixels, (self.path, self.size, self.starts, self.shapes, self.properties))


@dataclass(frozen=True, eq=False)
class CachedSplit(SplitOver):
    """Another split, its images read from a cache; what is not in it is read as ever."""

    pixels: Pixels
    numbers: Int64[np.ndarray, " N"]
    """Each image's number in the cache."""

    def read(self, index: int) -> UInt8[np.ndarray, "H W C"]:
        found = self.pixels[int(self.numbers[index])]
        return self.split.read(index) if found is None else found

    def decode_with_properties(
        self, index: int
    ) -> tuple[UInt8[np.ndarray, "H W C"], Iterable[FileProperty]]:
        """What `decode_with_properties` says of the split this is a cache of."""
        number = int(self.numbers[index])
        if (found := self.pixels[number]) is None:
            return decode_with_properties(self.split, index)
        bits = int(self.pixels.properties[number])
        return found, [oddity for place, oddity in enumerate(ODDITIES) if bits >> place & 1]

    def subset(self, indices: Int[np.ndarray, " M"]) -> CachedSplit:
        return CachedSplit(self.split.subset(indices), self.pixels, self.numbers[indices])

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> CachedSplit:
        return CachedSplit(self.split.relabelled(labels), self.pixels, self.numbers)


def decode_with_properties(
    split: Split, index: int, admit: Callable[[int], object] = lambda pixels: None
) -> tuple[UInt8[np.ndarray, "H W C"], Iterable[FileProperty]]:
    """An image's pixels, and what had to be done to its file's for them; raises `ImageError`.

    Nothing is known of the files that the images in memory come from. `admit` is told how many
    pixels there are before a file is decoded, and may wait.
    """
    if isinstance(split, CachedSplit):
        return split.decode_with_properties(index)
    if isinstance(split, FileSplit):
        return examine(split.paths[index], admit=admit)
    if isinstance(split, StoredSplit):
        return examine(split.store.encoded(int(split.numbers[index])), admit=admit)
    return split.read(index), ()


def show_progress(done: int, total: int, size: int) -> None:
    """A line on the terminal that is written over and over; nothing where stderr is none."""
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        sys.stderr.write(f"\rcache: {done:,} of {total:,} images, {size / 1e9:.2f} GB{end}")
        sys.stderr.flush()


def _key(dataset: Dataset) -> str:
    """What the pixels depend on: which images in which order, and who decodes them."""
    sizes = [(name, len(split)) for name, split in dataset.splits.items()]
    said = f"{DECODER} {PIL.__version__} {dataset.fingerprint} {sizes}"
    return hashlib.sha256(said.encode()).hexdigest()[:32]


def _open(place: Path) -> Pixels | None:
    """The cache at a place, if it is whole."""
    try:
        with (place / "index.npz").open("rb") as file, np.load(file) as stored:
            starts, shapes, properties = (stored[name] for name in ("starts", "shapes", "oddities"))
        size = (place / "pixels.bin").stat().st_size
    except DAMAGE:
        return None
    whole = size == max(int(shapes.prod(axis=1).sum()), 1)
    return Pixels(place / "pixels.bin", size, starts, shapes, properties) if whole else None


def _make(place: Path, splits: dict[str, Split], threads: int, progress: Progress | None) -> None:
    """Decode every image into a folder of another name, which takes its own when it is whole."""
    making = place.with_suffix(".making")
    shutil.rmtree(making, ignore_errors=True)  # of a run that was killed: the lock is ours
    shutil.rmtree(place, ignore_errors=True)
    try:
        making.mkdir()
        _write(making, splits, threads, progress)
        os.replace(making, place)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _write(folder: Path, splits: dict[str, Split], threads: int, progress: Progress | None) -> None:
    total, shapes, properties = sum(map(len, splits.values())), [], []
    with (folder / "pixels.bin").open("wb") as file, ThreadPoolExecutor(threads) as pool:
        for block in _blocks(splits):
            for image, bits in pool.map(_decoded, block):
                shapes.append(image.shape)
                properties.append(bits)
                file.write(np.ascontiguousarray(image).data)
            if progress is not None:
                progress(len(shapes), total, file.tell())
            if shutil.disk_usage(folder).free < HEADROOM:
                raise OSError(
                    f"{HEADROOM >> 20} MiB are left on the disk after {len(shapes):,} of {total:,} "
                    f"images"
                )
        if file.tell() == 0:
            file.write(b"\0")  # nothing cannot be mapped
        file.flush()
        os.fsync(file.fileno())
    sides = np.array(shapes, np.int64).reshape(-1, 3)
    starts = np.concatenate([[0], np.cumsum(sides.prod(axis=1))])[:-1].astype(np.int64)
    with (folder / "index.npz").open("wb") as file:
        np.savez(file, starts=starts, shapes=sides, properties=np.array(properties, np.uint16))
        file.flush()
        os.fsync(file.fileno())


def _blocks(splits: dict[str, Split]) -> Iterator[list[tuple[Split, int]]]:
    for split in splits.values():
        for start in range(0, len(split), BLOCK):
            yield [(split, i) for i in range(start, min(start + BLOCK, len(split)))]


def _decoded(which: tuple[Split, int]) -> tuple[UInt8[np.ndarray, "H W C"], int]:
    """Pixels and the bits of their oddities; no pixels where there are none to be had."""
    try:
        image, found = decode_with_properties(*which)
    except ImageError:
        return np.zeros((0, 0, 3), np.uint8), 0
    return image, sum(1 << ODDITIES.index(oddity) for oddity in found)


def _noted(dataset: Dataset, note: str) -> Dataset:
    return dataclasses.replace(dataset, notes=(*dataset.notes, note))
