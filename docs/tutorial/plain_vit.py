"""A Vision Transformer on one page: Eq. 1 to 4 of arXiv 2010.11929 in plain PyTorch.

B images, C channels, patches of P x P pixels, N patches, T = N + 1 tokens, width D,
h heads of d = D / h numbers, depth L. The weights are named as in timm and vitkit.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn


class PatchEmbedding(nn.Module):
    """Cut images into patches and map each patch to D numbers."""

    def __init__(self, patch_size: int, channels: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch_size, stride=patch_size)  # E

    def forward(self, images: Tensor) -> Tensor:
        x = self.proj(images)                        # each patch E     (B, D, H/P, W/P)
        return x.flatten(2).transpose(1, 2)          # a row per patch  (B, N, D)


class Attention(nn.Module):
    """Let every token read from every other: multi-head self-attention (MSA)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)  # U_qkv: queries, keys, values
        self.proj = nn.Linear(width, width)  # U_msa, combines the heads

    def forward(self, z: Tensor) -> Tensor:
        B, T, D = z.shape
        d = D // self.heads
        qkv = self.qkv(z)                            # z U_qkv          (B, T, 3D)
        qkv = qkv.view(B, T, 3, self.heads, d)       # split into heads (B, T, 3, h, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)         # each of them     (B, h, T, d)
        scores = q @ k.transpose(-2, -1) / d**0.5    # q k^T / sqrt(d)  (B, h, T, T)
        self.weights = scores.softmax(dim=-1)        # A: rows sum to 1 (B, h, T, T)
        heads = self.weights @ v                     # A v              (B, h, T, d)
        heads = heads.transpose(1, 2)                # heads of a token (B, T, h, d)
        return self.proj(heads.reshape(B, T, D))     # joined, U_msa    (B, T, D)


class Block(nn.Module):
    """Attention between tokens, then an MLP on each token; both add to their input."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        fc1, fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU(), fc2=fc2))

    def forward(self, z: Tensor) -> Tensor:
        z = self.attn(self.norm1(z)) + z             # Eq. 2            (B, T, D)
        return self.mlp(self.norm2(z)) + z           # Eq. 3            (B, T, D)


class PlainViT(nn.Module):
    """Classify images (B, C, H, W) with H = W; returns logits (B, classes)."""

    def __init__(
        self, *, image_size: int, patch_size: int, channels: int, classes: int,
        width: int, depth: int, heads: int, hidden: int,
    ) -> None:
        super().__init__()
        assert image_size % patch_size == 0, "the patches must fill the image"
        N = (image_size // patch_size) ** 2  # N = HW / P^2
        self.patch_embed = PatchEmbedding(patch_size, channels, width)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, N + 1, width))
        blocks = [Block(width, heads, hidden) for _ in range(depth)]
        self.blocks = nn.Sequential(*blocks)  # they stack, as width in = width out
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)                 # x_p E            (B, N, D)
        cls = self.cls_token.expand(len(x), -1, -1)  # x_class          (B, 1, D)
        z = torch.cat([cls, x], dim=1)               # [x_class; x_p E] (B, T, D)
        z = z + self.pos_embed                       # Eq. 1: z_0       (B, T, D)
        z = self.blocks(z)                           # Eq. 2, 3: z_L    (B, T, D)
        y = self.norm(z[:, 0])                       # Eq. 4: y         (B, D)
        return self.head(y)                          # logits           (B, classes)
