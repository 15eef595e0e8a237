"""The Transformer encoder: Eq. 2 and 3 of "An Image is Worth 16x16 Words", L times, then a norm."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

from torch import nn
from torch.utils.checkpoint import checkpoint

from vitkit.models.attention import PLAIN, Context, MultiHeadSelfAttention
from vitkit.models.layers import MLPS, DropPath, LayerScale, by_name, make_norm
from vitkit.models.record import Record
from vitkit.shapes import Tokens
from vitkit.spec import Block, QKVBias


class EncoderBlock(nn.Module):
    """One pre-norm block: (B, T, D) -> (B, T, D).

        z' = MSA(LN(z)) + z          Eq. 2
        z  = MLP(LN(z')) + z'        Eq. 3

    Args:
        width: D.
        num_heads: k.
        mlp_width: M.
        **others: fields of `ViTSpec`; `drop_path` is this block's own rate.

    Raises:
        SpecError: num_heads does not divide width; unknown activation, norm or MLP.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_width: int,
        *,
        head_width: int | None = None,
        activation: str = "gelu",
        mlp: str = "plain",
        qkv_bias: QKVBias = True,
        qk_norm: bool = False,
        norm: str = "layer",
        norm_eps: float = 1e-6,
        layer_scale: float | None = None,
        attention_dropout: float = 0.0,
        projection_dropout: float = 0.0,
        mlp_dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = make_norm(norm, width, norm_eps)
        self.attn = MultiHeadSelfAttention(
            width,
            num_heads,
            head_width=head_width,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            norm=norm,
            norm_eps=norm_eps,
            attention_dropout=attention_dropout,
            projection_dropout=projection_dropout,
        )
        self.ls1 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.drop_path1 = DropPath(drop_path)
        self.norm2 = make_norm(norm, width, norm_eps)
        kind = by_name("mlp", mlp, MLPS)
        self.mlp = kind(width, mlp_width, activation=activation, dropout=mlp_dropout)
        self.ls2 = LayerScale(width, layer_scale) if layer_scale else nn.Identity()
        self.drop_path2 = DropPath(drop_path)

    def forward(self, tokens: Tokens, context: Context = PLAIN) -> Tokens:
        """Apply Eq. 2, then Eq. 3."""
        mixed = self.attn(self.norm1(tokens), context)  # Eq. 2
        tokens = tokens + self.drop_path1(self.ls1(mixed))
        return tokens + self.drop_path2(self.ls2(self.mlp(self.norm2(tokens))))  # Eq. 3


class PostNormBlock(EncoderBlock):
    """LN(z + MSA(z)), then LN(z + MLP(z)): "Attention Is All You Need", Sec. 3.1."""

    def forward(self, tokens: Tokens, context: Context = PLAIN) -> Tokens:
        """Normalise the sum."""
        mixed = self.attn(tokens, context)
        tokens = self.norm1(tokens + self.drop_path1(self.ls1(mixed)))
        return self.norm2(tokens + self.drop_path2(self.ls2(self.mlp(tokens))))


class ResPostNormBlock(EncoderBlock):
    """z + LN(MSA(z)), then z + LN(MLP(z)): Swin V2 (arXiv 2111.09883), Fig. 1."""

    def forward(self, tokens: Tokens, context: Context = PLAIN) -> Tokens:
        """Normalise the branch."""
        mixed = self.attn(tokens, context)
        tokens = tokens + self.drop_path1(self.ls1(self.norm1(mixed)))
        return tokens + self.drop_path2(self.ls2(self.norm2(self.mlp(tokens))))


BLOCKS = {"pre_norm": EncoderBlock, "post_norm": PostNormBlock, "res_post_norm": ResPostNormBlock}
assert set(BLOCKS) == set(get_args(Block)), "spec.Block lists what encoder.py builds"


class Encoder(nn.Module):
    """L blocks and the last norm, with no ViT around them: (B, T, D) -> (B, T, D).

    Args:
        width: D.
        depth: L.
        num_heads: k.
        mlp_width: M.
        final_norm: whether there is a norm after the last block.
        **blocks: `block`, `drop_path`, `drop_path_schedule` and any keyword of `EncoderBlock`.

    Raises:
        SpecError: as for `EncoderBlock`, or an unknown kind of block or schedule.

    >>> import torch
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
        norm: str = "layer",
        norm_eps: float = 1e-6,
        final_norm: bool = True,
        **blocks: Any,
    ) -> None:
        super().__init__()
        # One call for all blocks: keywords that are not named here are passed to `EncoderBlock`.
        blocks |= {"width": width, "num_heads": num_heads, "mlp_width": mlp_width}
        self.blocks = stack_blocks(depth, norm=norm, norm_eps=norm_eps, **blocks)
        self.norm = make_norm(norm, width, norm_eps, final_norm)

    def forward(
        self, tokens: Tokens, record: Record | None = None, context: Context = PLAIN
    ) -> Tokens:
        """Return LN(z_L)."""
        for block in block_calls(self.blocks, record):
            tokens = block(tokens, context)
        return self.norm(tokens)


def stack_blocks(
    depth: int,
    *,
    block: str = "pre_norm",
    drop_path: float = 0.0,
    drop_path_schedule: str = "linear",
    **settings: Any,
) -> nn.ModuleList:
    """Create `depth` blocks; stochastic depth rises linearly from 0 to `drop_path`, or is constant.

    A single block is the last one and has `drop_path`.
    """
    rising = [drop_path * (layer / (depth - 1) if depth > 1 else 1) for layer in range(depth)]
    schedules = {"linear": rising, "constant": [drop_path] * depth}
    rates = by_name("drop_path_schedule", drop_path_schedule, schedules)
    kind = by_name("block", block, BLOCKS)
    return nn.ModuleList(kind(drop_path=rate, **settings) for rate in rates)


RunBlock = Callable[[nn.Module, Tokens, Context], Tokens]
"""Another way to run a block, such as with its activations recomputed in the backward pass."""


def block_calls(
    blocks: nn.ModuleList, record: Record | None = None, run: RunBlock | None = None
) -> list[Callable[[Tokens, Context], Tokens]]:
    """Return how each block is called, in order: most often, the blocks themselves.

    Args:
        blocks: the layers, z_0 -> z_L.
        record: the layers that it requests run outside a compiled graph.
        run: runs the other layers, if not a plain call of the block.
    """
    calls: list[Callable[[Tokens, Context], Tokens]] = [*blocks]
    if run is not None:
        calls = [partial(run, block) for block in blocks]
    if record is not None:
        record.begin(len(blocks))
        for layer, block in enumerate(blocks):
            if record.wants(layer):
                # A compiled graph cannot keep tensors that outlive it.
                calls[layer] = partial(record.outside_graph, _run_recorded, record, layer, block)
    return calls


def _run_recorded(
    record: Record, layer: int, block: nn.Module, tokens: Tokens, context: Context
) -> Tokens:
    tokens = block(tokens, context._replace(attend=record.attend(layer)))
    record.keep(layer, tokens)
    return tokens


def recompute_block(block: nn.Module, tokens: Tokens, context: Context) -> Tokens:
    """Run a block that keeps only its input, and is run again in the backward pass."""
    recomputed: Tokens = checkpoint(block, tokens, context, use_reentrant=False)
    return recomputed
