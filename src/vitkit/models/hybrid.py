"""The convolutional stem of the hybrid ViTs: a ResNet whose feature map is cut into tokens.

"An Image is Worth 16x16 Words" (arXiv 2010.11929, Sec. 3.1 and 4.1) and "How to train your ViT?"
(arXiv 2106.10270). R50+B/16 has `layers` (3, 4, 9), R50+L/32 (3, 4, 6, 3), R26+S/32 (2, 2, 2, 2)
and R+Ti/16 none: its name counts one stride of 2 only, its 8 x 8 patches are 32 pixels apart.
"""

from typing import NamedTuple, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.shapes import Images
from vitkit.spec import ResNetVariant

Layers: TypeAlias = tuple[int, ...]
GROUPS, ROOT_WIDTH, STAGE_WIDTHS = 32, 64, (256, 512, 1024, 2048)


class StemVariant(NamedTuple):
    """The differences between the published stem and its two rewritings in PyTorch.

    A kernel is divided by sqrt(var + weight_eps) if `inside_root`, else by std + weight_eps.
    Padding is TensorFlow's SAME, or else k // 2 on each side and none for the max pool. The norm
    of the shortcut has an epsilon and groups of its own; None groups: one per channel.
    """

    weight_eps: float
    inside_root: bool
    norm_eps: float
    same_padding: bool
    shortcut_eps: float
    shortcut_groups: int | None


VARIANTS = {
    "published": StemVariant(1e-5, False, 1e-6, True, 1e-6, GROUPS),
    "timm": StemVariant(1e-8, True, 1e-5, True, 1e-5, GROUPS),
    "jeonsworld": StemVariant(1e-5, True, 1e-6, False, 1e-5, None),
}
"""published: google-research/vision_transformer, vit_jax/models_{resnet,vit}.py; flax's GroupNorm.
timm: models/vision_transformer_hybrid.py (`_resnetv2`), layers/norm_act.py (`GroupNormAct`).
jeonsworld: ViT-pytorch, models/modeling_resnet.py; the 1e-5 of its shortcut is torch's default."""
assert set(VARIANTS) == set(get_args(ResNetVariant)), "spec.ResNetVariant lists these"


def standardise(kernel: Float[Tensor, "F C P Q"], variant: StemVariant) -> Float[Tensor, "F C P Q"]:
    """Scale each filter to mean 0 and deviation 1 (Weight Standardization, arXiv 1903.10520).

    >>> standardise(torch.tensor([1.0, 3.0]).view(1, 2, 1, 1), VARIANTS["timm"]).flatten().tolist()
    [-1.0, 1.0]
    """
    std, mean = torch.std_mean(kernel, dim=(1, 2, 3), correction=0, keepdim=True)  # F 1 1 1
    if variant.inside_root:
        return (kernel - mean) / (std.square() + variant.weight_eps).sqrt()
    return (kernel - mean) / (std + variant.weight_eps)


def pad_same(images: Images, kernel: int, stride: int) -> Float[Tensor, "B C h w"]:
    """Pad with zeros as TensorFlow's SAME, the odd one right and below; kernel >= stride."""
    down, across = (kernel - stride + -side % stride for side in images.shape[-2:])
    return F.pad(images, (across // 2, across - across // 2, down // 2, down - down // 2))


class StdConv2d(nn.Conv2d):
    """A convolution without bias by the standardised kernel: (B, C, H, W) -> (B, F, H/s, W/s)."""

    def __init__(
        self, channels: int, width: int, kernel: int, stride: int, variant: StemVariant
    ) -> None:
        # At stride 1 SAME is symmetric, and a 1 x 1 kernel needs no zeros.
        pads = variant.same_padding and stride > 1 and kernel > 1
        super().__init__(channels, width, kernel, stride, 0 if pads else kernel // 2, bias=False)
        self.pads = pads
        self.variant = variant

    def forward(self, images: Images) -> Float[Tensor, "B F h w"]:
        if self.pads:
            images = pad_same(images, self.kernel_size[0], self.stride[0])
        kernel = standardise(self.weight, self.variant)
        return F.conv2d(images, kernel, None, self.stride, self.padding)


class Root(nn.Module):
    """7 x 7 convolution, norm, ReLU, 3 x 3 max pool: (B, C, H, W) -> (B, 64, H/4, W/4)."""

    out_channels, stride = ROOT_WIDTH, 4

    def __init__(self, in_channels: int, variant: StemVariant) -> None:
        super().__init__()
        self.conv = StdConv2d(in_channels, ROOT_WIDTH, 7, 2, variant)
        self.norm = nn.GroupNorm(GROUPS, ROOT_WIDTH, eps=variant.norm_eps)
        self.pads = variant.same_padding

    def forward(self, images: Images) -> Float[Tensor, "B F h w"]:
        """Return (B, 64, H/4, W/4); without SAME padding the sides are H/4 - 1 and W/4 - 1."""
        features = F.relu(self.norm(self.conv(images)))
        if self.pads:  # after a ReLU no zero wins over a pixel, so zeros pad the pool as well
            features = pad_same(features, 3, 2)
        return F.max_pool2d(features, 3, 2)


class Bottleneck(nn.Module):
    """relu(shortcut + 1x1, 3x3 with stride s, 1x1): (B, C, H, W) -> (B, F, H/s, W/s)."""

    def __init__(self, channels: int, width: int, stride: int, variant: StemVariant) -> None:
        super().__init__()
        inner = width // 4  # the 3 x 3 convolution is a quarter as wide
        self.downsample = nn.Sequential()
        if channels != width:
            groups = variant.shortcut_groups or width
            self.downsample.add_module("conv", StdConv2d(channels, width, 1, stride, variant))
            self.downsample.add_module(
                "norm", nn.GroupNorm(groups, width, eps=variant.shortcut_eps)
            )
        self.conv1 = StdConv2d(channels, inner, 1, 1, variant)
        self.norm1 = nn.GroupNorm(GROUPS, inner, eps=variant.norm_eps)
        self.conv2 = StdConv2d(inner, inner, 3, stride, variant)
        self.norm2 = nn.GroupNorm(GROUPS, inner, eps=variant.norm_eps)
        self.conv3 = StdConv2d(inner, width, 1, 1, variant)
        self.norm3 = nn.GroupNorm(GROUPS, width, eps=variant.norm_eps)
        nn.init.zeros_(self.norm3.weight)  # as published: a fresh block is its shortcut

    def forward(self, x: Images) -> Float[Tensor, "B F h w"]:
        """Apply a norm after each convolution, a ReLU after the first two norms and the sum."""
        branch = F.relu(self.norm1(self.conv1(x)))
        branch = F.relu(self.norm2(self.conv2(branch)))
        return F.relu(self.downsample(x) + self.norm3(self.conv3(branch)))


class ResNetV2(nn.Module):
    """Root, then stages of bottlenecks: (B, C, H, W) -> (B, out_channels, H/stride, W/stride).

    `stride`, 4, and `out_channels`, 256, double with each later stage; SAME rounds up. Keys are
    timm's, so that its `patch_embed.backbone.*` load as they are. `ViTSpec` checks the arguments.
    """

    def __init__(self, in_channels: int, layers: Layers, variant: str = "published") -> None:
        super().__init__()
        details = VARIANTS[variant]
        self.stem, self.stages = Root(in_channels, details), nn.Sequential()
        self.out_channels, self.stride = Root.out_channels, Root.stride
        for index, (depth, width) in enumerate(zip(layers, STAGE_WIDTHS, strict=False)):
            step = 2 if index else 1  # the root has made the first stage smaller already
            blocks = [Bottleneck(self.out_channels, width, step, details)]
            blocks += [Bottleneck(width, width, 1, details) for _ in range(depth - 1)]
            self.stages.append(nn.Sequential())
            self.stages[-1].add_module("blocks", nn.Sequential(*blocks))
            self.out_channels, self.stride = width, self.stride * step

    def forward(self, images: Images) -> Float[Tensor, "B F h w"]:
        return self.stages(self.stem(images))


def resnet(in_channels: int, layers: Layers, variant: str = "published") -> Root | ResNetV2:
    """Create a `ResNetV2`, or without `layers` its root alone, as timm names it (`conv.weight`)."""
    network = ResNetV2(in_channels, layers, variant)
    return network if layers else network.stem
