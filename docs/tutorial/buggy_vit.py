"""Chapter 0's model with a switch for each bug of the notebooks that raises no error.

`BuggyViT()` without bugs has the weights of `PlainViT` and computes the same bits. Each bug is the
smallest change that makes the mistake; a comment beside it names the notebook it came from (A to
E; the tutorial's page "Coming from a notebook" says which they are). Loss, optimizer and
evaluation have switches, too: they are in `bug_variants.py`.
"""

from __future__ import annotations

import torch
from plain_vit import Attention, Block, PlainViT
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.models.embedding import sincos_1d

SIZES = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 10,
         "width": 32, "depth": 4, "heads": 4, "hidden": 64}  # fmt: skip
"""The model of the measurements, for digits of 8 x 8 pixels: 16 patches, 17 tokens."""


class BuggyViT(PlainViT):
    """`PlainViT` with bugs."""

    def __init__(
        self,
        bugs: frozenset[str] = frozenset(),
        *,
        positions: str = "learned",
        dropout: float = 0.0,
        **sizes: int,
    ) -> None:
        super().__init__(**SIZES | sizes)
        self.bugs, self.dropout = bugs, dropout
        if positions == "sines":
            table = sincos_1d(*self.pos_embed.shape[1:])
            if "exponent_zero" in bugs:  # E: `dim // dim_model` is 0 for each column
                steps = torch.arange(len(table))[:, None]
                table = torch.cat([steps.sin(), steps.cos()], 1).repeat(
                    1, table.shape[1] // 2
                )
            del self.pos_embed
            self.register_buffer("pos_embed", table[None])
        self._start()
        for block in self.blocks:
            self._rebuild(block)

    @torch.no_grad()
    def _start(self) -> None:
        """Give other initial values to class token, positions and qkv."""
        tokens = [self.cls_token, self.pos_embed]
        if "ones" in self.bugs:  # A
            for values in tokens:
                values.fill_(1.0)
        if "large_normal" in self.bugs:  # A: N(0, 1) in place of N(0, 0.02²)
            for values in tokens:
                values.normal_()
        if "zero_positions" in self.bugs:  # B: the text says normal, the code zeros
            self.pos_embed.zero_()
        if "uniform_class_token" in self.bugs:  # E: torch.rand, all numbers positive
            self.cls_token.uniform_()
        if "xavier" in self.bugs:  # C: for tokens, and for q, k and v as one matrix
            for values in [*tokens, *(block.attn.qkv.weight for block in self.blocks)]:
                nn.init.xavier_normal_(values)

    def _rebuild(self, block: Block) -> None:
        """Put other layers into a block."""
        attn, (tokens, width) = block.attn, self.pos_embed.shape[1:]
        if "sliced_heads" in self.bugs:  # E: a head sees its slice; nothing mixes them
            part = width // attn.heads
            attn.qkv = nn.ModuleList(
                nn.Linear(part, 3 * part) for _ in range(attn.heads)
            )
            del attn.proj
        if "heads_in_a_list" in self.bugs:  # E: torch does not see a Python list
            attn.hidden = [attn.qkv]
            del attn.qkv
        if "joint_norm" in self.bugs:  # E: over tokens and width together
            block.norm1 = nn.LayerNorm((tokens, width), eps=1e-6)
            block.norm2 = nn.LayerNorm((tokens, width), eps=1e-6)
        if "one_layer_mlp" in self.bugs:  # E: Linear and ReLU, no second layer
            block.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU())
        if "relu" in self.bugs:  # E's Transformer ignores its argument `activation`
            block.mlp.act = nn.ReLU()
        if "no_norm" in self.bugs:
            block.norm1 = block.norm2 = nn.Identity()

    def _drop(self, z: Tensor) -> Tensor:
        return F.dropout(z, self.dropout, self.training) if self.dropout else z

    def _patches(self, images: Tensor) -> Tensor:
        """Return a row for each patch: (B, N, D)."""
        if "reshape" in self.bugs:  # E: strips of consecutive pixels, no squares
            weight = self.patch_embed.proj.weight.flatten(1)
            strips = images.reshape(len(images), -1, weight.shape[1])
            return F.linear(strips, weight, self.patch_embed.proj.bias)
        return self.patch_embed(images)

    def _qkv(self, attn: Attention, z: Tensor) -> Tensor:
        """Return queries, keys and values: (3, B, h, T, d)."""
        B, T, D = z.shape
        heads = 1 if "one_head" in self.bugs else attn.heads  # B: heads are never split
        layer = attn.hidden[0] if "heads_in_a_list" in self.bugs else attn.qkv
        if "sliced_heads" in self.bugs:
            parts = zip(layer, z.chunk(heads, dim=-1), strict=True)
            each = torch.stack([head(part) for head, part in parts], dim=1)
            return each.unflatten(-1, (3, D // heads)).permute(3, 0, 1, 2, 4)
        return layer(z).view(B, T, 3, heads, D // heads).permute(2, 0, 3, 1, 4)

    def _attention(self, attn: Attention, z: Tensor) -> Tensor:
        B, T, D = z.shape
        q, k, v = self._qkv(attn, z)
        scores = q @ k.transpose(-2, -1)
        if "no_root" not in self.bugs:  # D's text leaves out the root
            scores = scores / (D // attn.heads) ** 0.5  # B: of a head that is not split
        attn.weights = scores.softmax(dim=-1)
        if "careless_dropout" in self.bugs:  # B: half of the weights, in eval mode too
            attn.weights = F.dropout(attn.weights)
        mixed = (attn.weights @ v).transpose(1, 2).reshape(B, T, D)
        if "sliced_heads" in self.bugs:
            return mixed
        mixed = attn.proj(mixed)
        # A, D: no dropout here, against the rule that follows each dense layer
        return mixed if "no_projection_dropout" in self.bugs else self._drop(mixed)

    def _mlp(self, mlp: nn.Sequential, z: Tensor) -> Tensor:
        for layer in mlp:
            z = layer(z)
            if not isinstance(layer, nn.Linear):  # after the activation
                z = self._drop(z)
        return self._drop(z)

    def _block(self, block: Block, z: Tensor) -> Tensor:
        if "no_residual" in self.bugs:
            z = self._attention(block.attn, block.norm1(z))
            return self._mlp(block.mlp, block.norm2(z))
        z = z + self._attention(block.attn, block.norm1(z))
        return z + self._mlp(block.mlp, block.norm2(z))

    def forward(self, images: Tensor) -> Tensor:
        x = self._patches(images)
        z = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        if "no_positions" not in self.bugs:
            z = z + self.pos_embed
        z = self._drop(z)
        for block in self.blocks:
            z = self._block(block, z)
        y = z[:, 0]
        if not self.bugs & {"no_final_norm", "no_norm"}:  # E: no norm before the head
            y = self.norm(y)
        return self.head(y)
