"""The Transformer encoder: Eq. 2 and 3 of "An Image is Worth 16x16 Words", L times, then a norm."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vitkit.models.attention import MultiHeadSelfAttention
from vitkit.models.mlp import MLP
from vitkit.models.record import Record
from vitkit.shapes import AttentionMaps, Tokens


class DropPath(nn.Module):
    """Stochastic depth: drops a residual branch of whole pictures, and scales up those it keeps.

    "Deep Networks with Stochastic Depth" (arXiv 1603.09382), Eq. 2, with the scaling done in
    training. Identity in eval mode or at rate 0.
    """

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, branch: Float[Tensor, "B ..."]) -> Float[Tensor, "B ..."]:
        """Zero for a picture with probability `rate`, else branch / (1 - rate)."""
        if self.rate == 0.0 or not self.training:
            return branch
        kept = 1.0 - self.rate
        shape = (branch.shape[0],) + (1,) * (branch.ndim - 1)
        return branch * torch.bernoulli(branch.new_full(shape, kept)).div_(kept)

    def extra_repr(self) -> str:
        """The rate, for `print(model)`."""
        return f"rate={self.rate:g}"


class EncoderBlock(nn.Module):
    """One pre-norm block: (B, T, D) -> (B, T, D).

        z' = MSA(LN(z)) + z          Eq. 2
        z  = MLP(LN(z')) + z'        Eq. 3

    Args:
        width: D.
        num_heads: k.
        mlp_width: M.
        head_width: h, default width / num_heads.
        activation: the MLP's non-linearity by name.
        qkv_bias: whether the qkv projection has a bias.
        norm_eps: LayerNorm's epsilon.
        attention_dropout: rate on the attention weights.
        projection_dropout: rate after the attention's output projection.
        mlp_dropout: rate after both linear layers of the MLP.
        drop_path: stochastic depth of both branches.

    Raises:
        SpecError: num_heads does not divide width, or an unknown activation.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_width: int,
        *,
        head_width: int | None = None,
        activation: str = "gelu",
        qkv_bias: bool = True,
        norm_eps: float = 1e-6,
        attention_dropout: float = 0.0,
        projection_dropout: float = 0.0,
        mlp_dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.attn = MultiHeadSelfAttention(
            width,
            num_heads,
            head_width=head_width,
            qkv_bias=qkv_bias,
            attention_dropout=attention_dropout,
            projection_dropout=projection_dropout,
        )
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.mlp = MLP(width, mlp_width, activation=activation, dropout=mlp_dropout)
        self.drop_path2 = DropPath(drop_path)

    def forward(self, tokens: Tokens) -> Tokens:
        """Eq. 2, then Eq. 3."""
        tokens = tokens + self.drop_path1(self.attn(self.norm1(tokens)))
        return tokens + self.drop_path2(self.mlp(self.norm2(tokens)))

    def attention_weights(
        self,
        tokens: Tokens,
        heads: Sequence[int] | None = None,
        queries: Sequence[int] | None = None,
    ) -> AttentionMaps:
        """The maps (B, k, Q, T) that `forward` uses on the same tokens, recomputed from q and k."""
        return self.attn.weights(self.norm1(tokens), heads, queries)


class Encoder(nn.Module):
    """L blocks and the last norm, with no ViT around them: (B, T, D) -> (B, T, D).

    Args:
        width: D.
        depth: L.
        num_heads: k.
        mlp_width: M.
        drop_path: stochastic depth of the last block, rising linearly from 0 at the first.
        norm_eps: LayerNorm's epsilon, the last norm's too.
        **block: any further keyword of `EncoderBlock`.

    >>> Encoder(width=64, depth=2, num_heads=4, mlp_width=128)(torch.zeros(3, 7, 64)).shape
    torch.Size([3, 7, 64])
    """

    def __init__(
        self,
        width: int,
        depth: int,
        num_heads: int,
        mlp_width: int,
        *,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
        **block: object,
    ) -> None:
        super().__init__()
        self.blocks = stack_blocks(
            depth,
            drop_path=drop_path,
            width=width,
            num_heads=num_heads,
            mlp_width=mlp_width,
            norm_eps=norm_eps,
            **block,
        )
        self.norm = nn.LayerNorm(width, eps=norm_eps)

    def forward(self, tokens: Tokens, record: Record | None = None) -> Tokens:
        """LN(z_L)."""
        return self.norm(run_blocks(self.blocks, tokens, record))


def stack_blocks(depth: int, *, drop_path: float, **block: object) -> nn.ModuleList:
    """`depth` blocks whose stochastic depth rises linearly from 0 to `drop_path`."""
    rates = [drop_path * layer / max(depth - 1, 1) for layer in range(depth)]
    return nn.ModuleList(EncoderBlock(drop_path=rate, **block) for rate in rates)  # type: ignore[arg-type]


def run_blocks(blocks: nn.ModuleList, tokens: Tokens, record: Record | None) -> Tokens:
    """z_0 -> z_L; what `record` asks for is kept on the way.

    Raises:
        SettingError: the record asks for a layer that is not there.
    """
    if record is not None:
        record.begin(len(blocks))
    for layer, block in enumerate(blocks):
        if record is not None and record.wants_attention(layer):
            assert isinstance(block, EncoderBlock)
            record.check(block.attn.num_heads, tokens.shape[1])
            record.attention[layer] = block.attention_weights(tokens, record.heads, record.queries)
        tokens = block(tokens)
        if record is not None and record.wants_tokens(layer):
            record.tokens[layer] = tokens
    return tokens
