"""Learned positions (Sec. 3.1), and their resampling for pictures of another size (Sec. 3.2)."""

from __future__ import annotations

from einops import rearrange
from jaxtyping import Float
from torch import Tensor, cat
from torch.nn import functional as F

from vitkit.shapes import Grid


def resample_positions(
    pos_embed: Float[Tensor, "1 T0 D"], old: Grid, new: Grid
) -> Float[Tensor, "1 T D"]:
    """Bring a position table from the grid `old` to the grid `new`; prefix rows stay as they are.

    Bicubic with antialiasing, corners not aligned: what timm does (`resample_abs_pos_embed`). Grids
    are compared by both sides, so 14 x 14 to 7 x 28 is resampled although the counts agree.
    """
    if old == new:
        return pos_embed
    prefix = pos_embed.shape[1] - old[0] * old[1]
    table = rearrange(pos_embed[:, prefix:], "1 (gh gw) D -> 1 D gh gw", gh=old[0])
    table = F.interpolate(table.float(), size=new, mode="bicubic", antialias=True)
    patches = rearrange(table.to(pos_embed.dtype), "1 D gh gw -> 1 (gh gw) D")
    return cat([pos_embed[:, :prefix], patches], dim=1)
