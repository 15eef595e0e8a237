"""One look at every image: whether it decodes, and what is told of it without its pixels.

What is told is a row of fixed size, so memory hardly grows with the data, and rows of unchanged
files come from a `FileCache`. What cannot be decoded is not remembered: a disk that failed and a
permission that was missing mend without a trace in the file.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Int64, UInt8, UInt64
from PIL import Image

from vitkit.data.datasets.dataset import FileSplit, Split, StoredSplit
from vitkit.data.datasets.memory_limit import PIXELS_AT_ONCE, Room
from vitkit.data.datasets.pixel_cache import CachedSplit, decode_with_properties
from vitkit.data.images.decode import ODDITIES
from vitkit.data.sources.remote_shards import RemoteTars, content_keys
from vitkit.errors import ImageError, ImageReason, SettingError
from vitkit.io.file_cache import UNKNOWN, FileCache, file_keys

SIDE = 16
"""Height and width of the grey thumbnails that near duplicates are told by."""
SAMPLED_SIDE = 512
"""Of larger images the thumbnail averages every n-th pixel, so many along the short side."""
TRAITS = (*ODDITIES, "blank")
"""What the bits of a row's `traits` stand for, lowest first; blank: all pixels are the same."""
LOOK = np.dtype(
    [
        ("height", np.uint32),
        ("width", np.uint32),
        ("traits", np.uint16),
        ("pixels", np.uint64, (2,)),
        ("thumbnail", np.uint8, (SIDE, SIDE)),
    ]
)
"""What is kept of an image: its size when upright, its traits, a hash of its decoded pixels."""

GROUP = 32
"""Images that a thread takes at once; handing over one small image costs as much as it does."""
BLOCK = 1024
"""Images handed to the threads at once; what is waiting takes memory, pixels are dropped."""
SAVE_EVERY = 60.0
"""Seconds after which the memory is written; a check that is broken off goes on from there."""


@dataclass(frozen=True)
class Problem:
    """An image that cannot be used."""

    index: int
    """Its place in the split."""
    name: str
    """Its file."""
    reason: ImageReason
    """One of a fixed list of words."""
    detail: str
    """What was expected and what was found, in one line."""


@dataclass(frozen=True, eq=False)
class Looks:
    """What was seen of a split."""

    rows: np.ndarray
    """(N,) of `LOOK`; zeros where there is a problem."""
    problems: list[Problem]
    """The images that cannot be decoded, in order."""
    recalled: int
    """How many images were known from an earlier look."""


def scan_split(
    split: Split,
    memory: FileCache | None = None,
    *,
    workers: int = 0,
    advance: Callable[[int], object] = lambda count: None,
) -> Looks:
    """Look at every image of a split once.

    Args:
        split: its images are decoded, but for those that `memory` knows; a `CachedSplit`'s
            pixels are taken from the cache.
        memory: is asked, and learns what is new; it is saved now and then, not at the end. Without
            one every image is decoded.
        workers: threads; 0 means one for each core.
        advance: is told how many images more are done.
    """
    if workers < 0:
        raise SettingError.about("workers", workers, "must be 0 or more; 0 means one for each core")
    if memory:
        rows, known = memory.get_many(_keys(as_stored(split)))
    else:
        rows, known = np.zeros(len(split), LOOK), np.zeros(len(split), bool)
    recalled = int(known.sum())
    advance(recalled)
    unknown = np.flatnonzero(~known)
    problems: list[Problem] = []
    saved, room = time.monotonic(), Room(PIXELS_AT_ONCE)
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        for start in range(0, len(unknown), BLOCK):
            block = unknown[start : start + BLOCK]
            groups = [block[place : place + GROUP] for place in range(0, len(block), GROUP)]
            for index, found in itertools.chain.from_iterable(
                pool.map(partial(_look, split, room), groups)
            ):
                if isinstance(found, Problem):
                    problems.append(found)
                else:
                    rows[index], known[index] = found, True
            advance(len(block))
            if memory and time.monotonic() - saved > SAVE_EVERY:
                memory.save(finished=False)
                saved = time.monotonic()
    return Looks(rows, problems, recalled)


def as_stored(split: Split) -> Split:
    """The split that a `CachedSplit` is a cache of; any other one itself."""
    return split.split if isinstance(split, CachedSplit) else split


def summarise(
    pixels: UInt8[np.ndarray, "H W C"], properties: Iterable[str] = ()
) -> tuple[object, ...]:
    """A row of `LOOK` for decoded pixels, RGB or grey."""
    height, width, _ = pixels.shape
    traits = {*properties}
    if all((row == pixels[0, 0]).all() for row in pixels):
        traits.add("blank")
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(pixels).data)
    return (
        height,
        width,
        sum(1 << bit for bit, trait in enumerate(TRAITS) if trait in traits),
        np.frombuffer(digest.digest(), np.uint64),
        _thumbnail(pixels),
    )


def _thumbnail(pixels: UInt8[np.ndarray, "H W C"]) -> UInt8[np.ndarray, "h w"]:
    # The box filter has no fractional weights: an image and its half would fill other cells.
    step = max(1, min(pixels.shape[:2]) // SAMPLED_SIDE)
    sampled = pixels[step // 2 :: step, step // 2 :: step]
    image = Image.fromarray(sampled[:, :, 0] if sampled.shape[2] == 1 else sampled)
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.HAMMING).convert("L"))


def _look(
    split: Split, room: Room, indices: Int64[np.ndarray, " M"]
) -> list[tuple[int, tuple[object, ...] | Problem]]:
    seen: list[tuple[int, tuple[object, ...] | Problem]] = []
    for index in map(int, indices):
        with room.admission() as admit:  # until the pixels have been looked at
            try:
                seen.append((index, summarise(*decode_with_properties(split, index, admit))))
            except ImageError as error:
                problem = Problem(index, split.name(index), error.reason, error.detail)
                seen.append((index, problem))
    return seen


def _keys(split: Split) -> UInt64[np.ndarray, " N"]:
    """Of files by what the file system says, of stored images by their bytes."""
    if isinstance(split, FileSplit):
        return file_keys(split.paths.texts())
    keys = np.full(len(split), UNKNOWN)
    if isinstance(split, StoredSplit) and isinstance(split.store, RemoteTars):
        return content_keys(split.store.digests[split.numbers])  # none is fetched for it
    if isinstance(split, StoredSplit):
        for index in range(len(split)):
            try:
                encoded = split.store.encoded(int(split.numbers[index]))
            except ImageError:
                continue
            keys[index] = int.from_bytes(hashlib.blake2b(encoded, digest_size=8).digest())
    return keys
