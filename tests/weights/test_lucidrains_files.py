"""lucidrains' files: read as its newest classes compute, written for them, or refused by era."""

import runpy
import sys
from pathlib import Path

import pytest
import torch
from noise import fill_with_noise
from peers import TOLERANCE, peer, random_images, relative
from torch import Tensor, nn
from weights.round_trips import noisy

import vitkit
from vitkit import CheckpointError

SIZES = {"image_size": 32, "patch_size": 8, "num_classes": 7, "dim": 128, "depth": 2,
         "heads": 2, "mlp_dim": 96}  # fmt: skip


def theirs(kind: str = "cls", **fields: object) -> nn.Module:
    """Their newest model, of random numbers: pooled by `cls` or `mean`, or the `simple` one."""
    if kind == "simple":
        model = peer("vit_pytorch.simple_vit", "SimpleViT")(**SIZES | fields)
    else:
        model = peer("vit_pytorch.vit", "ViT")(**SIZES | fields, pool=kind)
    fill_with_noise(model, std=0.05)
    return model.eval()


def old_simple() -> nn.Module:
    """`SimpleViT` before 1.4: its last norm stood in the head, after pooling."""
    model = theirs("simple")
    model.transformer.norm = nn.Identity()
    model.linear_head = nn.Sequential(nn.LayerNorm(128), model.linear_head)
    fill_with_noise(model, std=0.05)
    return model


def between(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As from 1.4 to 1.15: tokens and positions have a batch axis."""
    return weights | {name: weights[name][None] for name in ("cls_token", "pos_embedding")}


@torch.inference_mode()
def check_read(model: nn.Module, path: Path, **overrides: object) -> vitkit.Checkpoint:
    """Their model as a file: read by ours, it gives the same logits."""
    torch.save(model.state_dict(), path / "vit.pt")
    checkpoint = vitkit.load(path / "vit.pt", trust_pickle=True, **overrides)
    images = torch.randn(2, 3, *checkpoint.model.spec.image_size)
    assert checkpoint.format == "lucidrains"
    assert relative(checkpoint.model(images), model(images)) <= TOLERANCE
    return checkpoint


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
    stated = check_read(theirs("simple"), tmp_path, image_size=32, num_heads=2, head_width=64)
    assert "mean and std 0.5 are a guess" in stated.metadata["warnings"][0]


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


SCRIPT = Path(__file__).parents[2] / "examples/research/lucidrains_eras.py"


def test_files_of_the_releases_between_are_refused(tmp_path):
    for weights, message in (
        (old_simple().state_dict(), r"releases 1.0 to 1.15 .* are not read.*lucidrains_eras.py"),
        (between(theirs().state_dict()), r"only those up to 0.40.2 and from 1.16 on"),
    ):
        torch.save(weights, tmp_path / "vit.pt")
        with pytest.raises(CheckpointError, match=message) as error:
            vitkit.load(tmp_path / "vit.pt", trust_pickle=True)
        assert "\n" not in str(error.value)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("flags", "expected"), [(["--image-size", "32"], ("mean", False)), ([], ("cls", True))]
)
@torch.inference_mode()
def test_the_script_converts_both(tmp_path, monkeypatch, flags, expected):
    model = old_simple() if flags else theirs()
    weights = model.state_dict() if flags else between(model.state_dict())
    torch.save(weights, tmp_path / "old.pt")
    words = [str(SCRIPT), str(tmp_path / "old.pt"), str(tmp_path / "new.safetensors"), *flags]
    monkeypatch.setattr(sys, "argv", words)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    read, images = vitkit.load(tmp_path / "new.safetensors").model, random_images(2, 32)
    assert relative(read(images), model(images)) <= TOLERANCE
    assert (read.spec.pooling, read.spec.norm_before_pool) == expected
