"""Models by name with published weights: what is named is adapted, what is not stays as trained."""

import logging
from pathlib import Path

import pytest
import torch
from weights.hub_cache import empty, published
from weights.round_trips import noisy, same_bits

import vitkit
from vitkit import CheckpointError, SettingError, SpecError

NAME, TAG = "vit_tiny_patch16_224", "augreg_in21k_ft_in1k"


@pytest.fixture(scope="module")
def weights() -> vitkit.ViT:
    return noisy(vitkit.create_model(NAME).spec)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch) -> Path:
    return empty(tmp_path / "hub", monkeypatch)


@pytest.fixture
def hub(tmp_path: Path, cache, weights) -> Path:
    """A cache of the Hub with timm's folder of the model."""
    preprocess = vitkit.Preprocess(crop_ratio=0.9)
    own = vitkit.save(tmp_path / "own.safetensors", weights, preprocess=preprocess)
    published(own, cache, f"timm/{NAME}.{TAG}", "timm")
    return own


def test_a_model_s_published_weights_by_its_name(hub, weights):
    for name in (NAME, f"{NAME}.{TAG}"):
        model = vitkit.create_model(name, pretrained=True)
        same_bits(weights.state_dict(), model.state_dict())
        assert (model.spec, model.training) == (weights.spec, False)
    stored = vitkit.load(NAME)
    assert stored.metadata["licence"] == "apache-2.0"
    assert stored.metadata["catalogue"] == f"{NAME}.{TAG}"
    assert vitkit.inspect(f"timm://{NAME}.{TAG}").spec == weights.spec


def test_a_published_model_comes_with_its_own_size_and_readout(tmp_path, cache):
    """A checkpoint with another size and readout than the preset, neither requested."""
    preset = "vit_small_patch14_dinov2"
    model = noisy(vitkit.create_model(
        preset, image_size=28, pooling="cls_mean", num_classes=1000).spec)  # fmt: skip
    own = vitkit.save(
        tmp_path / "own.safetensors", model, preprocess=vitkit.Preprocess(image_size=28)
    )
    name = "facebook/dinov2-small-imagenet1k-1-layer"
    published(own, cache, name, "huggingface")
    made = vitkit.create_model(f"hf://{name}", pretrained=True)
    assert (made.spec.image_size, made.spec.pooling) == ((28, 28), "cls_mean")
    assert vitkit.create_model(f"hf://{name}", pretrained=True, image_size=56).spec.grid == (4, 4)


def test_what_the_caller_names_is_adapted_and_logged(hub, weights, caplog):
    caplog.set_level(logging.INFO, logger="vitkit")
    model = vitkit.create_model(
        NAME, pretrained=True, num_classes=4, image_size=(192, 256), in_channels=1, drop_path=0.1
    )
    assert model(torch.randn(1, 1, 192, 256)).shape == (1, 4)
    assert model.blocks[-1].drop_path1.rate == pytest.approx(0.1)
    torch.testing.assert_close(
        model.blocks[3].mlp.fc1.weight, weights.blocks[3].mlp.fc1.weight, rtol=0, atol=0
    )
    log = "\n".join(caplog.messages)
    for part in ("14 x 14 -> 12 x 16 by bicubic_antialias", "summed over channels",
                 "the head of 1000 classes is replaced by an untrained one of 4"):  # fmt: skip
        assert part in log
    assert vitkit.create_model(NAME, pretrained=True, num_classes=0)(
        torch.randn(1, 3, 224, 224)
    ).shape == (1, 192)


def test_what_the_caller_does_not_name_is_as_the_weights_were_trained(tmp_path):
    fields = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 2}
    model = vitkit.create_model(NAME, **fields, num_classes=5, activation="gelu_tanh")
    own = vitkit.save(
        tmp_path / "a.safetensors", model, preprocess=vitkit.Preprocess(image_size=32)
    )
    again = vitkit.create_model(NAME, pretrained=own, **fields)
    assert (again.spec.num_classes, again.spec.activation) == (5, "gelu_tanh")
    with pytest.raises(
        CheckpointError, match="activation: 'gelu' requested, 'gelu_tanh' in the file"
    ):
        vitkit.create_model(NAME, pretrained=own, **fields, activation="gelu")
    with pytest.raises(CheckpointError, match=r"image_size: \[224, 224\] requested, \[32, 32\] in"):
        vitkit.create_model(NAME, pretrained=own, **{k: fields[k] for k in fields if k[0] != "i"})
    with pytest.raises(SpecError, match="no field 'img_sze'"):
        vitkit.create_model(NAME, pretrained=own, img_sze=3)


def test_no_weights_and_an_empty_name():
    small = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 1, "num_heads": 2}
    assert vitkit.create_model(NAME, pretrained=None, **small).training
    with pytest.raises(CheckpointError, match="the name of the weights is empty"):
        vitkit.create_model(NAME, pretrained="", **small)


def test_names_of_other_publishers_name_a_model_too(tmp_path):
    own = vitkit.save(
        tmp_path / "own.safetensors",
        noisy(vitkit.create_model(NAME).spec),
        preprocess=vitkit.Preprocess(),
    )
    for name in ("google/imagenet21k/ViT-B_16", "torchvision/vit_b_16.imagenet1k_v1"):
        assert name in vitkit.list_models(pretrained=True)
        with torch.device("meta"):
            fresh = vitkit.create_model(name, depth=1)
        assert (fresh.spec.width, fresh.spec.patch_size) == (768, (16, 16))
        with pytest.raises(CheckpointError, match="width: 768 requested, 192 in the file"):
            vitkit.create_model(name, pretrained=own)


def test_models_without_published_weights_are_named(hub):
    with pytest.raises(SettingError, match="no weights are published for vit_base_patch16_gap_224"):
        vitkit.create_model("vit_base_patch16_gap_224", pretrained=True)
    with pytest.raises(
        SettingError, match=r"has no checkpoint 'augreg_in21k_ft_in2k' .did you mean"
    ):
        vitkit.create_model(f"{NAME}.augreg_in21k_ft_in2k", pretrained=True)
    with pytest.raises(CheckpointError, match="not in the cache, and the Hub cannot be reached"):
        vitkit.create_model(f"{NAME}.augreg_in21k", pretrained=True)
