"""Attention: softmax(q k^T / sqrt(h)) v, alone and in heads over a sequence of tokens.

"Attention Is All You Need" (arXiv 1706.03762), Eq. 1 and Sec. 3.2.2; "An Image is Worth 16x16
Words" (arXiv 2010.11929), appendix A, Eq. 5-8. q, k, v = theirs; our h = their D_h = d_k.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.shapes import AttentionMaps, Tokens
from vitkit.spec import resolve_head_width


@overload
def scaled_dot_product_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = ...,
    return_weights: Literal[False] = ...,
) -> Tensor: ...
@overload
def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = ..., return_weights: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def scaled_dot_product_attention(
    q: Float[Tensor, "*batch N d"],
    k: Float[Tensor, "*batch M d"],
    v: Float[Tensor, "*batch M e"],
    *,
    mask: Bool[Tensor, "*#batch N M"] | None = None,
    return_weights: bool = False,
) -> Float[Tensor, "*batch N e"] | tuple[Float[Tensor, "*batch N e"], Float[Tensor, "*batch N M"]]:
    """softmax(q k^T / sqrt(d)) v for N queries, M keys and values of any width e.

    Args:
        q: queries (..., N, d).
        k: keys (..., M, d).
        v: values (..., M, e).
        mask: (..., N, M), True where a query may look at a key.
        return_weights: also give the weights (..., N, M), whose rows sum to 1.

    >>> q = torch.tensor([[1., 0, 0], [1, 0, 1], [0, 1, 0], [0, 0, 0], [0, 0, 0]])
    >>> k, v = torch.eye(4, 3), 4.5 * torch.arange(12.).reshape(4, 3)
    >>> mixed, weights = scaled_dot_product_attention(q, k, v, return_weights=True)
    >>> weights[:2].double().numpy().round(4).tolist()
    [[0.3726, 0.2091, 0.2091, 0.2091], [0.3202, 0.1798, 0.3202, 0.1798]]
    >>> mixed[[0, 1, 3]].double().numpy().round(3).tolist()
    [[16.941, 21.441, 25.941], [18.354, 22.854, 27.354], [20.25, 24.75, 29.25]]
    """
    if not return_weights:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    weights = attention_weights(q, k, mask)
    return weights @ v, weights


def attention_weights(
    q: Float[Tensor, "*batch N d"],
    k: Float[Tensor, "*batch M d"],
    mask: Bool[Tensor, "*#batch N M"] | None = None,
) -> Float[Tensor, "*batch N M"]:
    """softmax(q k^T / sqrt(d)): how much each of N queries takes from each of M keys."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(dim=-1)


class MultiHeadSelfAttention(nn.Module):
    """MSA: k heads attend to the whole sequence side by side, then one matrix mixes them.

    (B, T, D) -> (B, T, D). The fused kernel always runs; `weights` computes the maps when they are
    asked for. Keys as in timm: `qkv` (query, key, value, each head-major) and `proj`.

    Args:
        width: D.
        num_heads: k; must divide `width` unless `head_width` is given.
        head_width: h, default width / num_heads.
        qkv_bias: whether the fused projection has a bias.
        attention_dropout: rate on the attention weights while training.
        projection_dropout: rate after the output projection.

    Raises:
        SpecError: num_heads does not divide width.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        head_width: int | None = None,
        qkv_bias: bool = True,
        attention_dropout: float = 0.0,
        projection_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_width = resolve_head_width(width, num_heads, head_width)
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(width, 3 * num_heads * self.head_width, bias=qkv_bias)
        self.proj = nn.Linear(num_heads * self.head_width, width)
        self.proj_drop = nn.Dropout(projection_dropout)

    def forward(self, tokens: Tokens) -> Tokens:
        """MSA(z), Eq. 8 of the paper's appendix."""
        q, k, v = self.heads(tokens)
        dropout = self.attention_dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.proj_drop(self.proj(mixed.transpose(1, 2).flatten(2)))  # B k T h -> B T (k h)

    def heads(
        self, tokens: Tokens
    ) -> tuple[Float[Tensor, "B k T h"], Float[Tensor, "B k T h"], Float[Tensor, "B k T h"]]:
        """Queries, keys and values of every head, Eq. 5: [q, k, v] = z U_qkv."""
        fused = self.qkv(tokens).unflatten(-1, (3, self.num_heads, self.head_width))
        q, k, v = fused.permute(2, 0, 3, 1, 4)  # B T 3 k h -> 3 B k T h
        return q, k, v

    def weights(
        self,
        tokens: Tokens,
        heads: Sequence[int] | None = None,
        queries: Sequence[int] | None = None,
    ) -> AttentionMaps:
        """The attention maps A of Eq. 6, before dropout: (B, k, Q, T), rows sum to 1.

        Args:
            tokens: what `forward` would be given.
            heads: only these heads; default all k.
            queries: only these query rows; default all T.
        """
        q, k, _ = self.heads(tokens)
        if heads is not None:
            q, k = q[:, list(heads)], k[:, list(heads)]
        if queries is not None:
            q = q[:, :, list(queries)]
        return attention_weights(q, k)
