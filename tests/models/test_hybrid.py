"""The ResNet stem of the hybrids: against timm's, and each variant against plain algebra."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from peers import peer, relative
from torch import nn

from vitkit.models.hybrid import VARIANTS, Bottleneck, ResNetV2, StdConv2d, pad_same, resnet

TOLERANCE = 1e-5
ALL = sorted(VARIANTS)
DIVISOR = {
    "published": lambda std: std + 1e-5,
    "timm": lambda std: np.sqrt(std**2 + 1e-8),
    "jeonsworld": lambda std: np.sqrt(std**2 + 1e-5),
}
NORM_EPS = {"published": (1e-6, 1e-6), "timm": (1e-5, 1e-5), "jeonsworld": (1e-6, 1e-5)}


def noisy(module: nn.Module, seed: int = 0) -> nn.Module:
    fill_with_noise(module, seed)
    return module.eval()


def random_images(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(5))


def plain_convolution(images, kernel, stride, variant):
    """One output pixel at a time, in float64, with its own padding and standardisation."""
    size, sides = kernel.shape[-1], images.shape[-2:]
    if variant == "jeonsworld":
        before = [size // 2] * 2
        outs = [(side + 2 * (size // 2) - size) // stride + 1 for side in sides]
    else:
        outs = [-(-side // stride) for side in sides]
        total = [max((n - 1) * stride + size - s, 0) for n, s in zip(outs, sides, strict=True)]
        before = [zeros // 2 for zeros in total]
    mean = kernel.mean(axis=(1, 2, 3), keepdims=True)
    std = np.sqrt(((kernel - mean) ** 2).mean(axis=(1, 2, 3), keepdims=True))
    filters = (kernel - mean) / DIVISOR[variant](std)
    wide = np.pad(images, [(0, 0), (0, 0)] + [(b, size + stride) for b in before])
    result = np.empty((len(images), len(kernel), *outs))
    for i in range(outs[0]):
        for j in range(outs[1]):
            top, left = i * stride, j * stride
            window = wide[:, :, top : top + size, left : left + size]
            result[:, :, i, j] = np.einsum("bcpq,fcpq->bf", window, filters)
    return result


def plain_pool(x, variant):
    """The largest of 3 x 3 pixels at stride 2; only jeonsworld's windows all lie inside."""
    inside = variant == "jeonsworld"
    outs = [(side - 3) // 2 + 1 if inside else -(-side // 2) for side in x.shape[-2:]]
    tops = [0 if inside or side % 2 == 0 else 1 for side in x.shape[-2:]]
    result = np.empty((*x.shape[:2], *outs))
    for i in range(outs[0]):
        for j in range(outs[1]):
            top, left = 2 * i - tops[0], 2 * j - tops[1]
            window = x[:, :, max(top, 0) : top + 3, max(left, 0) : left + 3]
            result[:, :, i, j] = window.max(axis=(2, 3))
    return result


def plain_group_norm(x, groups, eps):
    parts = x.reshape(len(x), groups, -1)
    variance = parts.var(axis=2, keepdims=True)
    return ((parts - parts.mean(axis=2, keepdims=True)) / np.sqrt(variance + eps)).reshape(x.shape)


def swapped(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The last norm's weight and bias in each other's place, about their own identities."""
    weight = [name for name in state if name.endswith(("norm.weight", "norm3.weight"))][-1]
    bias = weight.replace(".weight", ".bias")
    return {**state, weight: state[bias] + 1.0, bias: state[weight] - 1.0}


@pytest.mark.parametrize(
    ("layers", "dtype", "tolerance"),
    [
        ((), torch.float32, TOLERANCE),
        ((1, 1, 1), torch.float32, TOLERANCE),
        ((2, 1, 1, 1), torch.float32, TOLERANCE),
        # 16 blocks of noise turn float32's rounding into 4e-5, timm's against itself as well.
        ((3, 4, 9), torch.float32, 1e-4),
        ((3, 4, 9), torch.float64, 1e-11),
    ],
    ids=str,
)
def test_features_equal_timm_s_with_the_same_weights(layers, dtype, tolerance):
    ours, theirs = (
        resnet(3, layers, "timm").eval(),
        noisy(peer("timm.models.vision_transformer_hybrid")._resnetv2(layers)).eval(),
    )
    ours.load_state_dict(theirs.state_dict(), strict=True)
    ours, theirs = ours.to(dtype), theirs.to(dtype)
    with torch.inference_mode():
        for size in ((64, 64), (96, 64), (75, 101)):
            images = random_images(2, 3, *size).to(dtype)
            expected = theirs(images)
            assert relative(ours(images), expected) <= tolerance
            rounded_up = tuple(-(-side // ours.stride) for side in size)
            assert expected.shape == (2, ours.out_channels, *rounded_up)
        # The control: two keys swapped must show.
        ours.load_state_dict(swapped(ours.state_dict()))
        assert relative(ours(images), expected) > 10 * tolerance


@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize(("kernel", "stride"), [(7, 2), (3, 2), (3, 1), (1, 2), (1, 1)])
def test_a_convolution_is_its_plain_restatement(variant, kernel, stride):
    part = StdConv2d(3, 4, kernel, stride, VARIANTS[variant])
    # Small filters and a mean that is not 0: there the epsilons of the variants tell.
    part.weight.data.copy_(random_images(*part.weight.shape, scale=3e-3) + 0.01)
    for size in ((9, 14), (12, 11)):
        images = random_images(2, 3, *size)
        weight = part.weight.detach().double().numpy()
        expected = plain_convolution(images.double().numpy(), weight, stride, variant)
        with torch.inference_mode():
            assert relative(part(images).double(), torch.from_numpy(expected)) <= TOLERANCE
        for other in {*ALL} - {variant}:
            theirs = plain_convolution(images.double().numpy(), weight, stride, other)
            assert theirs.shape != expected.shape or (
                np.abs(theirs - expected).max() > 100 * TOLERANCE * np.abs(expected).max()
            )


@pytest.mark.parametrize("variant", ALL)
def test_the_norms_are_their_plain_restatement(variant):
    block = Bottleneck(64, 256, 1, VARIANTS[variant])
    eps, shortcut_eps = NORM_EPS[variant]
    shortcut_groups = 256 if variant == "jeonsworld" else 32
    for norm, groups, added in (
        (block.norm1, 32, eps),
        (block.norm2, 32, eps),
        (block.downsample.norm, shortcut_groups, shortcut_eps),
        (ResNetV2(3, (1, 1), variant).stem.norm, 32, eps),
    ):
        x = random_images(2, norm.num_channels, 3, 5, scale=1e-3)
        expected = plain_group_norm(x.double().numpy(), groups, added)
        with torch.inference_mode():
            assert relative(norm(x).double(), torch.from_numpy(expected)) <= TOLERANCE


@pytest.mark.parametrize("variant", ALL)
@pytest.mark.parametrize("size", [(32, 24), (30, 21)])
def test_the_root_is_its_plain_restatement(variant, size):
    root = ResNetV2(3, (1, 1), variant).stem
    images = random_images(2, 3, *size)
    weight = root.conv.weight.detach().double().numpy()
    x = plain_convolution(images.double().numpy(), weight, 2, variant)
    x = plain_pool(np.maximum(plain_group_norm(x, 32, NORM_EPS[variant][0]), 0), variant)
    with torch.inference_mode():
        assert relative(root(images).double(), torch.from_numpy(x)) <= TOLERANCE


def test_same_padding_rounds_up_and_puts_the_odd_zero_last():
    for kernel, stride in ((3, 2), (7, 2), (5, 3)):
        for side in range(1, 12):
            padded = pad_same(torch.ones(1, 1, side, 8), kernel, stride)
            assert padded.shape[2] == (-(-side // stride) - 1) * stride + kernel
    assert pad_same(torch.ones(1, 1, 1, 4), 3, 2)[0, 0].tolist() == [
        [0.0, 0.0, 0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0, 1.0, 0.0],
        [0.0, 0.0, 0.0, 0.0, 0.0],
    ]


@pytest.mark.parametrize("variant", ALL)
def test_a_constant_kernel_gives_zeros_and_a_finite_gradient(variant):
    part = StdConv2d(3, 4, 3, 2, VARIANTS[variant])
    nn.init.constant_(part.weight, 0.5)
    features = part(random_images(1, 3, 8, 8))
    assert not features.any()
    features.sum().backward()
    assert part.weight.grad.isfinite().all()


def test_a_fresh_block_is_its_shortcut():
    block, x = Bottleneck(256, 256, 1, VARIANTS["published"]), random_images(1, 256, 4, 4)
    assert torch.equal(block(x), x.relu())
