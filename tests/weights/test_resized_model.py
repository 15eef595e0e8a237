"""Other patch and image sizes from the same weights."""

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from torch import nn
from torch.nn import functional as F

import vitkit
from vitkit import CheckpointError, SpecError
from vitkit.weights.write import resize_kernel

SMALL = {"image_size": 32, "patch_size": 8, "width": 16, "depth": 2, "num_heads": 2,
         "mlp_width": 32, "num_classes": 5}  # fmt: skip


def small(**fields: object) -> vitkit.ViT:
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL | fields)).eval()
    fill_with_noise(model, std=0.3)
    return model


def test_an_enlarged_patch_gives_the_token_that_the_patch_gave():
    """FlexiViT, Sec. 3.4: <x, w> = <B x, w'> for every x when B enlarges."""
    kernel, patch = torch.randn(6, 3, 8, 8), torch.randn(4, 3, 8, 8)
    larger = F.interpolate(patch, size=(12, 16), mode="bilinear", antialias=True)
    before = torch.einsum("dchw,bchw->bd", kernel, patch)
    after = torch.einsum("dchw,bchw->bd", resize_kernel(kernel, (12, 16)), larger)
    torch.testing.assert_close(before, after, rtol=0, atol=2e-4)
    plain = F.interpolate(kernel, size=(12, 16), mode="bilinear")
    assert (torch.einsum("dchw,bchw->bd", plain, larger) - before).abs().max() > 1


def test_a_smaller_kernel_is_the_least_squares_answer():
    """Eq. 4: w' minimises |<x, w> - <B x, w'>| for white x, so w' = pinv(B^T) w."""
    kernel = torch.randn(1, 1, 8, 8, dtype=torch.float64)
    basis = torch.eye(64, dtype=torch.float64).reshape(64, 1, 8, 8)
    resize = F.interpolate(basis, size=(5, 6), mode="bilinear", antialias=True).flatten(1).numpy()
    expected, *_ = np.linalg.lstsq(resize, kernel.flatten().numpy(), rcond=None)
    made = resize_kernel(kernel, (5, 6))
    np.testing.assert_allclose(made.flatten().numpy(), expected, atol=1e-10)


def test_a_model_for_other_patches_and_images():
    model = small(num_registers=1)
    other = vitkit.resized(model, image_size=(48, 36), patch_size=12)
    assert (other.spec.grid, other.spec.patch_size) == ((4, 3), (12, 12))
    assert other(torch.randn(1, 3, 48, 36)).shape == (1, 5)
    assert torch.equal(other.blocks[1].attn.qkv.weight, model.blocks[1].attn.qkv.weight)
    assert torch.equal(other.pos_embed[:, :2], model.pos_embed[:, :2])
    assert model.spec.image_size == (32, 32)
    larger = F.interpolate(images := torch.randn(2, 3, 32, 32), size=48, mode="bilinear")
    doubled = vitkit.resized(model, image_size=48, patch_size=12)
    assert (doubled(larger) - model(images)).abs().max() < 0.5 * model(images).abs().max()


def test_another_image_size_alone_computes_what_the_run_time_does():
    model, images = small(), torch.randn(2, 3, 48, 40)
    torch.testing.assert_close(vitkit.resized(model, image_size=(48, 40))(images), model(images))


@pytest.mark.parametrize(
    "head", [nn.Linear(16, 3), nn.Linear(16, 7, bias=False), nn.Identity()], ids=str
)
def test_a_head_that_was_replaced_is_kept(head):
    model, images = small(), torch.randn(2, 3, 48, 40)
    model.head = head
    model.eval()
    other = vitkit.resized(model, image_size=(48, 40))
    torch.testing.assert_close(other(images), model(images))
    assert other.spec.num_classes == model.num_classes


@pytest.mark.usefixtures("wrong_types_come_in")
def test_a_checkpoint_is_refused_with_what_to_call():
    checkpoint = vitkit.Checkpoint(small(), vitkit.Preprocess(), ())
    with pytest.raises(CheckpointError, match=r"such as checkpoint\.model, not a Checkpoint; to"):
        vitkit.resized(checkpoint, patch_size=4)


def test_stems_without_a_pixel_kernel_are_refused():
    with pytest.raises(SpecError, match="stem 'normed_linear' cannot be resized"):
        vitkit.resized(small(stem="normed_linear"), image_size=24, patch_size=4)
    with pytest.raises(SpecError, match="not divisible by patch_size 5"):
        vitkit.resized(small(), patch_size=5)
