"""The plain ViT of chapter 0 computes what vitkit's and timm's classes do with its weights."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch

import vitkit

FILE = Path(__file__).parents[2] / "docs" / "tutorial" / "plain_vit.py"
SIZES = [
    {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 10, "width": 64, "depth": 3,
     "heads": 8, "hidden": 128},
    {"image_size": 32, "patch_size": 8, "channels": 3, "classes": 5, "width": 48, "depth": 2,
     "heads": 3, "hidden": 96},
]  # fmt: skip


def plain(**sizes: int) -> torch.nn.Module:
    """A model with random positions, norms and class token, in eval mode."""
    found = spec_from_file_location("plain_vit", FILE)
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    torch.manual_seed(0)
    model = module.PlainViT(**sizes).eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights += 0.1 * torch.randn_like(weights)
    return model


@pytest.mark.parametrize("sizes", SIZES)
def test_the_plain_vit_equals_vitkits_with_the_same_weights(sizes):
    model = plain(**sizes)
    spec = vitkit.ViTSpec(
        image_size=sizes["image_size"], patch_size=sizes["patch_size"],
        in_channels=sizes["channels"], num_classes=sizes["classes"], width=sizes["width"],
        depth=sizes["depth"], num_heads=sizes["heads"], mlp_width=sizes["hidden"],
    )  # fmt: skip
    ours = vitkit.ViT(spec).eval()
    ours.load_state_dict(model.state_dict())
    images = torch.randn(3, sizes["channels"], sizes["image_size"], sizes["image_size"])
    with torch.no_grad():
        torch.testing.assert_close(model(images), ours(images), rtol=0, atol=1e-4)


def test_attention_weights_are_kept_and_each_row_sums_to_1():
    model = plain(**SIZES[0])
    with torch.no_grad():
        model(torch.randn(2, 1, 8, 8))
    for block in model.blocks:
        assert block.attn.weights.shape == (2, 8, 17, 17)
        torch.testing.assert_close(block.attn.weights.sum(-1), torch.ones(2, 8, 17))


def test_the_file_fits_a_page():
    """It is not formatted by a tool, because the columns of its comments are set by hand."""
    lines = FILE.read_text(encoding="utf-8").splitlines()
    assert max(map(len, lines)) <= 88
    shapes = [line.rindex("(") for line in lines if line[53:55] == "# "]
    assert len(shapes) >= 15
    assert len(set(shapes)) == 1, "shapes stand below each other"


def test_patches_that_do_not_fill_the_image_are_refused():
    """Without the check, the convolution drops the border, and positions are too many."""
    with pytest.raises(AssertionError, match="the patches must fill the image"):
        plain(**(SIZES[0] | {"image_size": 9}))
