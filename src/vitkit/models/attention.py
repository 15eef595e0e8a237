"""Attention: softmax(q k^T / sqrt(h)) v, alone and in heads over a sequence of tokens.

"Attention Is All You Need" (arXiv 1706.03762), Eq. 1 and Sec. 3.2.2; "An Image is Worth 16x16
Words" (arXiv 2010.11929), appendix A, Eq. 5-8. q, k, v = theirs; our h = their D_h = d_k.
"""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.models.layers import make_norm
from vitkit.shapes import Tokens
from vitkit.spec import QKVBias, resolve_head_width

SHORT_ROW = 32
"""Row length of attention weights below which torch's bfloat16 softmax is slow."""
Heads = Float[Tensor, "B k _ h"]
Mask = Bool[Tensor, "*#batch N M"]
"""True where a query may look at a key."""
Rotation = tuple[Float[Tensor, "... h"], Float[Tensor, "... h"]]
"""Sine and cosine (..., T, h) of the angles by which each token's query and key are turned."""


@overload
def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = ...
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
    mask: Mask | None = None,
    return_weights: bool = False,
) -> Float[Tensor, "*batch N e"] | tuple[Float[Tensor, "*batch N e"], Float[Tensor, "*batch N M"]]:
    """Return softmax(q k^T / sqrt(d)) v for N queries, M keys and values of any width e: Eq. 1.

    Args:
        q: queries (..., N, d).
        k: keys (..., M, d).
        v: values (..., M, e).
        mask: (..., N, M), True where a query may look at a key.
        return_weights: also give the weights (..., N, M). Their rows sum to 1; a row of a query
            that may look at no key is zero, and so is its result.

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
    return weights @ v, weights  # (..., N, e) and (..., N, M)


def attention_weights(
    q: Float[Tensor, "*batch N d"], k: Float[Tensor, "*batch M d"], mask: Mask | None = None
) -> Float[Tensor, "*batch N M"]:
    """Return softmax(q k^T / sqrt(d)), the weights of N queries over M keys.

    A query that may look at no key gets weights of zero, as in torch's fused kernel.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if mask is None:
        return _softmax(scores)
    # The lowest finite number, not -inf: a row of -inf would make NaN, in gradients too.
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return _softmax(scores).masked_fill(~mask, 0.0)


def _softmax(scores: Tensor) -> Tensor:
    """Take the softmax over the last dimension, in float32 for short bfloat16 rows on a CPU.

    torch's own kernel for those takes 3 to 5 times as long below `SHORT_ROW` values, and rounds no
    better (measured on an AMD EPYC with torch 2.13).
    """
    if scores.dtype == torch.bfloat16 and scores.is_cpu and scores.shape[-1] < SHORT_ROW:
        return scores.softmax(dim=-1, dtype=torch.float32).to(scores.dtype)
    return scores.softmax(dim=-1)


def plain_attention(
    q: Heads, k: Heads, v: Heads, mask: Mask | None = None, dropout: float = 0.0
) -> Heads:
    """Return (B, k, N, h) by two products; the (N, M) weights between them are kept for gradients.

    More memory than the fused kernel; on a processor, and in bfloat16 above all, a training step
    may be much faster. `dropout` is a rate.
    """
    return F.dropout(attention_weights(q, k, mask), dropout) @ v


Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]
"""(q, k, v, mask, dropout) -> (B, k, N, h): a kernel, or what a `Record` runs in its place."""
AttentionKernel = Literal["fused", "plain"]
KERNELS: dict[AttentionKernel, Attend] = {
    "fused": F.scaled_dot_product_attention,  # has no (N, M) matrix
    "plain": plain_attention,
}


class Context(NamedTuple):
    """The inputs of attention besides its tokens."""

    rotation: Rotation | None = None
    """The rotation of queries and keys by rotary positions."""
    mask: Mask | None = None
    """(..., T, T), True where a token may look at another."""
    attend: Attend | None = None
    """The function that a `Record` uses instead of the module's kernel."""


PLAIN = Context()


class MultiHeadAttention(nn.Module):
    """The base of multi-head attention: k heads of width h, and the matrix that mixes them.

    `head_width` is width / num_heads if not given, or a `SpecError` where that is no whole number;
    `attention_dropout` is the rate on the attention weights while training.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        head_width: int | None = None,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_width = resolve_head_width(width, num_heads, head_width)
        self.inner = num_heads * self.head_width  # k h, which may differ from D
        self.attention_dropout = attention_dropout
        self.attend: Attend = KERNELS["fused"]

    def make_output(self, width: int, dropout: float) -> None:
        """Create U_msa and its dropout; called last, so that modules are in the data's order."""
        self.proj = nn.Linear(self.inner, width)  # U_msa of Eq. 8
        self.proj_drop = nn.Dropout(dropout)

    def split(self, fused: Float[Tensor, "B _ E"], parts: int) -> tuple[Heads, ...]:
        """Split `parts` adjacent projections, each head-major: B T (p k h) -> p times B k T h."""
        split = fused.unflatten(-1, (parts, self.num_heads, self.head_width))  # B T p k h
        return split.permute(2, 0, 3, 1, 4).unbind(0)

    @property
    def dropout(self) -> float:
        """The rate on the attention weights in the present mode."""
        return self.attention_dropout if self.training else 0.0

    def mix(self, heads: Heads) -> Float[Tensor, "B _ D"]:
        """Mix the outputs (B, k, N, h) of the heads: [SA_1; ...; SA_k] U_msa, Eq. 8."""
        return self.proj_drop(self.proj(heads.transpose(1, 2).flatten(2)))  # B N (k h) -> B N D


class MultiHeadSelfAttention(MultiHeadAttention):
    """MSA: k heads attend to the whole sequence; one matrix mixes what they return.

    (B, T, D) -> (B, T, D). Keys as in timm: `qkv` (query, key, value, each head-major),
    `q_norm`, `k_norm` and `proj`.

    Args:
        width: D.
        num_heads: k.
        qkv_bias: whether `qkv` has a bias; `"no_key"`: for query and value only.
        qk_norm: whether queries and keys are normed in each head.
        norm: `layer` or `rms`, for `qk_norm`.
        norm_eps: epsilon of that norm.
        projection_dropout: rate after the output projection.
        **heads: `head_width` (default D / k) and `attention_dropout`.

    Raises:
        SpecError: num_heads does not divide width, or an unknown norm.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        qkv_bias: QKVBias = True,
        qk_norm: bool = False,
        norm: str = "layer",
        norm_eps: float = 1e-6,
        projection_dropout: float = 0.0,
        **heads: Any,
    ) -> None:
        super().__init__(width, num_heads, **heads)
        if qkv_bias == "no_key":
            self.qkv: nn.Linear = KeylessBiasLinear(width, self.inner)
        else:
            self.qkv = nn.Linear(width, 3 * self.inner, bias=qkv_bias)  # U_qkv of Eq. 5
        self.q_norm = make_norm(norm, self.head_width, norm_eps, qk_norm)
        self.k_norm = make_norm(norm, self.head_width, norm_eps, qk_norm)
        self.make_output(width, projection_dropout)

    def forward(self, tokens: Tokens, context: Context = PLAIN) -> Tokens:
        """Return MSA(z), Eq. 8 of the paper's appendix."""
        q, k, v = self.heads(tokens, context.rotation)
        attend = context.attend or self.attend
        return self.mix(attend(q, k, v, context.mask, self.dropout))  # Eq. 6 and 7

    def heads(
        self, tokens: Tokens, rotation: Rotation | None = None
    ) -> tuple[Heads, Heads, Heads]:  # fmt: skip
        """Return queries, keys and values of every head, Eq. 5: [q, k, v] = z U_qkv."""
        q, k, v = self.split(self.qkv(tokens), 3)
        q, k = self.q_norm(q), self.k_norm(k)  # over h, each head by itself
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        return q, k, v


class CrossAttention(MultiHeadAttention):
    """Queries of one sequence attend to another: (B, N, D) and memory (B, M, D) -> (B, N, D).

    "Attention Is All You Need", Sec. 3.2.3. Keys as in timm's latent attention: `q`, `kv`, `proj`.
    Arguments and errors are those of `MultiHeadSelfAttention`.
    """

    def __init__(
        self, width: int, num_heads: int, *, projection_dropout: float = 0.0, **heads: Any
    ) -> None:
        super().__init__(width, num_heads, **heads)
        self.q = nn.Linear(width, self.inner)
        self.kv = nn.Linear(width, 2 * self.inner)  # of the memory: keys, then values
        self.make_output(width, projection_dropout)

    def forward(
        self,
        tokens: Float[Tensor, "B N D"],
        memory: Float[Tensor, "B M D"],
        context: Context = PLAIN,
    ) -> Float[Tensor, "B N D"]:
        """Return the attention of `tokens` to `memory`, (B, N, D); the mask is (..., N, M)."""
        (q,), (k, v) = self.split(self.q(tokens), 1), self.split(self.kv(memory), 2)
        attend = context.attend or self.attend
        return self.mix(attend(q, k, v, context.mask, self.dropout))


class KeylessBiasLinear(nn.Linear):
    """The fused qkv projection without a key bias, which the softmax would take out (BEiT, EVA)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, 3 * inner, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(inner))
        self.v_bias = nn.Parameter(torch.zeros(inner))

    def forward(self, input: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
        """Project (..., D) -> (..., 3 k h)."""
        bias = torch.cat([self.q_bias, torch.zeros_like(self.q_bias), self.v_bias])  # keys: 0
        return F.linear(input, self.weight, bias)


def use_attention(model: nn.Module, kernel: AttentionKernel) -> None:
    """Choose how every head of a model attends; its outputs stay the same but for rounding."""
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            module.attend = KERNELS[kernel]


def rotate(x: Heads, rotation: Rotation) -> Heads:
    """Turn pairs (x_i, x_(i + h/2)) by their angles: RoFormer (arXiv 2104.09864), Eq. 34, in the
    layout of DINOv3, where the halves of a head's width are the pairs."""
    sin, cos = rotation
    first, second = x.chunk(2, dim=-1)  # x_i and x_(i + h/2), (B, k, T, h/2) each
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)
