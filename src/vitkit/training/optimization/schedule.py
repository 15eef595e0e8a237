"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from vitkit.training.config.field_types import Schedule


def learning_rate(
    step: int, schedule: Schedule = "cosine", *, peak: float, low: float, warmup: int, total: int
) -> float:
    """Return the learning rate of a step: it rises linearly over `warmup` steps to `peak`.

    Steps are counted from 0. The first step without warm-up has the peak. After that, with t from 0
    at the peak to 1 at step total - 1:

        cosine     low + (peak - low) (1 + cos(pi t)) / 2   SGDR (arXiv 1608.03983), Eq. 5
        linear     peak + (low - peak) t                    ViT (arXiv 2010.11929, Table 3)
        constant   peak
        rsqrt      peak sqrt(warmup / (step + 1))           "Attention Is All You Need", Eq. 3, and
                                                            "Scaling ViTs" (arXiv 2106.04560)

    `rsqrt` does not depend on `total`, so that a run can be extended; it never goes below `low`.

    Args:
        step: from 0.
        schedule: one of the four.
        peak: the highest rate, above 0.
        low: the rate at the end, from 0 to `peak`.
        warmup: steps of warm-up, 0 or more.
        total: steps of the run, with the warm-up.

    >>> rates = [learning_rate(s, peak=1.0, low=0.0, warmup=2, total=7) for s in range(7)]
    >>> [round(rate, 3) for rate in rates]
    [0.5, 1.0, 0.905, 0.655, 0.345, 0.095, 0.0]
    """
    warmup = max(warmup, 1)  # without warm-up, the first step is at the peak
    if step < warmup:
        return peak * (step + 1) / warmup
    # + 1: the last step is number total - 1, and has t = 1.
    progress = min((step - warmup + 1) / max(total - warmup, 1), 1.0)
    if schedule == "linear":
        return peak + (low - peak) * progress
    if schedule == "constant":
        return peak
    if schedule == "rsqrt":
        return max(peak * math.sqrt(warmup / (step + 1)), low)
    return low + (peak - low) * (1 + math.cos(math.pi * progress)) / 2
