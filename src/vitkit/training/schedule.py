"""The learning rate as a function of the step."""

from __future__ import annotations

import math


def warmup_cosine(step: int, *, peak: float, low: float, warmup: int, total: int) -> float:
    """Linear warm-up, then half a cosine: the rate of step `step`, counted from 0.

    Rises over `warmup` steps to `peak` and falls to `low` at step total - 1 (SGDR without restarts,
    arXiv 1608.03983, Eq. 5).

    >>> [round(warmup_cosine(s, peak=1.0, low=0.0, warmup=2, total=7), 3) for s in range(7)]
    [0.5, 1.0, 0.905, 0.655, 0.345, 0.095, 0.0]
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup + 1) / max(total - warmup, 1)
    return low + (peak - low) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
