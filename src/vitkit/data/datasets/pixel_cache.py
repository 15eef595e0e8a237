"""Decoded images on disk, so that each is decoded once for all runs.

A cache holds exactly the pixels that `Split.read` gives, uint8, one image after another in one file
that is mapped into memory: with a cache and without one, a run sees the same bytes. It belongs to
the content of the dataset (its fingerprint), the version of our decoder and Pillow's. An image
that cannot be decoded, or whose bytes in the cache are damaged, is read from its file again.

    DIR/<key>/pixels.bin    the pixels
    DIR/<key>/index.npz     each image's first byte, its height, width and channels, the
                            properties of its file that decoding changed, and a checksum
"""

from __future__ import annotations

import dataclasses
import hashlib
import mmap
import os
import shutil
import stat
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import PIL
from filelock import FileLock
from jaxtyping import Bool, Int, Int64, UInt8, UInt16, UInt32, UInt64

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import Split
from vitkit.data.images.decode import ChooseFactor, Decoded
from vitkit.data.images.integrity import FILE_PROPERTIES, FileProperty
from vitkit.errors import ImageError
from vitkit.io.caches import FileCache, cache_folder, caching, file_keys, is_whole
from vitkit.messages import escape
from vitkit.process import available_cores

DECODER = 1
"""Version of vitkit's decoder: increase it whenever `images.decode` gives different pixels."""
IMAGES_AT_ONCE = 256
"""Images that wait in memory to be written."""
HEADROOM = 64 << 20
"""Bytes of the disk that a cache leaves free."""

CacheProgress = Callable[[int, int, int], None]
"""Called with images done, images in all, bytes written."""


def cached(
    dataset: Dataset,
    folder: str | os.PathLike[str] | None = None,
    *,
    workers: int = 0,
    progress: CacheProgress | None = None,
) -> Dataset:
    """Return the dataset with its images read from a pixel cache, which is built if missing.

    Call it on a dataset as it was opened: splits that are cut from it afterwards use the cache.

    Args:
        dataset: splits in memory stay as they are.
        folder: the folder of all caches; default `pixels` in the user's cache folder.
        workers: threads that decode; 0 means one for each core. Memory stays flat.
        progress: called after every block of images.

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
        pixels = _open_or_build(path, stored, workers or available_cores(), progress)
    except OSError as error:
        why = f"{escape(base)}: {error.strerror or error}"
        return _with_note(dataset, f"cache: cannot be used, the run continues without it ({why})")
    if pixels is None:
        return _with_note(dataset, f"cache: {escape(path)} cannot be read back and is not used")
    # The cache holds the images of all splits, one split after the other.
    splits = dict(dataset.splits)
    start = 0
    for name, split in stored.items():
        splits[name] = CachedSplit(split, pixels, np.arange(start, start + len(split)))
        start += len(split)
    note = f"cache: {len(pixels.starts):,} images, {pixels.size:,} bytes in {escape(path)}"
    return _with_note(dataclasses.replace(dataset, splits=splits), note)


@dataclass(frozen=True, eq=False)
class PixelFile:
    """The images of a cache; the file is mapped once in every process."""

    path: Path
    size: int
    """Bytes of the file."""
    starts: Int64[np.ndarray, " N"]
    """Each image's first byte (N,)."""
    shapes: Int64[np.ndarray, "N 3"]
    """Each image's height, width and channels (N, 3); 0 where it could not be decoded."""
    properties: UInt16[np.ndarray, " N"]
    """Bits (N,): the `FILE_PROPERTIES` of each image's file, the first one lowest."""
    checksums: UInt32[np.ndarray, " N"]
    """The CRC-32 of each image's bytes (N,)."""
    _mapped: list[mmap.mmap] = field(default_factory=list, repr=False)

    def __getitem__(self, number: int) -> UInt8[np.ndarray, "H W C"] | None:
        """Return one image, read-only; None where it could not be decoded, or is damaged."""
        shape = tuple(self.shapes[number].tolist())
        if 0 in shape:
            return None
        # At the first read of each process: a spawned worker cannot inherit a mapping.
        if not self._mapped:
            with self.path.open("rb") as file:
                self._mapped.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        count = shape[0] * shape[1] * shape[2]
        start = int(self.starts[number])
        pixels = np.frombuffer(self._mapped[0], np.uint8, count, start)
        if zlib.crc32(pixels.data) != self.checksums[number]:
            return None
        return pixels.reshape(shape)

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping cannot be pickled; another process maps the file itself.
        facts = (self.starts, self.shapes, self.properties, self.checksums)
        return (PixelFile, (self.path, self.size, *facts))


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
        return self.split.read(index) if image is None else image

    def decode(self, index: int, reduction: ChooseFactor | None = None) -> Decoded:
        # A run with a cache sees the bytes of one without: a smaller image is decoded again.
        number = int(self.numbers[index])
        image = self.pixels[number]
        if image is None:
            return self.split.decode(index, reduction)
        size = (image.shape[0], image.shape[1])
        factor = reduction and reduction(size)
        if factor is not None and factor > 1:
            return self.split.decode(index, reduction)
        return Decoded(image, size, factor, _properties_of(int(self.pixels.properties[number])))

    def subset(self, indices: Int[np.ndarray, " M"]) -> CachedSplit:
        return CachedSplit(self.split.subset(indices), self.pixels, self.numbers[indices])

    def relabelled(self, labels: Int64[np.ndarray, " N"]) -> CachedSplit:
        return CachedSplit(self.split.relabelled(labels), self.pixels, self.numbers)


def show_progress(done: int, total: int, size: int) -> None:
    """Rewrite a progress line on stderr; nothing if stderr is not a terminal.

    Args:
        done: images done.
        total: images in all.
        size: bytes written.
    """
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        sys.stderr.write(f"\rcache: {done:,} of {total:,} images, {size / 1e9:.2f} GB{end}")
        sys.stderr.flush()


def _key(dataset: Dataset) -> str:
    """Return a hash of everything that the pixels depend on: images, their order, the decoder."""
    sizes = [(name, len(split)) for name, split in dataset.splits.items()]
    # Another version of Pillow may decode a JPEG to different pixels.
    text = f"{DECODER} {PIL.__version__} {dataset.fingerprint} {sizes}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _open_or_build(
    path: Path, splits: dict[str, Split], threads: int, progress: CacheProgress | None
) -> PixelFile | None:
    pixels = _open(path)
    if pixels is not None:
        return pixels
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        pixels = _open(path)  # another run may have built it meanwhile
        if pixels is None:
            shutil.rmtree(path, ignore_errors=True)  # by a killed process
            with caching(path, unhashed=["pixels.bin"]) as unfinished:
                _write(unfinished, splits, threads, progress)
            pixels = _open(path)
    return pixels


def _open(path: Path) -> PixelFile | None:
    """Open the cache in a folder; None where it is missing or not complete."""
    index = path / "index.npz"
    if not is_whole(index):
        return None
    with np.load(index) as stored:
        columns = [stored[name] for name in ("starts", "shapes", "properties", "checksums")]
    size = (path / "pixels.bin").stat().st_size
    # A cache without any pixels has one byte: an empty file cannot be mapped.
    if size != max(int(columns[1].prod(axis=1).sum()), 1):
        return None
    return PixelFile(path / "pixels.bin", size, *columns)


def _write(
    folder: Path, splits: dict[str, Split], threads: int, progress: CacheProgress | None
) -> None:
    total = sum(map(len, splits.values()))
    shapes: list[tuple[int, ...]] = []
    properties: list[int] = []
    checksums: list[int] = []
    with (folder / "pixels.bin").open("wb") as file, ThreadPoolExecutor(threads) as pool:
        for block in _blocks(splits):
            for image, bits in pool.map(_decoded, block):
                shapes.append(image.shape)
                properties.append(bits)
                content = np.ascontiguousarray(image).data
                checksums.append(zlib.crc32(content))
                file.write(content)
            if progress is not None:
                progress(len(shapes), total, file.tell())
            # A full disk stops everything else on the machine, so a cache stops before.
            if shutil.disk_usage(folder).free < HEADROOM:
                raise OSError(
                    f"{HEADROOM >> 20} MiB are left on the disk after {len(shapes):,} of "
                    f"{total:,} images"
                )
        if file.tell() == 0:
            file.write(b"\0")  # an empty file cannot be mapped
    sides = np.array(shapes, np.int64).reshape(-1, 3)
    np.savez(
        folder / "index.npz",
        starts=np.concatenate([[0], np.cumsum(sides.prod(axis=1))])[:-1].astype(np.int64),
        shapes=sides,
        properties=np.array(properties, np.uint16),
        checksums=np.array(checksums, np.uint32),
    )


def _blocks(splits: dict[str, Split]) -> Iterator[list[tuple[Split, int]]]:
    for split in splits.values():
        for start in range(0, len(split), IMAGES_AT_ONCE):
            yield [
                (split, index) for index in range(start, min(start + IMAGES_AT_ONCE, len(split)))
            ]


def _decoded(image: tuple[Split, int]) -> tuple[UInt8[np.ndarray, "H W C"], int]:
    """Return pixels and the bits of their properties; no pixels where an image is unreadable."""
    split, index = image
    try:
        decoded = split.decode(index)
    except ImageError:
        return np.zeros((0, 0, 3), np.uint8), 0
    bits = 0
    for name in decoded.properties:
        bits |= 1 << FILE_PROPERTIES.index(name)
    return decoded.pixels, bits


def _properties_of(bits: int) -> frozenset[FileProperty]:
    return frozenset(name for number, name in enumerate(FILE_PROPERTIES) if bits >> number & 1)


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
    chosen = ([paths[index] for index in group] for group in groups)
    with ThreadPoolExecutor(min(HASHING_THREADS, available_cores())) as pool:
        for group, digests in zip(groups, pool.map(_digests, chosen), strict=True):
            rows["sha256"][group] = digests
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
