"""lucidrains' files: read as its newest classes compute, and written for them."""

from __future__ import annotations

import pytest
import torch
from peers import peer
from safetensors.torch import save_file
from torch import nn
from weights.lucidrains_models import check_read, theirs
from weights.round_trips import noisy, same_bits, stored, written

import vitkit

OURS = {"image_size": 32, "patch_size": 8, "num_classes": 7, "width": 128, "depth": 2,
        "num_heads": 2, "mlp_width": 96, "stem": "normed_linear", "qkv_bias": False,
        "norm_eps": 1e-5}  # fmt: skip
MEAN = {"pooling": "mean", "class_token": False}
PLAIN = {"stem": "convolution"}
SIMPLE = MEAN | {"positions": "sincos_2d"}
SWAPPED = ("transformer.layers.0.0.norm.weight", "transformer.layers.0.1.net.0.weight")


@pytest.mark.parametrize("kind", ["cls", "mean"])
def test_their_model_saved_by_torch_is_computed_by_ours(tmp_path, kind):
    checkpoint = check_read(theirs(kind), tmp_path)
    assert checkpoint.model.spec.pooling == kind
    assert checkpoint.metadata["sure"]["num_heads"] == "usual"


def test_their_simple_model_is_computed_by_ours(tmp_path):
    checkpoint = check_read(theirs("simple"), tmp_path, image_size=32)
    assert checkpoint.model.spec.positions == "sincos_2d"
    guessed = vitkit.load(tmp_path / "vit.pt", trust_pickle=True)
    assert guessed.model.spec.image_size == (256, 256)
    assert any("image_size (256, 256) is a guess" in w for w in guessed.metadata["warnings"])


@pytest.mark.parametrize("overrides", [{"num_heads": 4}, {"head_width": 48}, {}])
def test_heads_are_64_wide_by_default(tmp_path, overrides):
    model = theirs(heads=4, dim_head=48)
    if overrides:
        spec = check_read(model, tmp_path, **overrides).model.spec
        assert (spec.num_heads, spec.head_width) == (4, 48)
    else:
        torch.save(model.state_dict(), tmp_path / "vit.pt")
        spec = vitkit.load(tmp_path / "vit.pt", trust_pickle=True).model.spec
        assert (spec.num_heads, spec.head_width) == (3, 64)


def ours(**fields: object) -> vitkit.ViT:
    return noisy(vitkit.ViTSpec(**OURS | fields))


@pytest.mark.parametrize("kind", ["cls", "mean", "simple"])
def test_theirs_comes_back_with_the_same_bits(tmp_path, kind):
    model = theirs(kind)
    save_file(model.state_dict(), tmp_path / "theirs.safetensors")
    read = vitkit.load(tmp_path / "theirs.safetensors").model
    same_bits(model.state_dict(), stored(written("lucidrains", read, tmp_path / "again")))


def converted(folder, model: vitkit.ViT, **options: object) -> vitkit.ConversionReport:
    vitkit.save(folder / "ours.safetensors", model, preprocess=vitkit.Preprocess())
    return vitkit.convert(folder / "ours.safetensors", folder / "out", to="lucidrains", **options)


def test_a_plain_vit_loses_its_biases_of_attention_or_has_none(tmp_path):
    model = ours(**PLAIN, qkv_bias=True)
    with pytest.raises(vitkit.CheckpointError, match="cannot store: qkv_bias: the biases of"):
        converted(tmp_path, model)
    report = converted(tmp_path, model, allow_lossy=True)
    assert report.lost == ("qkv_bias: the biases of query, key and value",)
    assert report.max_difference > 1e-4
    for block in model.blocks:
        nn.init.zeros_(block.attn.qkv.bias)
    (tmp_path / "out" / "model.safetensors").unlink()
    report = converted(tmp_path, model)
    assert report.folded == ("qkv_bias: it was all zeros",)
    assert report.max_difference <= 1e-5


def test_a_file_of_theirs_is_converted_to_their_format(tmp_path):
    torch.save(theirs().state_dict(), tmp_path / "theirs.pth")
    report = vitkit.convert(
        tmp_path / "theirs.pth", tmp_path / "out", to="lucidrains", trust_pickle=True
    )
    assert report.max_difference <= 1e-5


@pytest.mark.parametrize(("heads", "parameters"), [(16, 54_630_376), (8, 42_047_464)])
def test_the_notebook_s_models_have_their_count(heads, parameters):
    """The README's ViT, and `DistillableViT` with 8 heads of 64."""
    sizes = {"image_size": 256, "patch_size": 32, "num_classes": 1000}
    fields = sizes | {"width": 1024, "depth": 6, "num_heads": heads, "head_width": 64,
                      "mlp_width": 2048}  # fmt: skip
    arguments = sizes | {"dim": 1024, "depth": 6, "heads": heads, "mlp_dim": 2048}
    make = peer("vit_pytorch.vit", "ViT")
    with torch.device("meta"):
        models = (vitkit.ViT(vitkit.ViTSpec(**OURS | fields)), make(**arguments))
    for model in models:
        assert sum(p.numel() for p in model.parameters()) == parameters
