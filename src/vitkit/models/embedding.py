"""From a picture to tokens: Eq. 1 of "An Image is Worth 16x16 Words" (arXiv 2010.11929).

z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos. `PatchEmbedding` is x_p E, `Embedding` the rest.
"""

from __future__ import annotations

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.errors import ShapeError
from vitkit.models.positions import resample_positions
from vitkit.shapes import Grid, Images, Tokens


def patchify(images: Images, patch_size: tuple[int, int]) -> Float[Tensor, "B N V"]:
    """Cut pictures into patches, row by row: (B, C, H, W) -> (B, N, C * P * P), channel slowest.

    >>> patchify(torch.arange(16.).reshape(1, 1, 4, 4), (2, 2))[0, 1].tolist()
    [2.0, 3.0, 6.0, 7.0]
    """
    return rearrange(
        images, "B C (gh P) (gw Q) -> B (gh gw) (C P Q)", P=patch_size[0], Q=patch_size[1]
    )


class PatchEmbedding(nn.Module):
    """x_p E: cut a picture into P x P patches and map each to D numbers, by one convolution.

    (B, C, H, W) -> (B, N, D) with N = (H / P) * (W / P), patches row by row. E is stored as the
    convolution's kernel (D, C, P, P), timm's `patch_embed.proj`.

    Args:
        in_channels: C.
        patch_size: P, or (height, width), in pixels.
        width: D.

    Raises:
        ShapeError: at call time, another number of channels or a size that P does not divide.
    """

    def __init__(
        self, in_channels: int = 3, patch_size: int | tuple[int, int] = 16, width: int = 768
    ) -> None:
        super().__init__()
        pair = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        self.in_channels, self.patch_size = in_channels, pair
        self.proj = nn.Conv2d(in_channels, width, kernel_size=pair, stride=pair)

    def forward(self, images: Images) -> Tokens:
        """x_p E by a convolution with stride P."""
        self.grid(images)
        return self.proj(images).flatten(2).transpose(1, 2)  # B D gh gw -> B N D

    def grid(self, images: Images) -> Grid:
        """(gh, gw), how many patches the pictures give down and across."""
        _, channels, height, width = images.shape
        rows, columns = self.patch_size
        if channels != self.in_channels or height % rows or width % columns:
            raise ShapeError(
                f"pictures are {channels} x {height} x {width} (C x H x W); expected "
                f"{self.in_channels} channels and sides divisible by the patch, {rows} x {columns}"
            )
        return height // rows, width // columns


class LinearPatchEmbedding(PatchEmbedding):
    """The same map with the same weights as patchify, then one matrix.

    Its token stream comes out contiguous, which some devices prefer; the convolution's does not.
    """

    def forward(self, images: Images) -> Tokens:
        """x_p E as the paper writes it: patches (B, N, C * P * P) times E."""
        self.grid(images)
        patches = patchify(images, self.patch_size)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


STEMS: dict[str, type[PatchEmbedding]] = {
    "convolution": PatchEmbedding,
    "linear": LinearPatchEmbedding,
}


class Embedding(nn.Module):
    """Eq. 1: put the class token before the embedded patches, add positions, then dropout.

    The two tables belong to the model, under timm's keys `cls_token` and `pos_embed`; they are
    handed in, so that this module has no parameters.

    Args:
        base_grid: (gh, gw), the grid the position table was made for.
        dropout: rate once, after positions are added.
    """

    def __init__(self, base_grid: Grid, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.base_grid = base_grid
        self.pos_drop = nn.Dropout(dropout)

    def forward(
        self,
        patches: Float[Tensor, "B N D"],
        grid: Grid,
        cls_token: Float[Tensor, "1 1 D"] | None,
        pos_embed: Float[Tensor, "1 T0 D"],
    ) -> Tokens:
        """[x_class; x_p E] + E_pos; on another grid than the base one, E_pos is resampled."""
        if cls_token is not None:
            patches = torch.cat([cls_token.expand(len(patches), -1, -1), patches], dim=1)
        return self.pos_drop(patches + resample_positions(pos_embed, self.base_grid, grid))
