"""Files that would be written or read wrongly are refused or corrected, in one line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from noise import fill_with_noise

import vitkit
from vitkit import CheckpointError
from vitkit.weights.catalogue import find

GREY = {"image_size": 16, "patch_size": 4, "in_channels": 1, "depth": 1, "width": 24,
        "num_heads": 2, "mlp_width": 48, "num_classes": 3}  # fmt: skip
PIXELS = vitkit.Preprocess(image_size=16, mean=(0.5,), std=(0.5,))


def saved(place: Path, **fields: object) -> Path:
    torch.manual_seed(0)
    model = vitkit.create_model("vit_tiny_patch16_224", **GREY | fields)
    fill_with_noise(model, std=0.3)
    return vitkit.save(place, model, preprocess=PIXELS, classes=("a", "b", "c"))


@pytest.mark.parametrize("to", ["google", "torchvision", "jeonsworld"])
def test_grey_images_stay_grey_in_every_format(tmp_path, to):
    """Google's .npz has no place for mean and std, and its usual ones are three numbers."""
    stored = saved(tmp_path / "m.safetensors")
    given = {"num_heads": 2}
    (file, *_) = vitkit.convert(stored, tmp_path / to, to=to, allow_lossy=True).files
    back = vitkit.load(file, trust_pickle=True, **given if to in ("google", "jeonsworld") else {})
    assert back.model.spec.in_channels == back.preprocess.channels == 1
    vitkit.save(tmp_path / "again.safetensors", back.model, preprocess=back.preprocess)
    predictions = vitkit.Predictor.from_checkpoint(back)([np.zeros((16, 16), np.uint8)])
    assert 0 < predictions[0].probability < 1


def test_a_file_that_describes_itself_takes_no_settings(tmp_path):
    stored = saved(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="describes itself completely; leave out num_heads"):
        vitkit.inspect(stored, num_heads=3)


def test_an_unknown_format_is_named_before_anything_is_pushed(tmp_path):
    checkpoint = vitkit.load(saved(tmp_path / "m.safetensors"))
    with pytest.raises(
        CheckpointError,
        match=r"--to \(to=\) .hugingface. is not a format; pass one of .*huggingface",
    ):
        checkpoint.push_to_hub("me/x", to="hugingface")


def test_deit_s_images_keep_their_margin_at_384(tmp_path):
    """Its datasets.py resizes to the side over 0.875, "to maintain same ratio"."""
    assert find("deit/deit_base_patch16_384").preprocess.crop_ratio == 0.875
