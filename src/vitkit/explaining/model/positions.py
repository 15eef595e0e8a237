"""Position similarity: how alike the position embeddings of two patches are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional as F

from vitkit.models.vit import ViT
from vitkit.shapes import Grid

KINDS = {
    "learned": "learned position embedding",
    "rope": "rotary positions (sine and cosine of the angles)",
}
"""Names of kinds of positions; all others are fixed tables."""


@dataclass(frozen=True)
class PositionSimilarity:
    """Cosine similarity of the position embedding of each patch with that of every other.

    Attributes:
        cosine: (gh, gw, gh, gw) in [-1, 1]; at [i, j] the map of the patch in row i and column j.
        kind: kind of the positions, in words.
        missing: why there is none, as a sentence; else empty.
    """

    cosine: Float64[np.ndarray, "gh gw gh gw"]
    kind: str
    missing: str = ""


def position_similarity(model: ViT, grid: Grid | None = None) -> PositionSimilarity:
    """Return the cosine similarity between the positions of all patches.

    "An Image is Worth 16x16 Words" (arXiv 2010.11929), Fig. 7 centre. Learned and fixed tables are
    compared row by row, without the rows of prefix tokens. Rotary positions add nothing to a token;
    their vectors are sine and cosine of the angles that a head is turned by. Their cosine is the
    factor by which turning changes the product of a query with an equal key, where all pairs of a
    head are equally long ("RoFormer", arXiv 2104.09864, Eq. 16).

    Args:
        model: any ViT; only its weights are used.
        grid: (gh, gw) of the patches, to which a learned table is resampled; default the model's.
    """
    grid = grid or model.spec.grid
    kind = model.spec.positions
    if kind == "none":
        return PositionSimilarity(
            np.zeros((0, 0, 0, 0)), "none", missing="The model has no positions."
        )
    with torch.no_grad():
        # Of rows of length 1 the products are cosines.
        vectors = F.normalize(_position_vectors(model, grid).double().cpu(), dim=1)  # N E
    rows, columns = grid
    cosine = (vectors @ vectors.T).clamp(-1, 1).reshape(rows, columns, rows, columns)
    return PositionSimilarity(cosine.numpy(), KINDS.get(kind, f"fixed positions ({kind})"))


def _position_vectors(model: ViT, grid: Grid) -> Float[Tensor, "N E"]:
    """Return a vector for the position of each patch."""
    spec = model.spec
    patches = grid[0] * grid[1]
    weight = next(model.parameters())
    tokens = weight.new_zeros(1, spec.num_prefix_tokens + patches, spec.width)
    if model.rope is not None:
        # Only the differences of angles matter to attention; these vectors keep them.
        sin, cos = model.rope(grid, tokens)
        table = torch.cat([sin, cos], dim=1)  # T 2h
    else:
        table = model.embedding.positions(model.pos_embed, grid, tokens)[0]
    # The rows of prefix tokens come first.
    return table[-patches:]
