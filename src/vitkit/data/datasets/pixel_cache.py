"""Decoded images on disk, so that each is decoded once for all runs.

A cache holds exactly the pixels that `Split.read` gives, uint8, one image after another in one
file: with a cache and without one, a run sees the same bytes. It belongs to
the content of the dataset (its fingerprint), the version of our decoder and Pillow's. An image
that cannot be decoded, or whose bytes in the cache are damaged, is read from its file again.

    DIR/<key>/pixels.bin    the pixels
    DIR/<key>/index.npz     each image's first byte, its height, width and channels, a checksum
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import shutil
import stat
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import PIL
from filelock import FileLock
from jaxtyping import Bool, Int, Int64, UInt8, UInt32, UInt64

from vitkit import errors, messages, process
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import Split
from vitkit.data.images.decode import ChooseFactor, Decoded
from vitkit.io.caches import FileCache, cache_folder, caching, file_keys, is_whole

DECODER = 1
"""Version of vitkit's decoder: increase it whenever `images.decode` gives different pixels."""
IMAGES_AT_ONCE = 256
"""Images that wait in memory to be written."""


def cached(
    dataset: Dataset,
    folder: str | os.PathLike[str] | None = None,
    *,
    workers: int = 0,
) -> Dataset:
    """Return the dataset with its images read from a pixel cache, which is built if missing.

    Call it on a dataset as it was opened: splits that are cut from it afterwards use the cache.

    Args:
        dataset: splits in memory stay as they are.
        folder: the folder of all caches; default `pixels` in the user's cache folder.
        workers: threads that decode; 0 means one for each core. Memory stays flat.

    Returns:
        The same dataset, its splits `CachedSplit`s, with a note; where the cache cannot be
        written, the dataset itself with a note that gives the reason.
    """
    stored = {name: split for name, split in dataset.splits.items() if not split.in_memory}
    if not stored:
        return _with_note(dataset, "cache: not needed, the images are in memory")
    base = cache_folder() / "pixels"
    if folder is not None:
        base = Path(os.path.expanduser(folder))
    path = base / _key(dataset)
    try:
        pixels = _open_or_build(path, stored, workers or process.available_cores())
    except OSError as error:
        why = f"{messages.escape(base)}: {error.strerror or error}"
        return _with_note(dataset, f"cache: cannot be used, the run continues without it ({why})")
    if pixels is None:
        return _with_note(
            dataset, f"cache: {messages.escape(path)} cannot be read back and is not used"
        )
    # The cache holds the images of all splits, one split after the other.
    splits = dict(dataset.splits)
    start = 0
    for name, split in stored.items():
        splits[name] = CachedSplit(split, pixels, np.arange(start, start + len(split)))
        start += len(split)
    note = f"cache: {len(pixels.starts):,} images, {pixels.size:,} bytes in {messages.escape(path)}"
    return _with_note(dataclasses.replace(dataset, splits=splits), note)


@dataclass(frozen=True, eq=False)
class PixelFile:
    """The images of a cache."""

    path: Path
    size: int
    """Bytes of the file."""
    starts: Int64[np.ndarray, " N"]
    """Each image's first byte (N,)."""
    shapes: Int64[np.ndarray, "N 3"]
    """Each image's height, width and channels (N, 3); 0 where it could not be decoded."""
    checksums: UInt32[np.ndarray, " N"]
    """The CRC-32 of each image's bytes (N,)."""

    def __getitem__(self, number: int) -> UInt8[np.ndarray, "H W C"] | None:
        """Return one image; None where it could not be decoded, or is damaged."""
        shape = tuple(self.shapes[number].tolist())
        if 0 in shape:
            return None
        # Opened for each image: it takes microseconds, and no file is shared between processes.
        start = int(self.starts[number])
        pixels = np.fromfile(self.path, np.uint8, math.prod(shape), offset=start)
        if zlib.crc32(pixels.data) != self.checksums[number]:
            return None
        return pixels.reshape(shape)


@dataclass(frozen=True, eq=False)
class CachedSplit(Split):
    """A split whose images are read from a cache; missing ones are read from their files."""

    split: Split
    pixels: PixelFile
    numbers: Int64[np.ndarray, " N"]
    """Each image's number in the cache."""
    labels: Int64[np.ndarray, " N"] = field(init=False)
    """Class numbers (N,) of the other split."""

    def __post_init__(self) -> None:
        # A frozen dataclass has no other way to set a field that follows from another.
        object.__setattr__(self, "labels", self.split.labels)

    def __len__(self) -> int:
        return len(self.split)

    def name(self, index: int) -> str:
        return self.split.name(index)

    def path(self, index: int) -> str:
        return self.split.path(index)

    def cache_keys(self) -> UInt64[np.ndarray, " N"]:
        return self.split.cache_keys()

    def original(self) -> Split:
        # The wrapped split may be a wrapper, too.
        return self.split.original()

    def folder(self) -> Path | None:
        return self.split.folder()

    def read(self, index: int) -> UInt8[np.ndarray, "H W C"]:
        image = self.pixels[int(self.numbers[index])]
        if image is None:
            return self.split.read(index)
        return image

    def decode(self, index: int, reduction: ChooseFactor | None = None) -> Decoded:
        # A run with a cache sees the bytes of one without: a smaller image is decoded again.
        image = self.pixels[int(self.numbers[index])]
        if image is None:
            return self.split.decode(index, reduction)
        size = (image.shape[0], image.shape[1])
        factor = reduction and reduction(size)
        if factor is not None and factor > 1:
            return self.split.decode(index, reduction)
        return Decoded(image, size, factor)

    def subset(self, indices: Int[np.ndarray, " M"]) -> CachedSplit:
        return CachedSplit(self.split.subset(indices), self.pixels, self.numbers[indices])

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> CachedSplit:
        return CachedSplit(self.split.relabelled(labels), self.pixels, self.numbers)


def _key(dataset: Dataset) -> str:
    """Return a hash of everything that the pixels depend on: images, their order, the decoder."""
    sizes = [(name, len(split)) for name, split in dataset.splits.items()]
    # Another version of Pillow may decode a JPEG to different pixels.
    text = f"{DECODER} {PIL.__version__} {dataset.fingerprint} {sizes}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _open_or_build(path: Path, splits: dict[str, Split], threads: int) -> PixelFile | None:
    pixels = _open(path)
    if pixels is not None:
        return pixels
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        pixels = _open(path)  # another run may have built it meanwhile
        if pixels is None:
            shutil.rmtree(path, ignore_errors=True)  # by a killed process
            with caching(path, unhashed=["pixels.bin"]) as unfinished:
                _write(unfinished, splits, threads)
            pixels = _open(path)
    return pixels


def _open(path: Path) -> PixelFile | None:
    """Open the cache in a folder; None where it is missing or not complete."""
    index = path / "index.npz"
    if not is_whole(index):
        return None
    with np.load(index) as stored:
        columns = [stored[name] for name in ("starts", "shapes", "checksums")]
    size = (path / "pixels.bin").stat().st_size
    if size < columns[1].prod(axis=1).sum():
        return None
    return PixelFile(path / "pixels.bin", size, *columns)


def _write(folder: Path, splits: dict[str, Split], threads: int) -> None:
    total = sum(map(len, splits.values()))
    shapes: list[tuple[int, ...]] = []
    checksums: list[int] = []
    with (
        (folder / "pixels.bin").open("wb") as file,
        ThreadPoolExecutor(threads) as pool,
        messages.progress_bar(total, "caching pixels") as advance,
    ):
        for split in splits.values():
            for start in range(0, len(split), IMAGES_AT_ONCE):
                block = range(start, min(start + IMAGES_AT_ONCE, len(split)))
                for image in pool.map(partial(_pixels, split), block):
                    shapes.append(image.shape)
                    content = np.ascontiguousarray(image).data
                    checksums.append(zlib.crc32(content))
                    file.write(content)
                advance(len(block))
    sides = np.array(shapes, np.int64).reshape(-1, 3)
    np.savez(
        folder / "index.npz",
        starts=np.concatenate([[0], np.cumsum(sides.prod(axis=1))])[:-1].astype(np.int64),
        shapes=sides,
        checksums=np.array(checksums, np.uint32),
    )


def _pixels(split: Split, index: int) -> UInt8[np.ndarray, "H W C"]:
    """Return the pixels of an image; none where it is unreadable."""
    try:
        return split.read(index)
    except errors.ImageError:
        return np.zeros((0, 0, 3), np.uint8)


def _with_note(dataset: Dataset, note: str) -> Dataset:
    return dataclasses.replace(dataset, notes=(*dataset.notes, note))


# SHA-256 of files; in large datasets the digests of unchanged files come from a cache.

DIGEST = np.dtype([("sha256", np.uint8, (32,))])
LEAST_CACHED = 1000
"""Fewer files are hashed again, without the cache, as that is fast."""
DIGEST_GROUP = 256
"""Files that a thread hashes at once; handing over one costs more than hashing it."""
HASHING_THREADS = 8
NO_CONTENT = hashlib.sha256().digest()
"""Digest of an unreadable file, which decoding reports; it is not cached."""


def file_digests(paths: Sequence[str]) -> UInt8[np.ndarray, "N 32"]:
    """Return the SHA-256 of every file, in order; many files are looked up in a cache first."""
    if len(paths) < LEAST_CACHED:
        return _digests(paths)
    # Two paths are enough to name the cache: the same dataset gives the same folder.
    folder = os.path.realpath(os.path.commonpath((paths[0], paths[-1])))
    cache = FileCache("digests", folder, DIGEST)
    rows, known = cache.get_many(file_keys(paths))
    known &= _has_content(rows["sha256"])
    new = np.flatnonzero(~known)
    groups = [new[start : start + DIGEST_GROUP] for start in range(0, len(new), DIGEST_GROUP)]

    def digest(group: Int64[np.ndarray, " M"]) -> None:
        rows["sha256"][group] = _digests([*map(paths.__getitem__, group)])

    with ThreadPoolExecutor(min(HASHING_THREADS, process.available_cores())) as pool:
        [*pool.map(digest, groups)]
    # `rows` and `known` are shared with the cache: what is marked as known is saved.
    known[:] = _has_content(rows["sha256"])
    cache.save()
    return np.asarray(rows["sha256"])


def _digests(paths: Sequence[str]) -> UInt8[np.ndarray, "M 32"]:
    return np.frombuffer(b"".join(map(_digest, paths)), np.uint8).reshape(-1, 32)


def _digest(path: str) -> bytes:
    try:
        # Opening a FIFO would wait for a writer.
        if not stat.S_ISREG(os.stat(path).st_mode):
            return NO_CONTENT
        with open(path, "rb") as handle:
            return hashlib.file_digest(handle, "sha256").digest()
    except (OSError, ValueError):  # `ValueError`: a path with a zero byte
        return NO_CONTENT


def _has_content(digests: UInt8[np.ndarray, "N 32"]) -> Bool[np.ndarray, " N"]:
    return np.asarray((digests != np.frombuffer(NO_CONTENT, np.uint8)).any(axis=1))
