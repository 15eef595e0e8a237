"""lucidrains' newest classes, and those of the eras that are no more, restated."""

from __future__ import annotations

from pathlib import Path

import torch
from einops import rearrange
from einops.layers.torch import Rearrange
from noise import fill_with_noise
from peers import TOLERANCE, peer, relative
from torch import Tensor, nn

from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import load

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


class PreNorm(nn.Module):
    """The wrapper that blocks had before 1.4."""

    def __init__(self, dim: int, fn: nn.Module) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))


class OldAttention(nn.Module):
    def __init__(self, dim: int, heads: int, dim_head: int) -> None:
        super().__init__()
        self.heads, inner = heads, heads * dim_head
        self.to_qkv = nn.Linear(dim, 3 * inner, bias=False)
        self.to_out = nn.Sequential(nn.Linear(inner, dim), nn.Dropout())

    def forward(self, x: Tensor) -> Tensor:
        parts = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in parts)
        weights = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.to_out(rearrange(weights @ v, "b h n d -> b n (h d)"))


class OldViT(nn.Module):
    """`ViT` from 1.0 to before 1.4, restated: its names and its equations."""

    def __init__(self, pool: str, dim_head: int = 64) -> None:
        super().__init__()
        dim, hidden, patch, values = 128, 96, 8, 3 * 8 * 8
        cut = Rearrange("b c (h p1) (w p2) -> b (h w) (p1 p2 c)", p1=patch, p2=patch)
        layers = [nn.LayerNorm(values), nn.Linear(values, dim), nn.LayerNorm(dim)]
        self.to_patch_embedding = nn.Sequential(cut, *layers)
        self.pos_embedding = nn.Parameter(torch.empty(1, 17, dim))
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim))
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList()
        for _ in range(2):
            mlp = nn.Module()
            mlp.net = nn.Sequential(
                nn.Linear(dim, hidden), nn.GELU(), nn.Dropout(), nn.Linear(hidden, dim)
            )
            mlp.forward = mlp.net.forward
            attention = PreNorm(dim, OldAttention(dim, 2, dim_head))
            self.transformer.layers.append(nn.ModuleList([attention, PreNorm(dim, mlp)]))
        self.pool = pool
        self.mlp_head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 7))
        fill_with_noise(self, std=0.05)
        self.eval()

    def forward(self, images: Tensor) -> Tensor:
        x = self.to_patch_embedding(images)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embedding
        for attention, mlp in self.transformer.layers:
            x = attention(x) + x
            x = mlp(x) + x
        return self.mlp_head(x.mean(dim=1) if self.pool == "mean" else x[:, 0])


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
) -> Checkpoint:
    """Their model's weights, or those given, as a file: read by ours, it gives the same logits."""
    torch.save(weights or model.state_dict(), path / "vit.pt")
    checkpoint = load(path / "vit.pt", trust_pickle=True, **overrides)
    images = torch.randn(2, 3, *checkpoint.model.spec.image_size)
    assert checkpoint.format == "lucidrains"
    assert relative(checkpoint.model(images), model(images)) <= TOLERANCE
    return checkpoint
