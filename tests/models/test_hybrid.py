"""The ResNet stem of the hybrids: against timm's, and the norms of each code."""

import pytest
import torch
from noise import fill_with_noise
from peers import peer, relative
from torch import nn

from vitkit.models.hybrid import VARIANTS, Bottleneck, ResNetV2, StdConv2d, resnet

TOLERANCE = 1e-5
ALL = sorted(VARIANTS)


def noisy(module: nn.Module, seed: int = 0) -> nn.Module:
    fill_with_noise(module, seed)
    return module.eval()


def random_images(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(5))


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


@pytest.mark.parametrize(
    ("variant", "eps", "shortcut_groups", "shortcut_eps"),
    [("published", 1e-6, 32, 1e-6), ("timm", 1e-5, 32, 1e-5), ("jeonsworld", 1e-6, 256, 1e-5)],
)
def test_the_norms_of_each_code(variant, eps, shortcut_groups, shortcut_eps):
    """tests/weights holds the logits of all three against their codes."""
    block, net = Bottleneck(64, 256, 1, VARIANTS[variant]), ResNetV2(3, (1, 1), variant)
    for norm in (block.norm1, block.norm2, block.norm3, net.stem.norm):
        assert (norm.num_groups, norm.eps) == (32, eps)
    assert block.downsample.norm.num_groups == shortcut_groups
    assert block.downsample.norm.eps == shortcut_eps
