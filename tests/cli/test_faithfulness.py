"""`vitkit explain --faithfulness`: a line for each map and method, and faithfulness.json."""

import json
import re

import numpy as np
import pytest
from PIL import Image
from tiny_checkpoint import save_noisy

import vitkit
from vitkit import cli

CLASSES = ("ant", "bee", "cat", "dog", "eel")
SCORE = (
    r"deletion (-?\d+\.\d\d|not measurable), insertion (-?\d+\.\d\d|not measurable) "
    r"\((better than chance|no better than chance|too few (patches|images) to tell), "
    r"p = [\d.]+\)"
)


SMALL = {"std": 0.4, "depth": 1, "num_heads": 2}
"""A model whose maps are measured in a moment."""


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A working folder with a model and a folder of images, one of them broken."""
    generator = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(3):
        pixels = generator.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.png")
    save_noisy(tmp_path / "m.safetensors", CLASSES, **SMALL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_images_and_the_method_are_printed_and_written(photos, capsys):
    (photos / "photos" / "broken.png").write_bytes(b"no image")
    words = [
        "explain", "m.safetensors", "photos", "--layer", "0", "--faithfulness", "--format", "svg",
    ]  # fmt: skip
    assert cli.run(words) == 2  # for the broken image, after the others
    out = capsys.readouterr().out
    assert len(re.findall(rf"^photos/\d.png: .*\n  {SCORE}$", out, re.MULTILINE)) == 3
    summary = out[out.index("\nattention: ") + 1 :].splitlines()
    assert re.fullmatch(f"attention: {SCORE}", summary[0])
    assert summary[1].startswith("  images: medians; deletion is measurable on ")
    document = json.loads((photos / "explanations" / "faithfulness.json").read_text())
    assert document["images"] == [f"photos/{number}.png" for number in range(3)]
    report = document["methods"]["attention"]
    assert report["options"] == {"layer": 0}
    assert len(report["scores"]) == 3
    # the line of an image is its row of the file
    shown = re.findall(r"^  deletion .*\(([a-z ]+), p", out, re.MULTILINE)
    assert shown == [score["verdict"] for score in report["scores"]]
    python = vitkit.faithfulness_report("m.safetensors", "photos/?.png", layer=0)
    assert json.loads(json.dumps(python.as_json())) == report


def test_all_methods_have_a_report_but_those_of_colours(photos, capsys):
    words = ["explain", "m.safetensors", "photos/1.png", "--method", "all"]
    assert cli.run([*words, "--faithfulness", "--option", "steps=4"]) == 0
    out = capsys.readouterr().out
    methods = json.loads((photos / "explanations" / "faithfulness.json").read_text())["methods"]
    assert {"attention", "occlusion"} <= set(methods)
    assert "pca" not in methods
    assert methods["occlusion"]["deletion"] in (None, pytest.approx(1, abs=0.1))
    for name in methods:
        assert re.search(rf"^{name}: {SCORE}$", out, re.MULTILINE)


def test_a_small_model_has_the_score_in_the_caption(photos):
    loaded = vitkit.load("m.safetensors")
    made = vitkit.explain(loaded, "photos/1.png", layer=0)
    assert made.faithfulness is not None
    assert made.faithfulness.line in made.caption
    assert vitkit.explain(loaded, "photos/1.png", layer=0).faithfulness == made.faithfulness
    assert vitkit.explain(loaded, "photos/1.png", faithfulness=False).faithfulness is None
    # a model whose passes take long is scored only when asked for
    large = vitkit.create_model("vit_tiny_patch16_224", num_classes=5, depth=12)
    checkpoint = vitkit.Checkpoint(large.eval(), vitkit.Preprocess(), CLASSES)
    assert vitkit.explain(checkpoint, "photos/1.png").faithfulness is None


def test_what_cannot_be_measured_is_refused_before_the_first_image(photos, capsys):
    save_noisy(photos / "headless.safetensors", CLASSES, **SMALL, num_classes=0)
    assert cli.run(["explain", "headless.safetensors", "photos", "--faithfulness"]) == 2
    assert "the model has no head" in capsys.readouterr().err
    assert cli.run(["explain", "m.safetensors", "photos", "--method", "pca", "--faithfulness"]) == 2
    assert "of 'pca' are colours" in capsys.readouterr().err
    (photos / "explanations").mkdir(exist_ok=True)
    (photos / "explanations" / "faithfulness.json").write_text('{"mine": 1}')
    assert cli.run(["explain", "m.safetensors", "photos", "--faithfulness"]) == 2
    assert "faithfulness.json: this file exists; choose another" in capsys.readouterr().err
    assert json.loads((photos / "explanations" / "faithfulness.json").read_text()) == {"mine": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"method": "libragard"}, "did you mean 'libragrad'"),
     ({"method": "pca"}, "of 'pca' are colours"),
     ({"layer": 7}, "layer = 7: must be a whole number from -1 to 0"),
     ({"parts": ["weights"]}, r"parts = .*sanity_checks_of_maps\.py"),
     ({"truth": True}, "truth = True: is called faithfulness")],
)  # fmt: skip
def test_python_names_what_does_not_fit(photos, options, message):
    with pytest.raises(vitkit.SettingError, match=message):
        vitkit.faithfulness_report("m.safetensors", "photos", **options)


def test_python_needs_images_that_can_be_read(photos):
    with pytest.raises(vitkit.SettingError, match="cannot be measured without images"):
        vitkit.faithfulness_report("m.safetensors", [])
    (photos / "broken.png").write_bytes(b"words")
    with pytest.raises(vitkit.ImageError, match=r"broken\.png: not an image"):
        vitkit.faithfulness_report("m.safetensors", ["photos/0.png", "broken.png"])
