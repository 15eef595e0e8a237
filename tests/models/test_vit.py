"""The ViT as people use it: shapes, sizes, errors, records, initial weights."""

import math

import pytest
import torch
from noise import fill_with_noise

import vitkit
from vitkit import ShapeError

SMALL = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 3, "num_heads": 4,
         "mlp_width": 64, "num_classes": 7}  # fmt: skip


def small(**overrides: object) -> vitkit.ViT:
    model = vitkit.ViT(vitkit.ViTSpec(**SMALL | overrides)).eval()
    fill_with_noise(model, std=0.2)
    return model


@pytest.mark.parametrize("stem", ["convolution", "linear"])
def test_shapes_with_and_without_head_at_any_size(stem):
    model = small(stem=stem)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert model(torch.randn(1, 3, 48, 40)).shape == (1, 7)
    headless = small(num_classes=0, stem=stem)
    images = torch.randn(2, 3, 32, 32)
    features = headless.forward_features(images)
    assert headless(images).shape == (2, 32)
    torch.testing.assert_close(headless(images), features.cls)
    assert features.grid == (4, 4)
    assert features.patches.shape == (2, 16, 32)


def test_the_linear_stem_is_the_convolution_and_its_stream_is_contiguous():
    convolution, linear = small(patch_size=(8, 4)), small(patch_size=(8, 4), stem="linear")
    linear.load_state_dict(convolution.state_dict())
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(linear(images), convolution(images), rtol=1e-5, atol=1e-5)
    assert linear.patch_embed(images).is_contiguous()


@pytest.mark.parametrize("shape", [(1, 1, 32, 32), (1, 3, 33, 32), (1, 3, 32, 36)])
def test_an_image_that_does_not_fit_is_named_with_what_was_expected(shape):
    sides = " x ".join(map(str, shape[1:]))
    with pytest.raises(ShapeError, match=rf"images are {sides}.*expected 3.*the patch, 8 x 8"):
        small()(torch.zeros(*shape))


def test_dropout_rates_are_separate_and_off_in_eval_mode():
    for rate in (
        "position_dropout",
        "attention_dropout",
        "projection_dropout",
        "mlp_dropout",
        "drop_path",
    ):
        model, images = small(**{rate: 0.5}), torch.randn(4, 3, 32, 32)
        plain = small()
        plain.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(images), plain(images))
        torch.manual_seed(0)
        assert (model.train()(images) - plain(images)).abs().max() > 1e-3, rate


def test_drop_path_drops_whole_images_and_keeps_the_mean():
    from vitkit.models.layers import DropPath

    torch.manual_seed(0)
    out = DropPath(0.25).train()(torch.ones(4000, 3, 2))
    assert out.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert (out.flatten(1).std(dim=1) == 0).all()
    assert abs(out.mean().item() - 1) < 0.05


def test_initial_weights_are_the_published_jax_code_s():
    torch.manual_seed(0)
    model = vitkit.create_model("vit_small_patch16_224", num_classes=10)
    kernel = model.patch_embed.proj.weight
    assert kernel.std().item() == pytest.approx(math.sqrt(1 / 768), rel=0.02)
    assert kernel.abs().max() <= 2 * math.sqrt(1 / 768) / 0.8796 + 1e-6
    assert model.cls_token.abs().max() == 0
    assert model.pos_embed.std().item() == pytest.approx(0.02, rel=0.02)
    block = model.blocks[5]
    for matrix in block.attn.qkv.weight.chunk(3):  # Xavier on each projection by itself
        bound = math.sqrt(6 / (384 + 384))
        assert matrix.abs().max() <= bound
        assert matrix.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    assert block.mlp.fc1.weight.std().item() == pytest.approx(math.sqrt(2 / (384 + 1536)), rel=0.02)
    assert block.mlp.fc1.bias.std().item() == pytest.approx(1e-6, rel=0.2)
    assert block.attn.qkv.bias.abs().max() == block.attn.proj.bias.abs().max() == 0
    assert model.head.weight.abs().max() == model.head.bias.abs().max() == 0
