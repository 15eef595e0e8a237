"""The same picture twice, or nearly: by what `look` keeps of each, without any pixels.

The same are pictures whose decoded pixels have the same hash, whatever their files are. Nearly the
same are those that were saved, scaled or brightened anew. They are told in two steps from grey
thumbnails of 12 x 12: their 64-bit hashes, the signs of low frequencies of a cosine transform
against the median (C. Zauner: "Implementation and Benchmarking of Perceptual Image Hash
Functions", 2010), differ in at most 4 bits, and the thumbnails themselves correlate by 0.999. The
hash alone takes every pair of trousers for the same; the correlation alone would need every pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float32, Int64, UInt8, UInt64

MOST_BITS = 4
"""In how many of 64 bits the hashes of near duplicates differ."""
LEAST_CORRELATION = 0.999
"""Pearson's, of the thumbnails of near duplicates."""
LEAST_CONTRAST = 4.0
"""Standard deviation of a thumbnail, of 255, below which there is nothing to compare."""
FREQUENCIES = 8
"""The hash has this squared bits."""
AT_ONCE = 1 << 10
"""Thumbnails in memory as floats."""
PAIRS_AT_ONCE = 1 << 14


def same_pixels(pixels: UInt64[np.ndarray, "N 2"]) -> list[Int64[np.ndarray, " M"]]:
    """Groups of two and more places whose hashes are the same; each group ascending."""
    order = np.lexsort((pixels[:, 1], pixels[:, 0]))
    ordered = pixels[order]
    differs = (ordered[1:] != ordered[:-1]).any(axis=1)
    edges = np.flatnonzero(np.concatenate([[True], differs, [True]]))
    several = np.flatnonzero(np.diff(edges) > 1)
    groups = [np.sort(order[edges[group] : edges[group + 1]]) for group in several]
    return sorted(groups, key=lambda group: int(group[0]))


def near_pairs(
    few: UInt8[np.ndarray, "M h w"], many: UInt8[np.ndarray, "N h w"]
) -> list[tuple[int, int]]:
    """Places in `few` and in `many` of thumbnails that are nearly the same, in order."""
    hashes, others = perceptual_hash(few), perceptual_hash(many)
    found: list[tuple[int, int]] = []
    for first, second in _candidates(hashes, others):
        close = np.bitwise_count(hashes[first] ^ others[second]) <= MOST_BITS
        pairs = np.stack([first[close], second[close]], axis=1)
        for start in range(0, len(pairs), AT_ONCE):
            some = pairs[start : start + AT_ONCE]
            alike = _correlation(few[some[:, 0]], many[some[:, 1]]) >= LEAST_CORRELATION
            found += map(tuple, some[alike].tolist())
    return sorted(set(found))


def perceptual_hash(thumbnails: UInt8[np.ndarray, "N h w"]) -> UInt64[np.ndarray, " N"]:
    """64 bits for each thumbnail: which of its low frequencies lie above their median."""
    side = thumbnails.shape[1]
    waves = np.cos(np.pi * np.outer(np.arange(FREQUENCIES), np.arange(side) + 0.5) / side)
    planes = np.einsum("ai,bj->ijab", waves, waves).reshape(-1, FREQUENCIES**2).astype(np.float32)
    hashes = np.zeros(len(thumbnails), np.uint64)
    for start in range(0, len(thumbnails), AT_ONCE):
        some = slice(start, start + AT_ONCE)
        values = _flat(thumbnails[some]) @ planes
        bits = values > np.median(values[:, 1:], axis=1, keepdims=True)
        bits[:, 0] = False  # the mean brightness, which says nothing about what is shown
        hashes[some] = np.packbits(bits, axis=1).view(np.uint64)[:, 0]
    return hashes


def _candidates(
    few: UInt64[np.ndarray, " M"], many: UInt64[np.ndarray, " N"]
) -> Iterator[tuple[Int64[np.ndarray, " K"], Int64[np.ndarray, " K"]]]:
    """Pairs of places, in blocks, whose hashes share one of `MOST_BITS` + 1 bands of bits.

    Hashes that differ in `MOST_BITS` bits differ in at most as many bands, so no pair is missed.
    """
    edges = np.linspace(0, 64, MOST_BITS + 2).astype(int)
    for low, high in itertools.pairwise(edges):
        mask = np.uint64((1 << int(high - low)) - 1)
        asked, band = (few >> np.uint64(low)) & mask, (many >> np.uint64(low)) & mask
        order = np.argsort(band, kind="stable")
        start = np.searchsorted(band, asked, "left", sorter=order)
        counts = np.searchsorted(band, asked, "right", sorter=order) - start
        ends = np.cumsum(counts)
        place = 0
        while place < len(few):
            done = int(ends[place] - counts[place])
            stop = max(int(np.searchsorted(ends, done + PAIRS_AT_ONCE, "right")), place + 1)
            block = slice(place, stop)
            first = np.repeat(np.arange(place, stop), counts[block])
            within = np.arange(len(first)) - np.repeat(
                ends[block] - counts[block] - done, counts[block]
            )
            yield first, order[np.repeat(start[block], counts[block]) + within]
            place = stop


def _correlation(
    one: UInt8[np.ndarray, "K h w"], other: UInt8[np.ndarray, "K h w"]
) -> Float32[np.ndarray, " K"]:
    """Pearson's, pair by pair; 0 where one of the two has hardly any contrast."""
    one, other = _centred(one), _centred(other)
    spread, spread_of_other = np.linalg.norm(one, axis=1), np.linalg.norm(other, axis=1)
    least = LEAST_CONTRAST * one.shape[1] ** 0.5
    able = (spread >= least) & (spread_of_other >= least)
    product = (one * other).sum(axis=1)
    return np.where(able, product / np.maximum(spread * spread_of_other, 1), 0)


def _centred(thumbnails: UInt8[np.ndarray, "N h w"]) -> Float32[np.ndarray, "N k"]:
    flat = _flat(thumbnails)
    return flat - flat.mean(axis=1, keepdims=True)


def _flat(thumbnails: UInt8[np.ndarray, "N h w"]) -> Float32[np.ndarray, "N k"]:
    return thumbnails.reshape(len(thumbnails), -1).astype(np.float32)
