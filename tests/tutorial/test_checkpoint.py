"""The tutorial's CIFAR-10 checkpoint, its receipt, and the cell that loads a published one."""

import contextlib
import hashlib
import io
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tutorial.test_chapters import TUTORIAL, cells_of
from weights.hub_cache import empty, published
from weights.round_trips import noisy

import vitkit

CHECKPOINT = TUTORIAL / "checkpoints" / "cifar10.safetensors"
CLASSES = "airplane automobile bird cat deer dog frog horse ship truck"


@pytest.fixture(scope="module")
def receipt() -> dict:
    return json.loads(CHECKPOINT.with_suffix(".json").read_text())


def test_the_receipt_is_of_this_file(receipt):
    content = CHECKPOINT.read_bytes()
    assert hashlib.sha256(content).hexdigest() == receipt["sha256"]
    assert len(content) == receipt["bytes"] < 5_000_000
    for key in ("command", "processor", "torch", "date", "seconds", "data_source", "data_licence"):
        assert receipt[key], key
    assert receipt["test_top1_95"][0] < receipt["test_top1"] < receipt["test_top1_95"][1]


def test_it_loads_and_names_its_classes(receipt):
    loaded = vitkit.load(CHECKPOINT)
    assert " ".join(loaded.classes) == CLASSES
    assert sum(p.numel() for p in loaded.model.parameters()) == receipt["parameters"]
    assert loaded.metadata["metrics"]["test"]["top1"] == receipt["test_top1"]
    from skimage import data

    assert vitkit.Predictor.from_checkpoint(loaded)([data.chelsea()])[0].label == "cat"


def test_neither_file_names_a_folder_of_a_machine(receipt):
    with safe_open(str(CHECKPOINT), "pt") as file:
        words = json.dumps(file.metadata()) + json.dumps(receipt)
    assert re.findall(r'(?<![\w.:/])/(?:tmp|home|root|work|usr|mnt)\b[^" ]*', words) == []


@pytest.mark.soak  # tries every engine
def test_the_published_model_s_cell_prints_names_or_one_line(tmp_path: Path, monkeypatch):
    """With the weights in the Hub's cache it prints classes; with an empty cache one message."""
    name = "vit_tiny_patch16_224.augreg_in21k_ft_in1k"
    monkeypatch.syspath_prepend(TUTORIAL)
    cells = cells_of(TUTORIAL / "13_your_photograph.py")
    (cell,) = [each.source for each in cells if "published = vitkit.load(NAME)" in each.source]
    cell = re.sub(r'NAME = "[^"]+"', f'NAME = "{name}"', cell)
    photograph = np.zeros((60, 80, 3), np.uint8)
    from drawing import print_wrapped
    from photographs import top_lines

    def run() -> str:
        known = {"vitkit": vitkit, "print_wrapped": print_wrapped, "top_lines": top_lines,
                 "paths": {"cat": photograph}}  # fmt: skip
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(cell, "cell", "exec"), known)
        return printed.getvalue()

    cache = empty(tmp_path / "hub", monkeypatch)
    assert " ".join(run().split()).startswith(f"timm://{name}: not in the cache")
    weights = noisy(vitkit.create_model(name).spec)
    preprocess = vitkit.Preprocess(crop_ratio=0.9)
    own = vitkit.save(tmp_path / "own.safetensors", weights, preprocess=preprocess)
    published(own, cache, f"timm/{name}", "timm")
    expected = vitkit.Predictor.from_checkpoint(vitkit.load(name))([photograph])[0]
    assert expected.label in run()
    for module in ("drawing", "photographs"):
        sys.modules.pop(module)
