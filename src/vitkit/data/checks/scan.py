"""One decode of every image of a split, and the search for copies among the results.

The result of an image is a row of fixed size, so memory hardly grows with the data, and rows of
unchanged files come from a `FileCache`. An image that cannot be decoded is not cached: a failing
disk and a missing permission mend without a trace in the file.
"""

import hashlib
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Float32, Int64, Shaped, UInt8, UInt64
from PIL import Image

from vitkit import errors, process
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import edges_of_runs
from vitkit.io.caches import FileCache

THUMBNAIL_SIDE = 16
"""Height and width in pixels of the grey thumbnails that near duplicates are found by."""
SAMPLED_SIDE = 512
"""Of larger images the thumbnail averages every n-th pixel, so many along the short side."""
SCAN_ROW = np.dtype(
    [
        ("height", np.uint32),
        ("width", np.uint32),
        ("blank", np.bool_),
        ("pixels", np.uint64, (2,)),
        ("thumbnail", np.uint8, (THUMBNAIL_SIDE, THUMBNAIL_SIDE)),
    ]
)
"""Result of one image: its upright size, if all pixels are the same, their hash, a thumbnail."""

SCAN_GROUP = 32
"""Images that a thread takes at once; handing over one small image costs as much as it does."""
SCAN_BLOCK = 1024
"""Images handed to the threads at once; waiting results take memory, pixels are dropped."""


@dataclass(frozen=True)
class Problem:
    """An image that cannot be used."""

    index: int
    """Its index in the split."""
    name: str
    """Name of its file."""
    reason: errors.ImageReason
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
        cache: rows that it has are not computed again, and new rows are added to it; the caller
            saves it. Without one every image is decoded.
        workers: threads; 0 means one for each core.
        advance: called with the number of images done since the last call.

    Raises:
        SettingError: a negative number of workers.
    """
    if workers < 0:
        raise errors.SettingError.about(
            "workers", workers, "must be 0 or more; 0 means one for each core"
        )
    if cache:
        rows, known = cache.get_many(split.original().cache_keys())
    else:
        rows, known = np.zeros(len(split), SCAN_ROW), np.zeros(len(split), bool)
    recalled = int(known.sum())
    advance(recalled)  # images from the cache count as done
    unknown = np.flatnonzero(~known)
    problems: list[Problem] = []
    scan_group = partial(_scan_group, split)
    # Threads, not processes: Pillow decodes without the interpreter lock.
    with ThreadPoolExecutor(workers or process.available_cores()) as pool:
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
    return ScanResult(rows, problems, recalled)


def summarise(pixels: UInt8[np.ndarray, "H W C"]) -> tuple[object, ...]:
    """Return the row of `SCAN_ROW` for decoded pixels, (H, W, 3) RGB or (H, W, 1) grey, uint8."""
    height, width, _ = pixels.shape
    # Row by row: most images differ in the first row, so the rest is not compared.
    is_blank = all((row == pixels[0, 0]).all() for row in pixels)
    # The shape belongs to the hash: 2 x 3 and 3 x 2 pixels may have the same bytes.
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(np.ascontiguousarray(pixels).data)
    return height, width, is_blank, np.frombuffer(digest.digest(), np.uint64), _thumbnail(pixels)


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
            result: RowOrProblem = summarise(split.read(index))
        except errors.ImageError as error:
            result = Problem(index, split.name(index), error.reason, error.detail)
        results.append((index, result))
    return results


# Images that occur twice, or nearly, by the hash and the thumbnail of a row.
#
# Images are the same if their decoded pixels have the same hash. They are nearly the same if their
# grey thumbnails of 16 x 16 have a Pearson correlation of 0.997 or more. This finds copies that
# were saved again or scaled, and most with a changed contrast or gamma. It misses most copies with
# a visible watermark, and most that were cropped. At this limit no pair is found between 2,000 test
# images and 10,000 training images of Fashion-MNIST, nor of MNIST. All of Fashion-MNIST has 31
# pairs (of 10,000 x 60,000): the same garment twice, or trousers of the same cut.

LEAST_CORRELATION = 0.997
"""Pearson's, of the thumbnails of nearly equal images."""
LEAST_CONTRAST = 4.0
"""Standard deviation of a thumbnail, of 255, below which there is nothing to compare."""
CELL = (2 * (1 - LEAST_CORRELATION)) ** 0.5 * 1.001
"""Largest distance of two nearly equal thumbnails, once they have zero mean and length 1."""
AXES = 3
"""Dimensions of the grid that the thumbnails are sorted into."""
WIDTH = 64
"""Cells along an axis, more than 2 / CELL."""
AXES_SAMPLE = 4096
"""Thumbnails that the axes of the grid are computed from."""
ROWS, COLUMNS = 1 << 11, 1 << 12
"""Thumbnails that are compared at once, as rows and columns of a matrix of correlations."""
ENOUGH = 1 << 16
"""Comparisons after which any copy is accepted instead of searching for the best one."""
NONE = -1
"""Index of a copy where there is none."""


def same_pixels(pixels: UInt64[np.ndarray, "N 2"]) -> list[Int64[np.ndarray, " M"]]:
    """Return groups of two and more indices whose hashes are the same; each group ascending."""
    # Equal hashes are neighbours when sorted.
    order = np.lexsort((pixels[:, 1], pixels[:, 0]))
    edges = edges_of_runs(pixels[order, 0], pixels[order, 1])
    several = np.flatnonzero(np.diff(edges) > 1)
    groups = [np.sort(order[edges[group] : edges[group + 1]]) for group in several]
    return sorted(groups, key=lambda group: int(group[0]))


def nearest_copies(
    few: UInt8[np.ndarray, "M h w"],
    many: UInt8[np.ndarray, "N h w"],
    *,
    mirrored: bool = False,
    apart: tuple[Shaped[np.ndarray, " M"], Shaped[np.ndarray, " N"]] | None = None,
) -> Int64[np.ndarray, " M"]:
    """Find for each thumbnail the most similar one among those that are nearly the same.

    Only thumbnails in neighbouring cells of a grid are compared, which misses none. Memory does not
    depend on how many are alike.

    Args:
        few: thumbnails (M, h, w), uint8.
        many: thumbnails (N, h, w), uint8, among which copies are searched.
        mirrored: also compare each of `few` with left and right exchanged.
        apart: a value for each of `few` (M,) and of `many` (N,); two thumbnails with the same value
            are not compared.

    Returns:
        The index in `many` of each copy (M,), `NONE` (-1) where there is none.
    """
    best = np.full(len(few), NONE)
    if not len(few) or not len(many):
        return best
    # Only correlations above this value count, so a copy has LEAST_CORRELATION or more.
    scores = np.full(len(few), np.nextafter(np.float32(LEAST_CORRELATION), np.float32(0)))
    # The axes are computed from one side only, so that both sides share the grid.
    axes = _axes(many)
    cells = _cells(many, axes)
    order = np.argsort(cells, kind="stable")
    cells = cells[order]
    for views in (few, few[:, :, ::-1]) if mirrored else (few,):
        own = _cells(views, axes)
        by_cell = np.argsort(own, kind="stable")
        numbers, starts = np.unique(own[by_cell], return_index=True)
        for cell, rows in zip(numbers.tolist(), np.split(by_cell, starts[1:]), strict=True):
            if cell == NONE:
                continue
            near = _near(cell, cells, order)
            for start in range(0, len(rows), ROWS):
                block = rows[start : start + ROWS]
                _improve(best, scores, block, views[block], many, near, apart)
    return best


def _improve(
    best: Int64[np.ndarray, " M"],
    scores: Float32[np.ndarray, " M"],
    rows: Int64[np.ndarray, " R"],
    views: UInt8[np.ndarray, "R h w"],
    many: UInt8[np.ndarray, "N h w"],
    near: Int64[np.ndarray, " K"],
    apart: tuple[np.ndarray, np.ndarray] | None,
) -> None:
    """Compare some rows with the thumbnails at `near`, and store those that are more similar.

    Args:
        best: the index of the most similar thumbnail so far (M,), changed in place.
        scores: its correlation (M,), changed in place.
        rows: rows of `best` and `scores`, those to compare.
        views: their thumbnails.
        many: all thumbnails among which copies are searched.
        near: indices in `many` to compare with.
        apart: as in `nearest_copies`.
    """
    normal = _normal(views)
    for start in range(0, len(near), COLUMNS):
        if start >= ENOUGH and (best[rows] != NONE).all():
            return
        candidates = near[start : start + COLUMNS]
        correlation = normal @ _normal(many[candidates]).T
        if apart is not None:
            correlation[apart[0][rows][:, None] == apart[1][candidates]] = 0
        column = correlation.argmax(axis=1)
        value = correlation[np.arange(len(rows)), column]
        better = value > scores[rows]
        best[rows[better]] = candidates[column[better]]
        scores[rows[better]] = value[better]


def _near(
    cell: int, cells: Int64[np.ndarray, " N"], order: Int64[np.ndarray, " N"]
) -> Int64[np.ndarray, " K"]:
    """Return the indices in a cell and in all around it, ascending.

    Args:
        cell: its number.
        cells: the cell of each thumbnail, ascending (N,).
        order: the index of each thumbnail (N,).
    """
    # The cells along the last axis follow each other: three of them are one range.
    middles = np.array([cell + WIDTH * (WIDTH * x + y) for x in (-1, 0, 1) for y in (-1, 0, 1)])
    starts = np.searchsorted(cells, middles - 1, "left")
    ends = np.searchsorted(cells, middles + 1, "right")
    parts = [order[start:end] for start, end in zip(starts, ends, strict=True)]
    return np.sort(np.concatenate(parts))


def _axes(thumbnails: UInt8[np.ndarray, "N h w"]) -> Float32[np.ndarray, "k a"]:
    """Return the directions in which a sample of the thumbnails varies most, as columns."""
    # The eigenvectors of the largest eigenvalues, as in a principal component analysis.
    sample = _normal(thumbnails[:: len(thumbnails) // AXES_SAMPLE + 1])
    _, directions = np.linalg.eigh(sample.T @ sample)  # ascending
    return np.ascontiguousarray(directions[:, -AXES:], np.float32)


def _cells(
    thumbnails: UInt8[np.ndarray, "N h w"], axes: Float32[np.ndarray, "k a"]
) -> Int64[np.ndarray, " N"]:
    """Return the number of each thumbnail's cell (N,), `NONE` for those without contrast."""
    cells = np.full(len(thumbnails), NONE)
    for start in range(0, len(thumbnails), COLUMNS):
        normal = _normal(thumbnails[start : start + COLUMNS])
        # A cell is as wide as two nearly equal thumbnails can be apart, so neighbours suffice.
        coordinates = np.floor(normal @ axes / CELL).astype(np.int64) + WIDTH // 2
        numbers = coordinates @ WIDTH ** np.arange(AXES)[::-1]
        cells[start : start + COLUMNS] = np.where(normal.any(axis=1), numbers, NONE)
    return cells


def _normal(thumbnails: UInt8[np.ndarray, "N h w"]) -> Float32[np.ndarray, "N k"]:
    """Return thumbnails with zero mean and length 1; zeros where there is hardly any contrast."""
    # The product of two rows is then their Pearson correlation.
    flat = thumbnails.reshape(len(thumbnails), -1).astype(np.float32)
    flat -= flat.mean(axis=1, keepdims=True)
    length = np.linalg.norm(flat, axis=1, keepdims=True)
    has_contrast = length >= LEAST_CONTRAST * flat.shape[1] ** 0.5
    return np.where(has_contrast, flat / np.maximum(length, 1), 0)


def near_copies(
    here: ScanResult,
    other: ScanResult,
    apart: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    mirrored: bool = False,
) -> list[tuple[int, int]]:
    """Return indices in `here` and in `other` of images that are nearly the same, not quite.

    Args:
        here: the images to find copies of.
        other: the images among which copies are searched.
        apart: as in `nearest_copies`.
        mirrored: as in `nearest_copies`.
    """
    # Unreadable images have thumbnails without contrast, which have no copies.
    copies = nearest_copies(
        here.rows["thumbnail"], other.rows["thumbnail"], mirrored=mirrored, apart=apart
    )
    ones = np.flatnonzero(copies != NONE)
    twos = copies[ones]
    # Images with the same pixels are exact copies, which are reported as such.
    changed = (here.rows["pixels"][ones] != other.rows["pixels"][twos]).any(axis=1)
    return [*zip(ones[changed].tolist(), twos[changed].tolist(), strict=True)]
