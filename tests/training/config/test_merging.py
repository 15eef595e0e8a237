"""Layers of settings: defaults, recipe file and keywords."""

import json

import pytest
from training.tiny_runs import settings_of

import vitkit

SMALL = {"patch_size": 4, "width": 32, "depth": 1, "num_heads": 2, "image_size": 8}


@pytest.mark.parametrize(
    ("earlier", "later", "expected"),
    [
        ({"spec": SMALL, "lr": 0.1}, {"img_size": 16, "lr": 0.2}, {"image_size": (16, 16)}),
        ({"spec": SMALL, "img_size": 16}, {"spec": {"image_size": 8}}, {"image_size": (8, 8)}),
        ({"spec": SMALL}, {"progressive": (8, 16)}, {"image_size": (16, 16), "depth": 1}),
        ({"spec": SMALL, "progressive": (8, 16)}, {"img_size": 24}, {"image_size": (24, 24)}),
        ({"spec": SMALL | {"drop_path": 0.1}}, {"drop_path": 0.0}, {"drop_path": 0.0}),
        ({"spec": SMALL, "drop_path": 0.1}, {"spec": {"drop_path": 0.2}}, {"drop_path": 0.2}),
        # a spec belongs to the model that it was written for
        (
            {"model": "vit_tiny_patch16_224", "spec": {"mlp_width": 7}},
            {"model": "vit_small_patch16_224", "spec": SMALL},
            {"mlp_width": 1536},
        ),
    ],
)
def test_later_layers_win_and_specs_merge_field_by_field(earlier, later, expected, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(earlier))  # which is YAML
    result = vitkit.train(
        "digits", recipe=recipe, **later, epochs=2, max_steps=1, warmup_epochs=0.5, amp="off",
        quiet=True, output=tmp_path / "run", report=False, plots=False,
    )  # fmt: skip
    spec = vitkit.load(result.last).model.spec
    assert {name: getattr(spec, name) for name in expected} == expected
    assert "lr" not in later or settings_of(result.run)["lr"] == later["lr"]
