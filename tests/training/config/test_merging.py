"""Layers of settings: recipe, YAML file and flags."""

from __future__ import annotations

import pytest

import vitkit
from vitkit import TrainConfig
from vitkit.training.config.merging import layered


def test_later_layers_win_and_specs_merge_field_by_field():
    merged = layered(
        {"data": "digits", "lr": 1e-3, "spec": {"width": 64, "depth": 4}},
        {"lr": 2e-3},
        {"spec": {"patch_size": 4}},
    )
    assert merged.pop("model") == TrainConfig.model
    assert merged == {
        "data": "digits", "lr": 2e-3, "spec": {"width": 64, "depth": 4, "patch_size": 4}
    }  # fmt: skip


def test_naming_another_model_drops_the_spec_written_for_the_first():
    recipe = {"model": "vit_tiny_patch16_224", "spec": {"width": 64}}
    assert layered(recipe, {"model": "vit_base_patch16_224"})["spec"] == {}
    assert layered(recipe, {"model": "vit_tiny_patch16_224"})["spec"] == {"width": 64}


@pytest.mark.parametrize(
    ("earlier", "later", "image_size", "drop_path"),
    [
        ({"spec": {"image_size": 8}}, {"img_size": 16}, (16, 16), 0.0),
        ({"img_size": 16}, {"spec": {"image_size": 8}}, (8, 8), 0.0),
        ({"spec": {"image_size": 8}}, {"progressive": (8, 16)}, (16, 16), 0.0),
        ({"progressive": (8, 16)}, {"img_size": 24}, (24, 24), 0.0),
        ({"spec": {"drop_path": 0.1, "image_size": 8}}, {"drop_path": 0.0}, (8, 8), 0.0),
        ({"drop_path": 0.1}, {"spec": {"drop_path": 0.2, "image_size": 8}}, (8, 8), 0.2),
    ],
)
def test_a_short_name_wins_over_the_long_one_of_an_earlier_layer(
    earlier, later, image_size, drop_path, tmp_path
):
    small = {"patch_size": 4, "width": 32, "depth": 1, "num_heads": 2}
    kept = layered({"data": "digits", "spec": small}, earlier, later)
    result = vitkit.train(
        **kept, epochs=2, max_steps=1, warmup_epochs=0.5, amp="off", quiet=True,
        output=str(tmp_path / "run"), report=False, plots=False,
    )  # fmt: skip
    spec = vitkit.load(result.last).model.spec
    assert (spec.image_size, spec.drop_path, spec.patch_size) == (image_size, drop_path, (4, 4))
