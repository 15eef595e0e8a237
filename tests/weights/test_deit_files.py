"""facebookresearch/deit's training checkpoints, with timm's classes in place of theirs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from noise import fill_with_noise
from peers import peer
from safetensors.torch import save_file

import vitkit

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 128, "depth": 2, "num_heads": 2,
         "mlp_ratio": 2.0, "num_classes": 7}  # fmt: skip
NAMES = ("deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "deit3_small_patch16_224")


def theirs(name: str) -> torch.nn.Module:
    model = peer("timm").create_model(name, **SMALL).eval()
    fill_with_noise(model, std=0.05)
    return model


def in_their_words(state: dict[str, Any]) -> dict[str, Any]:
    """models_v2.py keeps LayerScale in the block."""
    return {n.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): tensor
            for n, tensor in state.items()}  # fmt: skip


def assert_same(ours: torch.nn.Module, model: torch.nn.Module) -> None:
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        expected = model(images)
        assert (ours(images) - expected).abs().max() <= 1e-5 * expected.abs().max()


def checkpoint_file(model: torch.nn.Module, folder: Path, **others: Any) -> Path:
    torch.save({"model": in_their_words(model.state_dict()), "epoch": 299, **others},
               folder / "checkpoint.pth")  # fmt: skip
    return folder / "checkpoint.pth"


@pytest.mark.parametrize("name", NAMES)
def test_their_checkpoint_is_computed_by_ours(tmp_path, name):
    model = theirs(name)
    path = checkpoint_file(model, tmp_path, optimizer={"state": {}}, scaler={})
    checkpoint = vitkit.load(path, trust_pickle=True)
    assert checkpoint.format == "deit"
    assert checkpoint.preprocess.mean == (0.485, 0.456, 0.406)
    assert checkpoint.preprocess.crop_ratio == (1.0 if name.startswith("deit3") else 0.875)
    assert_same(checkpoint.model, model)


def test_without_a_container_only_deit_iii_is_known_by_its_names(tmp_path):
    for name, form in (("deit3_small_patch16_224", "deit"), ("deit_tiny_patch16_224", "timm")):
        save_file(in_their_words(theirs(name).state_dict()), tmp_path / "model.safetensors")
        assert vitkit.load(tmp_path).format == form
