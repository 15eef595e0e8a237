"""One decode of every image of a split; checks use the results without decoding again.

The result of an image is a row of fixed size, so memory hardly grows with the data, and rows of
unchanged files come from a `FileCache`. An image that cannot be decoded is not cached: a failing
disk and a missing permission mend without a trace in the file.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Int64, UInt8
from PIL import Image

from vitkit.data.datasets.split import Split
from vitkit.data.images.integrity import FILE_PROPERTIES
from vitkit.errors import ImageError, ImageReason, SettingError
from vitkit.io.caches import FileCache
from vitkit.process import available_cores

THUMBNAIL_SIDE = 16
"""Height and width in pixels of the grey thumbnails that near duplicates are found by."""
SAMPLED_SIDE = 512
"""Of larger images the thumbnail averages every n-th pixel, so many along the short side."""
TRAITS = (*FILE_PROPERTIES, "blank")
"""Meaning of the bits of a row's `traits`, lowest first; blank: all pixels are the same."""
SCAN_ROW = np.dtype(
    [
        ("height", np.uint32),
        ("width", np.uint32),
        ("traits", np.uint16),
        ("pixels", np.uint64, (2,)),
        ("thumbnail", np.uint8, (THUMBNAIL_SIDE, THUMBNAIL_SIDE)),
    ]
)
"""Result of one image: its upright size, its traits, a hash of its decoded pixels, a thumbnail."""

SCAN_GROUP = 32
"""Images that a thread takes at once; handing over one small image costs as much as it does."""
SCAN_BLOCK = 1024
"""Images handed to the threads at once; waiting results take memory, pixels are dropped."""
SAVE_EVERY = 60.0
"""Seconds after which the cache is written; an interrupted scan continues from there."""


@dataclass(frozen=True)
class Problem:
    """An image that cannot be used."""

    index: int
    """Its index in the split."""
    name: str
    """Name of its file."""
    reason: ImageReason
    """One of a fixed list of words."""
    detail: str
    """What was expected and what was found, in one line."""


@dataclass(frozen=True, eq=False)
class ScanResult:
    """The rows and the problems of a split."""

    rows: np.ndarray
    """(N,) of `SCAN_ROW`; zeros where there is a problem."""
    problems: list[Problem]
    """The images that cannot be decoded, in order."""
    recalled: int
    """Number of images whose rows came from the cache."""


RowOrProblem = tuple[object, ...] | Problem


def scan_split(
    split: Split,
    cache: FileCache | None = None,
    *,
    workers: int = 0,
    advance: Callable[[int], object] = lambda count: None,
) -> ScanResult:
    """Decode every image of a split once.

    Args:
        split: a `CachedSplit` gives its pixels from the pixel cache.
        cache: rows that it has are not computed again, and new rows are added to it; it is saved
            now and then, not at the end. Without one every image is decoded.
        workers: threads; 0 means one for each core.
        advance: called with the number of images done since the last call.

    Raises:
        SettingError: a negative number of workers.
    """
    if workers < 0:
        raise SettingError.about("workers", workers, "must be 0 or more; 0 means one for each core")
    if cache:
        rows, known = cache.get_many(split.original().cache_keys())
    else:
        rows, known = np.zeros(len(split), SCAN_ROW), np.zeros(len(split), bool)
    recalled = int(known.sum())
    advance(recalled)  # images from the cache count as done
    unknown = np.flatnonzero(~known)
    problems: list[Problem] = []
    last_save = time.monotonic()
    scan_group = partial(_scan_group, split)
    # Threads, not processes: Pillow decodes without the interpreter lock.
    with ThreadPoolExecutor(workers or available_cores()) as pool:
        for start in range(0, len(unknown), SCAN_BLOCK):
            block = unknown[start : start + SCAN_BLOCK]
            # Results of a block are taken in order, so rows and problems are, too.
            groups = [
                block[first : first + SCAN_GROUP] for first in range(0, len(block), SCAN_GROUP)
            ]
            for index, result in itertools.chain.from_iterable(pool.map(scan_group, groups)):
                # Rows and marks are shared with the cache: what is marked as known is saved.
                if isinstance(result, Problem):
                    problems.append(result)
                else:
                    rows[index] = result
                    known[index] = True
            advance(len(block))
            if cache and time.monotonic() - last_save > SAVE_EVERY:
                cache.save(finished=False)
                last_save = time.monotonic()
    return ScanResult(rows, problems, recalled)


def summarise(
    pixels: UInt8[np.ndarray, "H W C"], properties: Iterable[str] = ()
) -> tuple[object, ...]:
    """Return the row of `SCAN_ROW` for decoded pixels.

    Args:
        pixels: (H, W, 3) RGB or (H, W, 1) grey, uint8.
        properties: properties of `FILE_PROPERTIES`, those of the image's file.
    """
    height, width, _ = pixels.shape
    traits = {*properties}
    # Row by row: most images differ in the first row, so the rest is not compared.
    if all((row == pixels[0, 0]).all() for row in pixels):
        traits.add("blank")
    bits = 0
    for bit, trait in enumerate(TRAITS):
        if trait in traits:
            bits |= 1 << bit
    # The shape belongs to the hash: 2 x 3 and 3 x 2 pixels may have the same bytes.
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(pixels).data)
    return (
        height,
        width,
        bits,
        np.frombuffer(digest.digest(), np.uint64),
        _thumbnail(pixels),
    )


def _thumbnail(pixels: UInt8[np.ndarray, "H W C"]) -> UInt8[np.ndarray, "h w"]:
    # Not the box filter: without fractional weights, an image and its half-size copy would differ.
    step = max(1, min(pixels.shape[:2]) // SAMPLED_SIDE)
    sampled = pixels[step // 2 :: step, step // 2 :: step]
    # Not by `pil_image`, whose module imports torch: checking a dataset does not need torch.
    if sampled.shape[2] == 1:
        sampled = sampled[:, :, 0]
    image = Image.fromarray(sampled)
    small = image.resize((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.HAMMING)
    return np.asarray(small.convert("L"))


def _scan_group(split: Split, indices: Int64[np.ndarray, " M"]) -> list[tuple[int, RowOrProblem]]:
    results: list[tuple[int, RowOrProblem]] = []
    for index in map(int, indices):
        try:
            decoded = split.decode(index)
            result: RowOrProblem = summarise(decoded.pixels, decoded.properties)
        except ImageError as error:
            result = Problem(index, split.name(index), error.reason, error.detail)
        results.append((index, result))
    return results
