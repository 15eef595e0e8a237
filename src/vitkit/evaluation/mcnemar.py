"""McNemar's exact test of two models on the same images."""

from __future__ import annotations

import math

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
