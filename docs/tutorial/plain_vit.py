"""A Vision Transformer on one page, in plain PyTorch: Eq. 1 to 4 of arXiv 2010.11929.

B images, N patches, T = N + 1 tokens, width D, h heads of d = D / h numbers. The names
of the weights are those of timm and vitkit.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Combine the tokens: multi-head self-attention, the MSA of Eq. 2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)  # queries, keys and values in one matrix
        self.proj = nn.Linear(width, width)  # mixes the outputs of the heads

    def forward(self, z: Tensor) -> Tensor:
        B, T, D = z.shape
        qkv = self.qkv(z).view(B, T, 3, self.heads, D // self.heads)  # (B, T, 3, h, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, h, T, d)
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5  # q kᵀ / √d: (B, h, T, T)
        self.weights = scores.softmax(dim=-1)  # each row sums to 1; kept for drawing
        heads = self.weights @ v  # means of the values: (B, h, T, d)
        return self.proj(heads.transpose(1, 2).reshape(B, T, D))  # (B, T, D)


class Block(nn.Module):
    """Apply Eq. 2 and 3: attention, then an MLP, each added to its input."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        fc1, fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU(), fc2=fc2))

    def forward(self, z: Tensor) -> Tensor:
        z = z + self.attn(self.norm1(z))  # Eq. 2: z' = MSA(LN(z)) + z
        return z + self.mlp(self.norm2(z))  # Eq. 3: z = MLP(LN(z')) + z'


class PlainViT(nn.Module):
    """Classify images (B, C, H, H): returns logits (B, classes)."""

    def __init__(
        self, *, image_size: int, patch_size: int, channels: int, classes: int,
        width: int, depth: int, heads: int, hidden: int,
    ) -> None:  # fmt: skip
        super().__init__()
        N = (image_size // patch_size) ** 2
        self.patch_embed = nn.Conv2d(
            channels, width, patch_size, stride=patch_size
        )  # E
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))  # x_class
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, N + 1, width))  # E_pos
        self.blocks = nn.Sequential(
            *[Block(width, heads, hidden) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch_embed(images)  # x_p E of Eq. 1: (B, D, H/P, H/P)
        x = x.flatten(2).transpose(1, 2)  # one row for each patch: (B, N, D)
        x_class = self.cls_token.expand(
            len(x), -1, -1
        )  # the same for each image: (B, 1, D)
        z = torch.cat([x_class, x], dim=1) + self.pos_embed  # Eq. 1, z_0: (B, T, D)
        z = self.blocks(z)  # Eq. 2 and 3, depth times: (B, T, D)
        y = self.norm(z[:, 0])  # Eq. 4, y = LN(z_L^0): (B, D)
        return self.head(y)  # logits (B, classes)
