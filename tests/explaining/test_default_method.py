"""The method where none is named, and odd models: NaN, half precision, one class."""

import numpy as np
import pytest
import torch
from noise import fill_with_noise
from PIL import Image

import vitkit
from vitkit import cli

PREPROCESS = vitkit.Preprocess(image_size=(16, 24), fit="squash")
CLASSES = ("ant", "bee", "cat", "dog", "eel")
PIXELS = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def checkpoint(dtype: torch.dtype = torch.float32, **fields) -> vitkit.Checkpoint:
    fields = {"num_classes": 5} | fields
    spec = vitkit.ViTSpec(
        image_size=(16, 24), patch_size=8, width=16, depth=2, num_heads=2, mlp_width=16, **fields
    )
    model = vitkit.ViT(spec)
    fill_with_noise(model, std=0.4)
    return vitkit.Checkpoint(model.to(dtype).eval(), PREPROCESS, CLASSES[: spec.num_classes])


def test_the_default_is_libragrad_and_attention_where_a_layer_is_chosen():
    some = checkpoint()
    made = vitkit.explain(some, PIXELS)
    assert made.method == "libragrad"
    assert made.notes == ()
    named = vitkit.explain(some, PIXELS, method="libragrad")
    np.testing.assert_array_equal(made.grid, named.grid)
    for options in ({"layer": 0}, {"head": 1}, {"query": 2}, {"layer": -1, "head": 0}):
        assert vitkit.explain(some, PIXELS, **options).method == "attention"
    assert vitkit.explain(some, PIXELS, discard_ratio=0.5).method == "rollout"
    with pytest.raises(vitkit.SettingError, match=r"steps = 5: libragrad has no such .*: integ"):
        vitkit.explain(some, PIXELS, steps=5)


def test_a_model_without_a_head_gets_rollout_and_a_note(tmp_path, monkeypatch, capsys):
    headless = checkpoint(num_classes=0)
    made = vitkit.explain(headless, PIXELS)
    assert made.method == "rollout"
    note = "rollout instead of libragrad: this model has no head, and so no class"
    assert note in made.caption
    assert vitkit.explain(headless, PIXELS, layer=0).notes == ()
    monkeypatch.chdir(tmp_path)
    vitkit.save("m.safetensors", headless.model, preprocess=PREPROCESS)
    for name in ("1.png", "2.png"):
        Image.fromarray(PIXELS).save(name)
    assert cli.run(["explain", "m.safetensors", "1.png", "2.png"]) == 0
    assert capsys.readouterr().err == f"vitkit: {note}\n"


@pytest.mark.parametrize("name", [None, "attention", "occlusion"])
def test_logits_that_are_not_finite_are_refused(name):
    broken = checkpoint()
    broken.model.head.weight.data.fill_(float("nan"))
    with pytest.raises(vitkit.CheckpointError, match="the model's logits are not finite") as error:
        vitkit.explain(broken, PIXELS, method=name)
    assert "\n" not in str(error.value)
    with pytest.raises(vitkit.CheckpointError, match="the model's logits are not finite"):
        vitkit.faithfulness_report(broken, [PIXELS], method=name)


@pytest.mark.parametrize("name", ["attention", "rollout", "similarity", "pca"])
def test_values_that_are_not_finite_without_a_head_are_drawn_without_colour(name):
    broken = checkpoint(num_classes=0)
    broken.model.blocks[0].norm1.weight.data.fill_(float("nan"))
    made = vitkit.explain(broken, PIXELS, method=name)
    assert "values that are not finite have no colour" in made.caption
    assert np.ptp(np.asarray(made.overlay()).astype(int), axis=2).max() == 0
