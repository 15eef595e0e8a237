"""95 % confidence intervals of shares and of the balanced accuracy, and McNemar's exact test."""

import math

import numpy as np
from jaxtyping import Float64

Z = 1.959963984540054
"""The 97.5 % quantile of the normal distribution, for intervals of 95 %."""
RESAMPLES = 2000


def wilson_interval(hits: int, images: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson 1927; Newcombe 1998, method 3).

    Args:
        hits: images that are right, from 0 to `images`.
        images: their number, at least 1.

    Returns:
        Lower and upper bound, in [0, 1].
    """
    return _wilson(hits / images, float(images))


def _wilson(share: float, images: float) -> tuple[float, float]:
    square = Z * Z / images
    # solves |p - share| = Z sqrt(p (1 - p) / images) for p
    centre = (share + square / 2) / (1 + square)
    half_width = Z * math.sqrt((share * (1 - share) + square / 4) / images) / (1 + square)
    # rounding must not put a share of 0 or 1 outside of its interval
    return max(0.0, min(share, centre - half_width)), min(1.0, max(share, centre + half_width))


def balanced_interval(
    right: Float64[np.ndarray, " K"], images: Float64[np.ndarray, " K"]
) -> tuple[float, float]:
    """Return the 95 % interval of the balanced accuracy, also for few images and scores near 1.

    The bootstrap draws classes that are all right only as all right, so where that is too narrow it
    is widened to Wilson's interval for as many images as a plain share of this variance would
    have, K^2 / sum_k 1 / n_k; for classes of one size those are all images.

    Args:
        right: correctly classified images of each class (K,).
        images: images of each class (K,); classes without any are left out.

    Returns:
        Lower and upper bound, in [0, 1].
    """
    present = images > 0
    share = float((right[present] / images[present]).mean())
    # K^2 / sum_k 1 / n_k, the size of a sample with the same variance
    count = int(present.sum()) ** 2 / float((1 / images[present]).sum())
    lows, highs = zip(bootstrap_balanced(right, images), _wilson(share, count), strict=True)
    return min(lows), max(highs)


def bootstrap_balanced(
    right: Float64[np.ndarray, " K"], images: Float64[np.ndarray, " K"], seed: int = 0
) -> tuple[float, float]:
    """Return the 95 % bootstrap percentile interval of the balanced accuracy.

    Images are resampled within each class. Of n images drawn from a class in which h of n are
    right, Binomial(n, h / n) are right, so the images themselves are not needed (Efron 1979;
    stratified by class).

    Args:
        right: correctly classified images of each class (K,).
        images: images of each class (K,); classes without any are left out.
        seed: seed of the random numbers.

    Returns:
        Lower and upper bound, in [0, 1].
    """
    present = images > 0
    n = images[present].astype(np.int64)
    share = right[present] / images[present]
    # (resamples, classes): the accuracy of each class in each resample
    samples = np.random.default_rng(seed).binomial(n, share, (RESAMPLES, len(n))) / n
    low, high = np.quantile(samples.mean(1), [0.025, 0.975])
    return float(low), float(high)


SIGNIFICANCE_LEVEL = 0.05
"""A p-value below this counts as a difference."""


def mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of McNemar's test in its exact form.

    Of n images that only one model classifies correctly, Binomial(n, 1/2) fall to either if both
    are equally good (McNemar 1947; for classifiers: Dietterich 1998): p = min(1, 2 P(X <= the
    smaller number)).

    Args:
        only_first: images that only the first model classifies correctly.
        only_second: images that only the second classifies correctly.

    Returns:
        p, in (0, 1]; 1 where the models differ on no image.
    """
    n = only_first + only_second
    # logarithms, as binomial coefficients of thousands of images overflow
    logarithms = (
        math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) - n * math.log(2)
        for i in range(min(only_first, only_second) + 1)
    )
    return min(1.0, 2 * math.fsum(map(math.exp, logarithms)))
