"""Random numbers as functions of their keys: no state, no generator, no order of calls.

Each key is mixed in by one step of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom
number generators", OOPSLA 2014): add the golden gamma and the key, then scramble with David
Stafford's variant 13 of MurmurHash3's finaliser. `hash64(0)` is SplitMix64's first output for
seed 0. The numbers are part of the file format of every run: they must never change.
"""

from enum import IntEnum, unique

import numpy as np
from jaxtyping import Float64, Int64, UInt64

Key = int | np.integer | np.ndarray


@unique
class Draw(IntEnum):
    """Purposes of random numbers, with a key of its own for each, beside the seed and the image.

    New ones get new numbers; those in use must never change.
    """

    BALANCED_ORDER = -2
    CROP = 1
    FLIP = 2
    SHIFT = 3
    POLICY = 4
    JITTER = 5
    ERASE = 6
    TRANSFORM = 7  # a user's own
    MIXING = 0x317
    DROPOUT = 0x0D09


GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
STAFFORD_13 = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_TWO_TO_64 = 1 << 64
_GAMMA, _FIRST, _SECOND = (value.item() for value in (GOLDEN_GAMMA, *STAFFORD_13))
"""The same constants as plain integers."""


def hash64(*keys: Key) -> UInt64[np.ndarray, " ..."]:
    """Return 64 random bits for every combination of the keys.

    Args:
        keys: integers and integer arrays, which broadcast against each other; negative numbers
            are taken modulo 2^64. The order of the keys matters, and so does their number.

    Returns:
        uint64 of the broadcast shape, () where all keys are plain integers.

    Raises:
        TypeError: a key that is not an integer.
    """
    # Plain integers that come first, such as a seed, are mixed in without arrays: 10 times as fast.
    mixed = 0
    plain = 0
    for key in keys:
        if not isinstance(key, int):
            break
        mixed = integer_hash(key, after=mixed)
        plain += 1
    state = np.asarray(mixed, np.uint64)
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is intended
        for key in keys[plain:]:
            state = _scramble(np.asarray(state + (GOLDEN_GAMMA + _as_uint64(key))))
    return state


def uniform(*keys: Key) -> Float64[np.ndarray, " ..."]:
    """Return a float64 in [0, 1) for every combination of the keys: the top 53 bits of `hash64`.

    Args:
        *keys: as for `hash64`.

    Raises:
        TypeError: a key that is not an integer.
    """
    return np.asarray((hash64(*keys) >> np.uint64(11)) * 2.0**-53)


def integer_hash(*keys: int, after: int = 0) -> int:
    """Return what `hash64` does for plain integers, without arrays: 10 times as fast.

    Args:
        keys: any integers.
        after: the hash of the keys before them, if there are any.
    """
    for key in keys:
        after = _scramble_integer(after + _GAMMA + key)
    return after


def as_uniform(bits: int) -> float:
    """Return the float in [0, 1) that `uniform` makes of a hash."""
    return (bits >> 11) * 2.0**-53


def augmentation_key(epoch: int, views: Int64[np.ndarray, "B"]) -> Int64[np.ndarray, "B"]:
    """Combine the epoch and the number of an image's view in that epoch into one key.

    The first view's key is the epoch itself, so that runs without repeated views keep their draws.

    Args:
        epoch: below 2^32.
        views: number of each image's view (B,), from 0.
    """
    return epoch + (views << 32)


def permutation(seed: int, epoch: int, n: int) -> Int64[np.ndarray, " n"]:
    """Return the numbers 0..n-1 in an order that is a pure function of (seed, epoch).

    It is the stable argsort of `hash64(seed, epoch, i)`.

    Args:
        seed: seed of the run.
        epoch: number of the epoch.
        n: how many numbers, 0 or more.

    Returns:
        int64 (n,), each number once.
    """
    # stable: two equal hashes would otherwise be sorted in another way elsewhere
    return np.argsort(hash64(seed, epoch, np.arange(n)), kind="stable").astype(np.int64)


def _as_uint64(key: Key) -> UInt64[np.ndarray, " ..."]:
    if isinstance(key, int):
        return np.asarray(key % _TWO_TO_64, np.uint64)
    array = np.asarray(key)
    if array.dtype.kind not in "iu":
        raise TypeError(f"a key must be an integer or an integer array, got {array.dtype}")
    return array.astype(np.uint64)


def _scramble(z: UInt64[np.ndarray, " ..."]) -> UInt64[np.ndarray, " ..."]:
    z = (z ^ (z >> np.uint64(30))) * STAFFORD_13[0]
    z = (z ^ (z >> np.uint64(27))) * STAFFORD_13[1]
    return np.asarray(z ^ (z >> np.uint64(31)))


def _scramble_integer(z: int) -> int:
    """Return what `_scramble` does with a plain integer modulo 2^64."""
    z %= _TWO_TO_64
    z = (z ^ (z >> 30)) * _FIRST % _TWO_TO_64
    z = (z ^ (z >> 27)) * _SECOND % _TWO_TO_64
    return z ^ (z >> 31)
