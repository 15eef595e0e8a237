"""Approximate operations of a forward pass, to estimate the time of work."""

from __future__ import annotations

from vitkit.spec import ViTSpec


def rough_flops(spec: ViTSpec) -> float:
    """Return the operations of the blocks for one image; a multiplication and an addition are two.

    For each block 2 T D (4 D + 2 M) for the matrices, and 4 T^2 D for attention.

    >>> round(rough_flops(ViTSpec()) / 1e9)
    35
    """
    tokens, width = spec.num_patches + spec.num_prefix_tokens, spec.width
    matrices = 2 * tokens * width * (4 * width + 2 * spec.mlp_width)
    return float(spec.depth * (matrices + 4 * tokens**2 * width))
