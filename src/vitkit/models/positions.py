"""Position embeddings: learned and fixed tables, rotations, and tables for another grid.

A table is (1, T, D) and is added to the tokens (Eq. 1); its prefix rows may be zero. Learned ones
are resampled for images of another size (Sec. 3.2), fixed ones computed for the grid at hand.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import get_args

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.models.attention import Rotation
from vitkit.shapes import Grid, Tokens
from vitkit.spec import Resampling


def _bicubic_offset(table: Tensor, new: Grid) -> Tensor:
    """Resize by DINO's scale (new + 0.1) / old, which avoids a rounding error of old."""
    scale = [(side + 0.1) / before for side, before in zip(new, table.shape[-2:], strict=True)]
    return F.interpolate(table, scale_factor=scale, mode="bicubic", recompute_scale_factor=False)


def _interpolate(table: Tensor, new: Grid, *, mode: str, **how: bool) -> Tensor:
    return F.interpolate(table, size=new, mode=mode, **how)


RESAMPLINGS: dict[str, Callable[[Tensor, Grid], Tensor]] = {
    "bicubic_antialias": partial(_interpolate, mode="bicubic", antialias=True),
    "bicubic": partial(_interpolate, mode="bicubic"),
    "bicubic_aligned": partial(_interpolate, mode="bicubic", align_corners=True),
    "bicubic_offset": _bicubic_offset,
    "bilinear": partial(_interpolate, mode="bilinear"),
    "bilinear_aligned": partial(_interpolate, mode="bilinear", align_corners=True),
    "bilinear_antialias": partial(_interpolate, mode="bilinear", antialias=True),
}
"""timm at run time, and DINOv2 with registers; Hugging Face's ViT, DeiT, DINOv2; torchvision; DINO
and DINOv2 without registers; timm reading .npz and FlexiViT; the published JAX code, big_vision and
jeonsworld (scipy.ndimage.zoom of order 1); FlexiViT in JAX and SigLIP 2 (jax.image.resize)."""
assert set(RESAMPLINGS) == set(get_args(Resampling)), "spec.Resampling lists these"


def resample_positions(
    pos_embed: Float[Tensor, "1 T0 D"], old: Grid, new: Grid, how: str = "bicubic_antialias"
) -> Float[Tensor, "1 T D"]:
    """Resample a position table from the grid `old` to the grid `new`; prefix rows do not change.

    `how` is a name of `RESAMPLINGS`; computed in float32. Grids are (gh, gw) and compared by both
    sides, so 14 x 14 to 7 x 28 is resampled although the counts agree.
    """
    if old == new:
        return pos_embed
    prefix = pos_embed.shape[1] - old[0] * old[1]  # rows of prefix tokens, or 0
    table = rearrange(pos_embed[:, prefix:], "1 (gh gw) D -> 1 D gh gw", gh=old[0])
    table = RESAMPLINGS[how](table.float(), new)
    patches = rearrange(table.to(pos_embed.dtype), "1 D gh gw -> 1 (gh gw) D")
    return torch.cat([pos_embed[:, :prefix], patches], dim=1)


def sincos_1d(count: int, width: int) -> Float[Tensor, "N D"]:
    """Return sines at even and cosines at odd indices, with frequencies 10000^(-2 i / D).

    "Attention Is All You Need" (arXiv 1706.03762), Sec. 3.5; the position is the token number.
    """
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(count, dtype=torch.float64)[:, None] * frequencies  # N D/2
    return rearrange([angles.sin(), angles.cos()], "two N F -> N (F two)").float()


def sincos_2d(grid: Grid, width: int, kind: str = "sincos_2d") -> Float[Tensor, "N D"]:
    """Return [sin a, cos a, sin b, cos b] of two coordinates a and b, D / 4 frequencies each.

    Args:
        grid: (gh, gw), numbered row by row.
        width: D, divisible by 4.
        kind: `sincos_2d`: column first, frequencies 10000^(-i / (D / 4 - 1)) (big_vision's and
            lucidrains' SimpleViT, arXiv 2205.01580); `sincos_2d_moco`: row first and
            10000^(-i / (D / 4)) (MoCo v3, arXiv 2104.02057); `sincos_2d_mae`: column first with
            MoCo's frequencies (arXiv 2111.06377).
    """
    quarter = width // 4  # sine and cosine of each of two coordinates
    last = max(quarter - 1, 1) if kind == "sincos_2d" else quarter  # big_vision's reach 1/10000
    frequencies = 10000.0 ** (-torch.arange(quarter, dtype=torch.float64) / last)
    rows = torch.arange(grid[0], dtype=torch.float64).repeat_interleave(grid[1])  # 0 0 1 1 2 2
    columns = torch.arange(grid[1], dtype=torch.float64).repeat(grid[0])  # 0 1 0 1 0 1
    order = (rows, columns) if kind == "sincos_2d_moco" else (columns, rows)
    angles = [coordinate[:, None] * frequencies for coordinate in order]  # N D/4 each
    return torch.cat([part for a in angles for part in (a.sin(), a.cos())], dim=1).float()


class LearnedPositions(nn.Module):
    """The model's learned table, resampled for another grid than `base_grid` (gh, gw)."""

    def __init__(self, base_grid: Grid, resampling: str = "bicubic_antialias") -> None:
        super().__init__()
        self.base_grid, self.resampling = base_grid, resampling

    def forward(self, pos_embed: Tensor | None, grid: Grid, tokens: Tokens) -> Tensor:
        """Return (1, T, D), or (1, N, D) of a table without prefix rows, for this grid."""
        assert pos_embed is not None
        return resample_positions(pos_embed, self.base_grid, grid, self.resampling)


class FixedPositions(nn.Module):
    """Sines and cosines of a kind, computed for any grid; or nothing.

    Args:
        kind: `sincos_1d`, which numbers prefix tokens too; `sincos_2d`, `sincos_2d_moco` or
            `sincos_2d_mae`; `none`; or `rope`, which adds nothing and acts inside attention.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, pos_embed: Tensor | None, grid: Grid, tokens: Tokens) -> Tensor:
        """Return (1, T, D), (1, N, D) or (1, 0, D) like the tokens."""
        _, count, width = tokens.shape
        if self.kind in ("none", "rope"):
            return tokens.new_zeros(1, 0, width)
        if self.kind == "sincos_1d":
            return sincos_1d(count, width)[None].to(tokens)
        return sincos_2d(grid, width, self.kind)[None].to(tokens)


class RotaryPositions(nn.Module):
    """Axial rotary positions of DINOv3 (arXiv 2508.10104): each token's angles, for every layer.

    Cell centres are put into [-1, 1] along each side of the grid by itself; a head's h numbers are
    h / 4 periods for the row, h / 4 for the column, and both again. Prefix tokens are not turned.

    Args:
        head_width: h, divisible by 4.
        temperature: the longest period's base: periods are temperature^(4 i / h).
    """

    def __init__(self, head_width: int, temperature: float = 100.0) -> None:
        super().__init__()
        self.head_width, self.temperature = head_width, temperature

    def forward(self, grid: Grid, tokens: Tokens) -> Rotation:
        """Return sine and cosine (T, h) for tokens of this grid, in float32 at least."""
        like = tokens.new_empty(0, dtype=torch.promote_types(tokens.dtype, torch.float32))
        exponents = 4 * torch.arange(self.head_width // 4).to(like) / self.head_width
        periods = self.temperature**exponents  # h/4, the first is 1
        rows, columns = (2 * (torch.arange(side).to(like) + 0.5) / side - 1 for side in grid)
        cells = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)  # gh gw 2
        angles = 2 * math.pi * rearrange(cells, "gh gw two -> (gh gw) two 1") / periods
        angles = angles.flatten(1).repeat(1, 2)  # N 2 h/4 -> N h/2 -> N h
        angles = F.pad(angles, (0, 0, tokens.shape[1] - len(angles), 0))  # prefix: angle 0
        return angles.sin(), angles.cos()
