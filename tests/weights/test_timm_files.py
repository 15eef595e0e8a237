"""timm's files and Hub folders: read as its models compute, written so that it builds them."""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from peers import peer
from PIL import Image
from safetensors.torch import save_file
from weights.round_trips import noisy, written

import vitkit
from vitkit import CheckpointError
from vitkit.models.presets import preset, table
from vitkit.weights.formats.timm_config import PRESETS_UNKNOWN_TO_TIMM, timm_architecture

timm = peer("timm")
SMALL = {"depth": 2, "embed_dim": 128, "num_heads": 2, "num_classes": 7}
SIZES = {"depth": 2, "width": 128, "num_heads": 2, "mlp_width": 256, "num_classes": 7}
KINDS = (
    "vit_tiny_patch16_224", "vit_base_patch8_224", "vit_small_patch16_36x1_224",
    "deit_tiny_distilled_patch16_224", "deit_small_patch16_224", "deit3_small_patch16_224",
    "vit_small_patch14_dinov2", "vit_small_patch14_reg4_dinov2", "vit_giant_patch14_dinov2",
    "vit_base_patch16_siglip_224", "vit_base_patch32_siglip_256", "vit_base_patch16_siglip_gap_224",
    "vit_base_patch32_clip_224", "vit_base_patch32_clip_quickgelu_224",
    "vit_xsmall_patch16_clip_224",
    "vit_base_patch16_reg4_gap_256", "vit_medium_patch16_gap_256", "vit_wee_patch16_reg1_gap_256",
    "vit_so150m_patch16_reg4_map_256", "vit_tiny_r_s16_p8_224", "vit_small_r26_s32_224",
    "vit_base_r50_s16_224", "vit_base_patch16_rpn_224", "vit_base_patch16_224_miil",
    "vit_small_patch16_dinov3", "vit_small_patch16_dinov3_qkvb", "vit_small_plus_patch16_dinov3",
    "vit_small_patch16_lingbot", "eva_giant_patch14_224", "eva_large_patch14_196", "flexivit_small",
    "vit_base_patch32_siglip_gap_256", "vit_base_patch16_gap_224",
    "vit_so150m_patch16_reg4_gap_256", "vit_so150m2_patch16_reg1_gap_256",
    "vit_base_patch14_reg1_tipsv2", "vit_base_patch16_radio_v3", "vit_intern300m_patch14_448",
    "test_vit4",
)  # fmt: skip
TO_THE_CONFIG = {"vit_base_patch16_rpn_224", "vit_base_patch32_clip_quickgelu_224",
                 "vit_base_patch32_siglip_256", "vit_base_patch32_siglip_gap_256",
                 "flexivit_small"}  # fmt: skip
"""Kinds that their tensors alone do not tell from others."""


def image(name: str) -> int:
    """Two patches a side, or four; the position table of a square."""
    return 2 * preset(name).patch_size[0]


def theirs(name: str, **fields: Any) -> torch.nn.Module:
    model = timm.create_model(name, img_size=image(name), **SMALL | fields)
    fill_with_noise(model.eval(), std=0.05)
    return model.eval()


def as_on_the_hub(model: torch.nn.Module, folder: Path) -> Path:
    """By their own code: timm.models.save_for_hf."""
    timm.models.save_for_hf(model, folder, safe_serialization=True)
    return folder


def assert_same(ours: torch.nn.Module, model: torch.nn.Module, size: tuple[int, int]) -> None:
    images = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    # A ResNet's stages turn float32's rounding into more than 1e-5, in timm alone as well.
    with torch.inference_mode():
        expected = model.double()(images.double())
        difference = (ours.double()(images.double()) - expected).abs().max()
    assert difference <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", KINDS)
def test_their_folder_is_computed_by_ours(tmp_path, name):
    model = theirs(name)
    checkpoint = vitkit.load(as_on_the_hub(model, tmp_path))
    assert checkpoint.format == "timm"
    assert checkpoint.metadata["sure"]["norm_eps"] == "stored"
    spec = checkpoint.model.spec
    assert_same(checkpoint.model, model, (image(name), image(name)))
    settings = timm.data.resolve_data_config({}, model=model)
    assert checkpoint.preprocess.mean == pytest.approx(settings["mean"])
    assert checkpoint.preprocess.crop_ratio == pytest.approx(settings["crop_pct"])
    assert spec.image_size == (image(name), image(name))


ALONE = [name for name in KINDS if name not in TO_THE_CONFIG]


@pytest.mark.parametrize(
    "name", [*ALONE[::3], *(pytest.param(n, marks=pytest.mark.soak)
                            for n in ALONE if n not in ALONE[::3])]
)  # fmt: skip
def test_their_state_dict_alone_is_computed_by_ours(tmp_path, name):
    model = theirs(name)
    torch.save({"state_dict": model.state_dict(), "arch": name}, tmp_path / "model.pth.tar.pth")
    facts: dict[str, Any] = {"image_size": image(name)}
    if name in ("eva_giant_patch14_224", "vit_small_patch16_lingbot"):
        facts["pooling"] = preset(name).pooling
    checkpoint = vitkit.load(tmp_path / "model.pth.tar.pth", trust_pickle=True, **facts)
    assert checkpoint.format == "timm"
    assert checkpoint.metadata["sure"]["norm_eps"] == "usual"
    assert_same(checkpoint.model, model, (image(name), image(name)))


def test_what_timm_cannot_build_has_no_architecture(tmp_path):
    spec = vitkit.ViTSpec(**SIZES, patch_size=8, image_size=32, norm_eps=1e-12)
    folder = written("timm", noisy(spec), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert "architecture" not in config
    assert "no model in timm's registry" in config["note"]


def test_presets_that_are_ours_alone_are_named():
    unknown = {name for name in table() if not timm.is_model(name)}
    named = [name for name in table() for p in PRESETS_UNKNOWN_TO_TIMM if fnmatchcase(name, p)]
    assert sorted(named) == sorted(unknown)


def test_every_preset_that_timm_knows_needs_no_model_args():
    for name in filter(timm.is_model, table()):
        found = timm_architecture(preset(name))
        assert found is not None, name
        assert found[1] == {}, name


def test_older_layouts_are_understood(tmp_path):
    """A matrix of patches, a `pre_logits` layer, LayerScale as a tensor of the block."""
    spec = vitkit.ViTSpec(**SIZES, patch_size=8, image_size=32, representation_width=24,
                          layer_scale=1e-5)  # fmt: skip
    ours = noisy(spec)
    old = {name.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): tensor
           for name, tensor in ours.state_dict().items()}  # fmt: skip
    old["patch_embed.proj.weight"] = old["patch_embed.proj.weight"].flatten(1)
    torch.save(old, tmp_path / "old.pth")
    back = vitkit.load(tmp_path / "old.pth", trust_pickle=True).model
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(back(images), ours(images))


def saved(folder: Path, **changes: torch.Tensor | None) -> Path:
    state = dict(noisy(vitkit.ViTSpec(**SIZES, patch_size=8, image_size=32)).state_dict())
    for name, tensor in changes.items():
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, folder / "model.safetensors")
    return folder


def test_the_config_gives_classes_and_images(tmp_path):
    saved(tmp_path)
    config = {"architecture": "mine", "label_names": list("abcdefg"), "mean": [0.1, 0.2, 0.3],
              "std": [1, 1, 1], "crop_pct": 0.8, "crop_mode": "border", "interpolation": "lanczos",
              "model_args": {"rope_rotate_half": True}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = vitkit.load(tmp_path)
    assert checkpoint.classes == tuple("abcdefg")
    assert checkpoint.preprocess.mean == (0.1, 0.2, 0.3)
    assert checkpoint.preprocess.crop_ratio == 0.8
    warnings = " ".join(checkpoint.metadata["warnings"])
    for word in ("mine is not a preset", "lanczos", "'border'", "rope_rotate_half"):
        assert word in warnings


@pytest.mark.parametrize("ratio", [1.0, 0.8])
def test_their_squash_makes_the_same_pixels(tmp_path, ratio):
    """And what `convert` writes brings the same pixels back."""
    saved(tmp_path)
    settings = {"mean": [0.1, 0.2, 0.3], "std": [1, 1, 1], "interpolation": "bicubic",
                "crop_pct": ratio, "crop_mode": "squash"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "mine", **settings}))
    checkpoint = vitkit.load(tmp_path)
    assert checkpoint.preprocess.fit == ("squash" if ratio == 1.0 else "squash-crop")
    written = checkpoint.model.pretrained_cfg
    for asked in (settings, written):
        theirs = timm.data.create_transform(
            (3, 32, 32), mean=asked["mean"], std=asked["std"], crop_pct=asked["crop_pct"],
            crop_mode=asked["crop_mode"], interpolation=asked["interpolation"],
        )  # fmt: skip
        pixels = np.random.default_rng(0).integers(0, 256, (30, 50, 3), dtype=np.uint8)
        ours = checkpoint.preprocess([pixels])[0]
        assert (theirs(Image.fromarray(pixels)) - ours).abs().max() <= 1e-6


def test_images_that_the_config_says_nothing_of_are_only_usual(tmp_path):
    saved(tmp_path)
    for mean, known in ({}, "usual"), ({"mean": [0.5] * 3, "std": [0.2] * 3}, "stored"):
        config = {"architecture": "mine", "pretrained_cfg": {"input_size": [3, 16, 16], **mean}}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert vitkit.load(tmp_path).metadata["sure"]["preprocess"] == known


def test_a_table_that_fits_with_and_without_prefix_is_a_guess(tmp_path):
    fields = SIZES | {"patch_size": 8, "class_token": False, "num_registers": 3, "pooling": "mean"}
    spec = vitkit.ViTSpec(**fields, image_size=16, positions_cover_prefix=False)
    save_file(noisy(spec).state_dict(), tmp_path / "model.safetensors")
    checkpoint = vitkit.load(tmp_path)
    assert checkpoint.model.spec.image_size == (16, 16)
    assert checkpoint.metadata["sure"]["positions_cover_prefix"] == "usual"
    assert "positions_cover_prefix False, image_size 16 x 16" in checkpoint.metadata["warnings"][0]
    assert vitkit.load(tmp_path, image_size=8).model.spec.positions_cover_prefix


@pytest.mark.parametrize(
    ("name", "message"),
    [("eva02_tiny_patch14_224", "EVA-02"), ("vit_small_patch16_rope_224", "other than DINOv3's"),
     ("vit_small_resnet26d_224", "the backbone is not a ResNetV2")],
)  # fmt: skip
def test_other_rotary_positions_and_backbones_are_refused(tmp_path, name, message):
    model = timm.create_model(name, depth=1)
    torch.save(model.state_dict(), tmp_path / "rotary.pth")
    with pytest.raises(CheckpointError, match=message):
        vitkit.load(tmp_path / "rotary.pth", trust_pickle=True)


def test_no_positions_at_all_are_a_guess_that_is_logged(tmp_path):
    model = theirs("vit_tiny_patch16_224", pos_embed="none")
    torch.save(model.state_dict(), tmp_path / "none.pth")
    checkpoint = vitkit.load(tmp_path / "none.pth", trust_pickle=True, image_size=32)
    assert checkpoint.metadata["sure"]["positions"] == "usual"
    assert "positions none" in checkpoint.metadata["warnings"][0]
    assert_same(checkpoint.model, model, (32, 32))
