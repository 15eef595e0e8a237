"""From an image to tokens: Eq. 1 of "An Image is Worth 16x16 Words" (arXiv 2010.11929).

z_0 = [x_class; x_p^1 E; ...; x_p^N E] + E_pos. `PatchEmbedding` is x_p E, `Embedding` the rest.
"""

from typing import Any

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
from vitkit.spec import ViTSpec


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
