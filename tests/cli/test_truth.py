"""`vitkit explain --truth`: a line for each map, all parts at the end, and truth.json."""

from __future__ import annotations

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
    r"p = [\d.]+\), SaCo -?\d\.\d\d"
)


SMALL = {"std": 0.4, "depth": 1, "num_heads": 2}
"""A model whose truth is measured in a moment."""


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


def test_all_parts_are_printed_and_written(photos, capsys):
    (photos / "photos" / "broken.png").write_bytes(b"no image")
    words = ["explain", "m.safetensors", "photos", "--layer", "0", "--truth", "--format", "svg"]
    assert cli.run(words) == 2  # for the broken image, after the others
    out = capsys.readouterr().out
    assert len(re.findall(rf"^photos/\d.png: .*\n  {SCORE}$", out, re.MULTILINE)) == 3
    summary = out[out.index("\nattention: ") + 1 :].splitlines()
    assert re.fullmatch(f"attention: {SCORE}", summary[0])
    parts = [line.split(":")[0].strip() for line in summary[1:5]]
    assert [part for part in parts if part != "class"][:3] == ["images", "weights", "stability"]
    document = json.loads((photos / "explanations" / "truth.json").read_text())
    assert document["images"] == [f"photos/{number}.png" for number in range(3)]
    report = document["methods"]["attention"]
    assert report["options"] == {"layer": 0}
    assert len(report["scores"]) == 3
    assert report["model_fit"]["full"] == 1.0
    assert report["stability"]["jpeg"] is not None
    # the line of an image is its row of the file
    shown = re.findall(r"^  deletion .*SaCo (-?\d\.\d\d)$", out, re.MULTILINE)
    assert shown == [f"{score['saco']:.2f}" for score in report["scores"]]
    words[2] = "photos/0.png"
    assert cli.run(words) == 0, "an earlier report is replaced"


def test_all_methods_have_a_report_but_those_of_colours(photos, capsys):
    words = ["explain", "m.safetensors", "photos/1.png", "--method", "all"]
    assert cli.run([*words, "--truth", "--option", "steps=4"]) == 0
    out = capsys.readouterr().out
    methods = json.loads((photos / "explanations" / "truth.json").read_text())["methods"]
    assert {"attention", "occlusion"} <= set(methods)
    assert "pca" not in methods
    assert methods["occlusion"]["saco"] > 0.5  # it is nearly the question itself
    for name in methods:
        assert re.search(rf"^{name}: {SCORE}$", out, re.MULTILINE)


def test_a_small_model_has_the_score_in_the_caption(photos):
    loaded = vitkit.load("m.safetensors")
    made = vitkit.explain(loaded, "photos/1.png", layer=0)
    assert made.truth is not None
    assert made.truth.line in made.caption
    assert vitkit.explain(loaded, "photos/1.png", layer=0).truth == made.truth
    assert vitkit.explain(loaded, "photos/1.png", truth=False).truth is None
    # a model whose passes take long is scored only when asked for
    large = vitkit.create_model("vit_tiny_patch16_224", num_classes=5, depth=12)
    checkpoint = vitkit.Checkpoint(large.eval(), vitkit.Preprocess(), CLASSES)
    assert vitkit.explain(checkpoint, "photos/1.png").truth is None


def test_what_cannot_be_measured_is_refused_before_the_first_image(photos, capsys):
    save_noisy(photos / "headless.safetensors", CLASSES, **SMALL, num_classes=0)
    assert cli.run(["explain", "headless.safetensors", "photos", "--truth"]) == 2
    assert "the model has no head" in capsys.readouterr().err
    assert cli.run(["explain", "m.safetensors", "photos", "--method", "pca", "--truth"]) == 2
    assert "its maps are colours" in capsys.readouterr().err
    (photos / "explanations").mkdir(exist_ok=True)
    (photos / "explanations" / "truth.json").write_text('{"mine": 1}')
    assert cli.run(["explain", "m.safetensors", "photos", "--truth"]) == 2
    assert "truth.json: this file exists and is not a truth report" in capsys.readouterr().err
    assert json.loads((photos / "explanations" / "truth.json").read_text()) == {"mine": 1}
