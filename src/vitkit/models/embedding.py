"""From an image to tokens: Eq. 1 of "An Image is Worth 16x16 Words" (arXiv 2010.11929).

z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos. `PatchEmbedding` is x_p E, `Embedding` the rest;
E_pos is learned (`LearnedPositions`) or fixed (`FixedPositions`, `RotaryPositions`).
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.errors import ShapeError, SpecError
from vitkit.models.attention import Rotation
from vitkit.models.hybrid import resnet
from vitkit.models.layers import eval_mode
from vitkit.shapes import Grid, Images, Tokens
from vitkit.spec import Resampling, ViTSpec


def patchify(images: Images, patch_size: tuple[int, int]) -> Float[Tensor, "B N V"]:
    """Cut images into patches, row by row: (B, C, H, W) -> (B, N, C * P * P), channel slowest.

    >>> patchify(torch.arange(16.).reshape(1, 1, 4, 4), (2, 2))[0, 1].tolist()
    [2.0, 3.0, 6.0, 7.0]
    """
    return rearrange(
        images, "B C (gh P) (gw Q) -> B (gh gw) (C P Q)", P=patch_size[0], Q=patch_size[1]
    )


class PatchConvolution(nn.Conv2d):
    """A convolution with stride P, (B, C, H, W) -> (B, D, H / P, W / P).

    On a GPU it is computed as one matrix product, which is faster there (`docs/benchmarks.md`).
    """

    def forward(self, input: Images) -> Float[Tensor, "B D gh gw"]:
        """Return the map of embedded patches."""
        return self.as_product(input) if input.is_cuda else super().forward(input)

    def as_product(self, input: Images) -> Float[Tensor, "B D gh gw"]:
        """Return the same map from patches and one matrix; its tokens are contiguous."""
        rows, columns = self.kernel_size
        tokens = F.linear(patchify(input, (rows, columns)), self.weight.flatten(1), self.bias)
        return tokens.transpose(1, 2).unflatten(2, (input.shape[2] // rows, -1))


class PatchEmbedding(nn.Module):
    """x_p E: cut an image into P x P patches, and map each to D numbers: a convolution.

    (B, C, H, W) -> (B, N, D) with N = (H / P) * (W / P), patches row by row.
    E is stored as the convolution's kernel (D, C, P, P), timm's `patch_embed.proj`.

    Args:
        in_channels: C.
        patch_size: P, or (height, width), in pixels.
        width: D.
        bias: whether the projection has a bias.

    Raises:
        ShapeError: at call time, for other channels or a size that P does not divide.
    """

    def __init__(
        self,
        in_channels: int = 3,
        patch_size: int | tuple[int, int] = 16,
        width: int = 768,
        bias: bool = True,
    ) -> None:
        super().__init__()
        pair = (patch_size, patch_size) if isinstance(patch_size, int) else patch_size
        self.in_channels, self.patch_size = in_channels, pair
        self.make_projection(width, bias)

    def make_projection(self, width: int, bias: bool) -> None:
        """Create E, as a kernel."""
        shape = (self.in_channels, width, self.patch_size, self.patch_size)
        self.proj: nn.Conv2d = PatchConvolution(*shape, bias=bias)

    def forward(self, images: Images) -> Tokens:
        """Return x_p E by a convolution with stride P."""
        self.grid(images)
        return self.proj(images).flatten(2).transpose(1, 2)  # B D gh gw -> B N D

    def grid(self, images: Images) -> Grid:
        """Return (gh, gw), the numbers of patches down and across."""
        if images.ndim != 4 or not images.is_floating_point():
            hint = "; for a single image pass images[None]" if images.ndim == 3 else ""
            raise ShapeError(
                f"images are {images.dtype} of the shape {tuple(images.shape)}; "
                f"expected floats (B, C, H, W){hint}"
            )
        _, channels, height, width = images.shape
        rows, columns = self.patch_size
        is_cut = height % rows == 0 and width % columns == 0 and height * width > 0
        if channels != self.in_channels or not is_cut:
            raise ShapeError(
                f"images are {channels} x {height} x {width} (C x H x W); "
                f"expected {self.in_channels} channels and "
                f"sides divisible by the patch, {rows} x {columns}"
            )
        return height // rows, width // columns


class LinearPatchEmbedding(PatchEmbedding):
    """The same map with the same weights as patchify, then one matrix; its result is contiguous."""

    def forward(self, images: Images) -> Tokens:
        """Return x_p E as the paper writes it: patches (B, N, C * P * P) times E."""
        self.grid(images)
        patches = patchify(images, self.patch_size)
        return F.linear(patches, self.proj.weight.flatten(1), self.proj.bias)


class NormedPatchEmbedding(PatchEmbedding):
    """Patchify, LayerNorm, matrix, LayerNorm (arXiv 2302.01327; lucidrains'), at torch's eps."""

    def make_projection(self, width: int, bias: bool) -> None:
        """Create the matrix between its two norms."""
        values = self.in_channels * self.patch_size[0] * self.patch_size[1]
        self.norm_patches = nn.LayerNorm(values)  # C P P numbers
        self.proj = nn.Linear(values, width, bias=bias)  # type: ignore[assignment]
        self.norm = nn.LayerNorm(width)

    def forward(self, images: Images) -> Tokens:
        """Return LN(E LN(x_p)) of patches whose values are ordered as in `patchify`."""
        self.grid(images)
        return self.norm(self.proj(self.norm_patches(patchify(images, self.patch_size))))


class HybridEmbedding(PatchEmbedding):
    """Patches of a network's feature map instead of the image (Sec. 3.1, "Hybrid Architecture").

    (B, C, H, W) -> backbone (B, c, h, w) -> (B, N, D). `patch_size` stays in pixels of the image.

    Args:
        backbone: any module that gives one map (B, c, h, w).
        channels: c.
        stride: pixels for one cell of the map, (down, across); must divide `patch_size`.
        **patches: as for `PatchEmbedding`.

    Raises:
        ShapeError: at call time, as `PatchEmbedding`, and for a map that makes another grid.
    """

    def __init__(
        self, backbone: nn.Module, channels: int, stride: tuple[int, int], **patches: Any
    ) -> None:
        super().__init__(**patches)
        cells = (self.patch_size[0] // stride[0], self.patch_size[1] // stride[1])
        self.backbone = backbone
        self.proj = nn.Conv2d(channels, patches["width"], cells, cells, bias=patches["bias"])

    def forward(self, images: Images) -> Tokens:
        """Return x_p E with x_p from the feature map."""
        rows, columns = self.grid(images)
        cells = self.proj(self.backbone(images))
        if cells.shape[2:] != (rows, columns):
            raise ShapeError(
                f"the backbone returns {cells.shape[2]} x {cells.shape[3]} patches for images of "
                f"{images.shape[2]} x {images.shape[3]}; expected {rows} x {columns}"
            )
        return cells.flatten(2).transpose(1, 2)  # B D gh gw -> B N D


STEMS = {"convolution": PatchEmbedding, "linear": LinearPatchEmbedding}
STEMS["normed_linear"] = NormedPatchEmbedding


def make_stem(spec: ViTSpec, backbone: nn.Module | None) -> PatchEmbedding:
    """Create the stem of a spec; `SpecError` if it and the backbone do not fit each other."""
    if spec.stem == "backbone" and backbone is None:
        raise SpecError("stem 'backbone' needs a network; pass ViT(spec, backbone=...)")
    if spec.stem != "backbone" and backbone is not None:
        raise SpecError(f"stem {spec.stem!r} takes no backbone; set stem to 'backbone'")
    common = {name: getattr(spec, name) for name in ("in_channels", "patch_size", "width")}
    common["bias"] = spec.patch_bias
    if backbone is not None:
        channels, stride = _probe(backbone, spec)
        return HybridEmbedding(backbone, channels, stride, **common)
    if spec.stem == "resnet":
        network = resnet(spec.in_channels, spec.resnet_layers, spec.resnet_variant)
        stride = (network.stride, network.stride)
        return HybridEmbedding(network, network.out_channels, stride, **common)
    return STEMS[spec.stem](**common)


def _probe(backbone: nn.Module, spec: ViTSpec) -> tuple[int, tuple[int, int]]:
    """Measure channels and stride of a backbone's map, by one run on a black image."""
    like = next(backbone.parameters(), torch.empty(0))
    with eval_mode(backbone), torch.no_grad():  # its running statistics stay as they are
        feature_map = backbone(like.new_zeros(1, spec.in_channels, *spec.image_size))
    if not isinstance(feature_map, Tensor) or feature_map.ndim != 4 or not feature_map.numel():
        raise SpecError("the backbone must return one map (B, c, h, w)")
    height, width = feature_map.shape[2:]
    for patch, image, cells in zip(spec.patch_size, spec.image_size, (height, width), strict=True):
        if image % cells or patch % (image // cells):
            raise SpecError(
                f"the backbone returns {cells} cells for {image} pixels, and patch_size {patch} "
                f"is not a multiple of {image / cells:g} pixels; choose one that is"
            )
    return feature_map.shape[1], (spec.image_size[0] // height, spec.image_size[1] // width)


class Embedding(nn.Module):
    """Eq. 1: put the prefix tokens before the embedded patches, add positions, then dropout.

    The tokens and the table belong to the model, under timm's keys `cls_token` and `pos_embed`;
    they are handed in, so that this module has no parameters.

    Args:
        positions: computes the table to add, `LearnedPositions` or `FixedPositions`.
        dropout: rate once, after positions are added.
    """

    def __init__(self, positions: nn.Module, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.positions = positions
        self.pos_drop = nn.Dropout(dropout)

    def forward(
        self,
        patches: Float[Tensor, "B N D"],
        grid: Grid,
        prefix: Float[Tensor, "1 R D"],
        pos_embed: Float[Tensor, "1 T0 D"] | None,
    ) -> Tokens:
        """Return [x_class; x_p E] + E_pos; 0 for a prefix that the table leaves out."""
        tokens = torch.cat([prefix.expand(patches.shape[0], -1, -1), patches], dim=1)
        table = self.positions(pos_embed, grid, tokens)
        missing = tokens.shape[1] - table.shape[1]  # R, or 0 if the table has them
        return self.pos_drop(tokens + F.pad(table, (0, 0, missing, 0)))


def make_embedding(spec: ViTSpec) -> Embedding:
    """Create the `Embedding` of a spec, with its kind of positions."""
    positions: nn.Module = FixedPositions(spec.positions)
    if spec.position_rows:
        positions = LearnedPositions(spec.grid, spec.position_resampling)
    return Embedding(positions, dropout=spec.position_dropout)


class PatchDropout(nn.Module):
    """Dropout of whole patch tokens of each image in training: "PatchDropout" (arXiv 2208.07220).

    A share `rate` of an image's patches is dropped, never all; the `prefix` tokens before stay.
    """

    def __init__(self, rate: float, prefix: int) -> None:
        super().__init__()
        self.rate, self.prefix = rate, prefix

    def forward(
        self, tokens: Tokens, rotation: Rotation | None
    ) -> tuple[Float[Tensor, "B _ D"], Rotation | None]:
        """Return the kept tokens, in their order, and their rotary angles."""
        if self.rate == 0.0 or not self.training:
            return tokens, rotation
        batch, count, width = tokens.shape
        patches = count - self.prefix
        keep = max(1, round(patches * (1 - self.rate)))
        order = torch.rand(batch, patches, device=tokens.device).argsort(dim=1)
        indices = order[:, :keep].sort(dim=1).values + self.prefix  # in the patches' order
        prefix = torch.arange(self.prefix, device=tokens.device).expand(batch, -1)
        indices = torch.cat([prefix, indices], dim=1)
        if rotation is not None:
            sin, cos = rotation
            rotation = sin[indices].unsqueeze(1), cos[indices].unsqueeze(1)  # B 1 T h
        return tokens.gather(1, indices.unsqueeze(-1).expand(-1, -1, width)), rotation


# Positions: a table (1, T, D) is added to the tokens (Eq. 1); its prefix rows may be zero. Learned
# ones are resampled for images of another size (Sec. 3.2), fixed ones computed for the grid at
# hand.


class LearnedPositions(nn.Module):
    """The model's learned table, resampled for another grid than `base_grid` (gh, gw)."""

    def __init__(self, base_grid: Grid, resampling: str = "bicubic_antialias") -> None:
        super().__init__()
        self.base_grid, self.resampling = base_grid, resampling

    def forward(self, pos_embed: Tensor | None, grid: Grid, tokens: Tokens) -> Tensor:
        """Return (1, T, D), or (1, N, D) of a table without prefix rows, for this grid."""
        assert pos_embed is not None
        return resample_positions(pos_embed, self.base_grid, grid, self.resampling)


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
