"""torchvision's files: read as its own models compute."""

from __future__ import annotations

import torch
from noise import fill_with_noise
from peers import peer

import vitkit


def theirs(**fields: object) -> torch.nn.Module:
    VisionTransformer = peer("torchvision.models.vision_transformer", "VisionTransformer")
    model = VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=1, hidden_dim=64, mlp_dim=96,
        num_classes=7, **fields,
    ).eval()  # fmt: skip
    fill_with_noise(model, std=0.05)
    return model


def test_the_names_of_the_first_version_are_understood(tmp_path):
    state = theirs().state_dict()
    old = {n.replace("mlp.0", "mlp.linear_1").replace("mlp.3", "mlp.linear_2"): v
           for n, v in state.items()}  # fmt: skip
    torch.save(old, tmp_path / "old.pth")
    torch.save(state, tmp_path / "new.pth")
    first, second = (
        vitkit.load(tmp_path / name, trust_pickle=True) for name in ("old.pth", "new.pth")
    )
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(first.model(images), second.model(images))
