"""lucidrains' files of 1.0 to 1.15: refused, and converted by examples/research."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
from peers import TOLERANCE, random_images, relative
from torch import nn
from weights.lucidrains_models import between, old_simple, theirs

import vitkit
from vitkit import CheckpointError

SCRIPT = Path(__file__).parents[2] / "examples/research/lucidrains_eras.py"


def test_files_whose_norm_was_in_the_head_are_refused(tmp_path):
    torch.save(old_simple().state_dict(), tmp_path / "vit.pt")
    with pytest.raises(CheckpointError, match=r"releases 1.0 to 1.15 .* are not read") as e:
        vitkit.load(tmp_path / "vit.pt", trust_pickle=True)
    assert "lucidrains_eras.py" in str(e.value)
    assert "\n" not in str(e.value)


def test_files_with_a_batch_axis_are_refused(tmp_path):
    torch.save(between(theirs().state_dict()), tmp_path / "vit.pt")
    with pytest.raises(CheckpointError, match=r"only those up to 0.40.2 and from 1.16 on"):
        vitkit.load(tmp_path / "vit.pt", trust_pickle=True)


@torch.inference_mode()
def check_converted(folder: Path, model: nn.Module, weights: dict, *flags: str) -> vitkit.ViTSpec:
    """What the script writes computes the same."""
    torch.save(weights, folder / "old.pt")
    sys.argv = [str(SCRIPT), str(folder / "old.pt"), str(folder / "new.safetensors"), *flags]
    runpy.run_path(str(SCRIPT), run_name="__main__")
    read, images = vitkit.load(folder / "new.safetensors").model, random_images(2, 32)
    assert relative(read(images), model(images)) <= TOLERANCE
    return read.spec


@pytest.mark.soak
def test_the_simple_model_before_its_norm_moved_is_converted(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    model = old_simple()
    spec = check_converted(tmp_path, model, model.state_dict(), "--image-size", "32")
    assert not spec.norm_before_pool


@pytest.mark.soak
def test_a_vit_with_a_batch_axis_is_converted(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [])
    model = theirs()
    spec = check_converted(tmp_path, model, between(model.state_dict()))
    assert (spec.pooling, spec.norm_before_pool) == ("cls", True)
