"""lucidrains' newest classes, and weights as those of the releases before had them."""

from __future__ import annotations

from pathlib import Path

import torch
from noise import fill_with_noise
from peers import TOLERANCE, peer, relative
from torch import Tensor, nn

import vitkit

SIZES = {"image_size": 32, "patch_size": 8, "num_classes": 7, "dim": 128, "depth": 2,
         "heads": 2, "mlp_dim": 96}  # fmt: skip


def theirs(kind: str = "cls", **fields: object) -> nn.Module:
    """Their newest model, of random numbers: pooled by `cls` or `mean`, or the `simple` one."""
    if kind == "simple":
        model = peer("vit_pytorch.simple_vit", "SimpleViT")(**SIZES | fields)
    else:
        model = peer("vit_pytorch.vit", "ViT")(**SIZES | fields, pool=kind)
    fill_with_noise(model, std=0.05)
    return model.eval()


def old_simple() -> nn.Module:
    """`SimpleViT` before 1.4: its last norm stood in the head, after pooling."""
    model = theirs("simple")
    model.transformer.norm = nn.Identity()
    model.linear_head = nn.Sequential(nn.LayerNorm(128), model.linear_head)
    fill_with_noise(model, std=0.05)
    return model


def between(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """As from 1.4 to 1.15: tokens and positions have a batch axis."""
    return weights | {name: weights[name][None] for name in ("cls_token", "pos_embedding")}


@torch.inference_mode()
def check_read(
    model: nn.Module, path: Path, weights: dict[str, Tensor] | None = None, **overrides: object
) -> vitkit.Checkpoint:
    """Their model's weights, or those given, as a file: read by ours, it gives the same logits."""
    torch.save(weights or model.state_dict(), path / "vit.pt")
    checkpoint = vitkit.load(path / "vit.pt", trust_pickle=True, **overrides)
    images = torch.randn(2, 3, *checkpoint.model.spec.image_size)
    assert checkpoint.format == "lucidrains"
    assert relative(checkpoint.model(images), model(images)) <= TOLERANCE
    return checkpoint
