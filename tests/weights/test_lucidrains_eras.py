"""lucidrains' files of the eras between 0.40.2 and the newest: there and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peers import TOLERANCE, random_images, relative
from safetensors import safe_open
from torch import Tensor
from weights.lucidrains_models import OldViT, between, check_read, old_simple, theirs
from weights.round_trips import same_bits, stored

from vitkit.errors import CheckpointError
from vitkit.weights.convert import convert
from vitkit.weights.load import load


@pytest.mark.parametrize("dim_head", [64, 32])
@pytest.mark.parametrize("pool", ["cls", "mean"])
def test_eras_before_the_wrapper_was_dropped(tmp_path, dim_head, pool):
    overrides = {"pooling": "mean_all"} if pool == "mean" else {}
    overrides |= {"head_width": 32} if dim_head == 32 else {}
    spec = check_read(OldViT(pool, dim_head), tmp_path, **overrides).model.spec
    assert spec.stem == "normed_linear"
    assert spec.norm_before_pool == (pool == "cls")


@pytest.mark.parametrize("image_size", [32, (48, 32)])
def test_the_simple_model_before_its_norm_moved(tmp_path, image_size):
    model = old_simple()
    if image_size != 32:
        model.pos_embedding = theirs("simple", image_size=image_size).pos_embedding
    assert not check_read(model, tmp_path, image_size=image_size).model.spec.norm_before_pool


def check_written_back(
    folder: Path, weights: dict[str, Tensor], release: str, **overrides: object
) -> None:
    """What ours write of their file, read again by itself, has the same bits and names."""
    torch.save(weights, folder / "theirs.pt")
    convert(folder / "theirs.pt", folder / "out", to="lucidrains", trust_pickle=True, **overrides)
    same_bits(weights, stored(folder / "out"))
    with safe_open(folder / "out" / "model.safetensors", framework="pt") as opened:
        assert opened.metadata()["vit_pytorch_release"] == release


def test_a_mean_before_the_wrapper_was_dropped_comes_back(tmp_path):
    weights = OldViT("mean", 32).state_dict()
    check_written_back(tmp_path, weights, "1.2.9", num_heads=4, pooling="mean_all")


@torch.inference_mode()
def test_a_class_token_before_the_wrapper_was_dropped_goes_to_the_newest_class(tmp_path):
    model, newest, images = OldViT("cls"), theirs("cls"), random_images(2, 32)
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    convert(tmp_path / "theirs.pt", tmp_path / "out", to="lucidrains", trust_pickle=True)
    assert relative(newest(images), model(images)) > 10 * TOLERANCE
    newest.load_state_dict(stored(tmp_path / "out"))
    assert relative(newest(images), model(images)) <= TOLERANCE


def test_a_mean_of_all_tokens_with_a_batch_axis_comes_back(tmp_path):
    weights = between(theirs().state_dict())
    check_written_back(tmp_path, weights, "1.15.7", pooling="mean_all")


def test_the_simple_model_before_its_norm_moved_comes_back(tmp_path):
    check_written_back(tmp_path, old_simple().state_dict(), "1.2.9", image_size=32)


def test_the_era_with_a_batch_axis(tmp_path):
    model = theirs()
    spec = check_read(model, tmp_path, between(model.state_dict())).model.spec
    assert (spec.pooling, spec.norm_before_pool) == ("cls", True)


def test_a_mean_with_a_class_token_is_of_all_tokens(tmp_path):
    torch.save(between(theirs().state_dict()), tmp_path / "vit.pt")
    with pytest.raises(CheckpointError, match="pooling 'mean_all'"):
        load(tmp_path / "vit.pt", trust_pickle=True, pooling="mean")
