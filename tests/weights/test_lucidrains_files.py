"""lucidrains' files: read as its newest classes compute, and written for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from weights.lucidrains_models import check_read, theirs
from weights.round_trips import noisy

import vitkit
from vitkit import CheckpointError

OURS = {"image_size": 32, "patch_size": 8, "num_classes": 7, "width": 128, "depth": 2,
        "num_heads": 2, "mlp_width": 96, "stem": "normed_linear", "qkv_bias": False,
        "norm_eps": 1e-5}  # fmt: skip
PLAIN = {"stem": "convolution"}


def test_their_simple_model_is_computed_by_ours(tmp_path):
    checkpoint = check_read(theirs("simple"), tmp_path, image_size=32)
    assert checkpoint.model.spec.positions == "sincos_2d"
    guessed = vitkit.load(tmp_path / "vit.pt", trust_pickle=True)
    assert guessed.model.spec.image_size == (256, 256)
    assert any("image_size 256 x 256" in w for w in guessed.metadata["warnings"])


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


def converted(folder, model: vitkit.ViT, **options: object) -> vitkit.ConversionReport:
    vitkit.save(folder / "ours.safetensors", model, preprocess=vitkit.Preprocess())
    return vitkit.convert(folder / "ours.safetensors", folder / "out", to="lucidrains", **options)


def test_a_plain_vit_loses_its_biases_of_attention_or_has_none(tmp_path):
    model = ours(**PLAIN, qkv_bias=True)
    with pytest.raises(CheckpointError, match="cannot store: qkv_bias: the biases of"):
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
