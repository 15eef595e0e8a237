"""Token merging: similar patch tokens become one between attention and MLP of each block.

"Token Merging: Your ViT But Faster" (ToMe, arXiv 2210.09461), Sec. 3. Numbers of tokens depend on
the image size and r alone, so a merged model can be compiled and exported.

The authors' program (github.com/facebookresearch/ToMe, `tome/merge.py`) keeps the class token in
the set A of the matching, where it is never merged; here both sets hold patch tokens alone, so that
registers change nothing.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.errors import MODEL, SettingError, UserError, check_type
from vitkit.layer_table import summary
from vitkit.models.attention import KERNELS, Context, Heads, MultiHeadSelfAttention
from vitkit.models.encoder import EncoderBlock, PostNormBlock, ResPostNormBlock
from vitkit.models.readout import Features
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import Images, Tokens
from vitkit.spec import ViTSpec


class Merged(NamedTuple):
    """Tokens on their way through the blocks.

    Attributes:
        tokens: (B, T, D), the class, distillation and register tokens first.
        sizes: patches that each token stands for (B, T), 1 for those first ones; `None` while
            nothing is merged.
        places: the token that each of the first block's tokens is part of (B, T0); `None` likewise.
    """

    tokens: Tokens
    sizes: Float[Tensor, "B T"] | None = None
    places: Int64[Tensor, "B T0"] | None = None


class Matching(NamedTuple):
    """The tokens that a block merges, r of T.

    Attributes:
        kept: indices of all others in their new order (B, T - r).
        merged: indices of the r that are merged into others (B, r).
        into: for each of the r, its partner's place among the kept ones (B, r).
    """

    kept: Int64[Tensor, "B n"]
    merged: Int64[Tensor, "B r"]
    into: Int64[Tensor, "B r"]


class MergingViT(ViT):
    """A ViT that merges up to r patch tokens in each block: images (B, C, H, W) -> logits (B, K).

    Class, distillation and register tokens are never merged. Attention is proportional,
    softmax(q k^T / sqrt(h) + log s) with s the patches that a token stands for, and tokens are
    merged by their mean weighted by s (Sec. 3). After the last block each patch has the value of
    the token it is part of, so that every pooling weights tokens by size, and features keep their
    grid.

    Args:
        model: the ViT; weights are shared with it, modules are copies.
        r: tokens to merge in a block; at most half of a block's patch tokens are.

    Attributes:
        r: as given.

    Raises:
        SettingError: not a ViT, a number below 0 or above half of the patches, or a model with
            rotary positions.
    """

    def __init__(self, model: ViT, r: int) -> None:
        check_type(model, ViT, "merge_tokens", MODEL)
        _check_merge(model.spec, r)
        nn.Module.__init__(self)
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        vars(self).update(vars(copy.deepcopy(model, shared)))
        self.r = r

    def forward_features(self, images: Images, record: Record | None = None) -> Features:
        """Return all tokens after the last norm, each patch with the value of its merged token.

        The patches (B, N, D) are those of the image, row by row: equal where they were merged.

        Args:
            images: (B, C, H, W) float, normalised.
            record: refused, unless r is 0.

        Raises:
            ShapeError: as the model.
            SettingError: a record.
        """
        if not self.r:
            return super().forward_features(images, record)
        if record is not None:
            raise self._refusal("a Record cannot be kept")
        tokens, _, grid = self.embed(images)
        state = Merged(tokens)
        for block in self.blocks:
            state = _merging_block(block, state, self.spec.num_prefix_tokens, self.r)
        return Features.split(self._unmerged(state), grid, self.spec)

    def forward_intermediates(self, *args: Any, **options: Any) -> Any:
        """Return the tokens after some blocks, as `ViT` does, if r is 0.

        Raises:
            SettingError: r is not 0, or as `ViT`.
        """
        if self.r:
            raise self._refusal("tokens of inner blocks cannot be returned")
        return super().forward_intermediates(*args, **options)

    def _refusal(self, what: str) -> UserError:
        reason = f"{what}, as merged tokens are no patches; set merge to 0"
        return SettingError.about("merge", self.r, reason)

    def _unmerged(self, state: Merged) -> Tokens:
        """Apply the last norm, and give each patch of the image its token."""
        tokens = self.norm(state.tokens)
        if state.places is None:
            return tokens
        return _take(tokens, state.places)


def merge_tokens(model: ViT, r: int) -> MergingViT:
    """Return a model that merges r tokens in each block (ToMe, arXiv 2210.09461), without training.

    It shares the weights of the given model, which stays as it is; with r = 0 logits are the same.

    Args:
        model: a ViT; rotary positions are not supported.
        r: tokens that a block has fewer than the block before, such as 8 for ViT-B/16.

    Raises:
        SettingError: not a ViT, a number below 0 or above half of the patches, or a model with
            rotary positions.

    >>> model = ViT(image_size=32, patch_size=8, width=64, depth=2, num_heads=4, mlp_width=128)
    >>> merged = merge_tokens(model.eval(), 4)
    >>> merged(torch.zeros(2, 3, 32, 32)).shape, tokens_per_layer(model.spec, 4)
    (torch.Size([2, 1000]), [13, 9])
    """
    return MergingViT(model, r)


def tokens_per_layer(spec: ViTSpec, r: int) -> list[int]:
    """Return the number of tokens after each block, for images of the spec's size.

    Args:
        spec: the architecture.
        r: tokens to merge in a block.

    Raises:
        SettingError: as `merge_tokens`.

    >>> tokens_per_layer(ViTSpec(), 8)
    [189, 181, 173, 165, 157, 149, 141, 133, 125, 117, 109, 101]
    """
    _check_merge(spec, r)
    counts = []
    patches = spec.num_patches
    for _ in range(spec.depth):
        patches -= _merged_of(patches, r)
        counts.append(patches + spec.num_prefix_tokens)
    return counts


def merged_compute_share(model: ViT, r: int) -> float:
    """Return the multiply-adds of an image with merging, matching included, over those without.

    The model may be on any device, `meta` included: nothing is computed. Errors as `merge_tokens`.

    >>> with torch.device("meta"):
    ...     round(merged_compute_share(ViT(ViTSpec()), 8), 2)
    0.75
    """
    merged, plain = summary(merge_tokens(model, r)).rows[0], summary(model).rows[0]
    return merged.mult_adds / plain.mult_adds


def _check_merge(spec: ViTSpec, r: int) -> None:
    if not isinstance(r, int) or isinstance(r, bool) or r < 0:
        raise SettingError.about("merge", r, "must be a whole number, 0 or more")
    most = spec.num_patches // 2
    if r > most:
        raise SettingError.about(
            "merge", r, f"must be at most {most}, half of the model's {spec.num_patches} patches"
        )
    if r and spec.positions == "rope":
        raise SettingError.about(
            "merge",
            r,
            "the model has rotary positions (positions='rope'), and a merged token has no single "
            "position; leave merging out",
        )


def _merged_of(patches: int, r: int) -> int:
    """Return how many of so many patch tokens a block merges: at most half, as the sets of
    the matching are halves."""
    return min(r, patches // 2)


def _merging_block(block: nn.Module, state: Merged, prefix: int, r: int) -> Merged:
    """Run a block with merging between its halves: Sec. 3, "Strategy"."""
    assert isinstance(block, EncoderBlock)
    log_sizes = None if state.sizes is None else state.sizes.log()[:, None, None]  # B 1 1 T
    keys: list[Heads] = []
    attend = partial(_proportional, block.attn, log_sizes, keys)
    tokens = _attention_half(block, state.tokens, Context(attend=attend))
    state = state._replace(tokens=tokens)
    count = _merged_of(tokens.shape[1] - prefix, r)
    if count:
        state = _merge(state, _match(keys[0], prefix, count))
    return state._replace(tokens=_mlp_half(block, state.tokens))


def _attention_half(block: EncoderBlock, tokens: Tokens, context: Context) -> Tokens:
    """Apply a block's first residual, as its `forward` does."""
    if isinstance(block, PostNormBlock):
        return block.norm1(tokens + block.drop_path1(block.ls1(block.attn(tokens, context))))
    if isinstance(block, ResPostNormBlock):
        mixed = block.norm1(block.attn(tokens, context))
    else:
        mixed = block.attn(block.norm1(tokens), context)
    return tokens + block.drop_path1(block.ls1(mixed))


def _mlp_half(block: EncoderBlock, tokens: Tokens) -> Tokens:
    """Apply a block's second residual, as its `forward` does."""
    if isinstance(block, PostNormBlock):
        return block.norm2(tokens + block.drop_path2(block.ls2(block.mlp(tokens))))
    if isinstance(block, ResPostNormBlock):
        return tokens + block.drop_path2(block.ls2(block.norm2(block.mlp(tokens))))
    return tokens + block.drop_path2(block.ls2(block.mlp(block.norm2(tokens))))


def _proportional(
    attn: MultiHeadSelfAttention,
    log_sizes: Float[Tensor, "B 1 1 T"] | None,
    keys: list[Heads],
    q: Heads,
    k: Heads,
    v: Heads,
    mask: Tensor | None = None,
    dropout: float = 0.0,
) -> Heads:
    """Attend by the module's own kernel, with log s added to the scores: Sec. 3, "Tracking Token
    Size". The keys are appended to `keys`."""
    keys.append(k)
    if log_sizes is None:
        return attn.attend(q, k, v, mask, dropout)
    log_sizes = log_sizes.to(q.dtype)
    if attn.attend is KERNELS["plain"]:  # it takes no numbers to add
        scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
        return F.dropout((scores + log_sizes).softmax(dim=-1), dropout) @ v
    return attn.attend(q, k, v, log_sizes, dropout)


def _match(keys: Heads, prefix: int, count: int) -> Matching:
    """Choose the tokens to merge: Sec. 3, "Token Similarity" and "Bipartite Soft Matching".

    Patch tokens at even places (A) have an edge to the most similar one at odd places (B), by the
    cosine of the keys' means over heads; the `count` most similar pairs are merged.
    """
    metric = F.normalize(keys.mean(dim=1), dim=-1)  # B T h
    similarity = metric[:, prefix::2] @ metric[:, prefix + 1 :: 2].transpose(1, 2)  # B a b
    best, partner = similarity.max(dim=-1)  # B a
    order = best.argsort(dim=1, descending=True)  # the most similar first
    batch, half = order.shape
    places = torch.arange(keys.shape[2], device=keys.device)
    first, odd = places[:prefix].expand(batch, -1), places[prefix + 1 :: 2].expand(batch, -1)
    even = order * 2 + prefix
    return Matching(
        kept=torch.cat([first, even[:, count:], odd], dim=1),
        merged=even[:, :count],
        into=partner.gather(1, order[:, :count]) + (prefix + half - count),
    )


def _merge(state: Merged, matching: Matching) -> Merged:
    """Put means weighted by size in the places of the partners, and leave the merged tokens out.

    Tokens i that go into a partner p make it p + sum_i s_i / s (x_i - p), with s its new size.
    """
    kept, merged, into = matching
    tokens, sizes = state.tokens, state.sizes
    if sizes is None:
        sizes = tokens.new_ones(tokens.shape[:2])
    places = torch.arange(kept.shape[1], device=kept.device)
    # As a matrix of T' rows: its product is faster than a scatter in every engine.
    weights = (into[:, None] == places[:, None]) * sizes.gather(1, merged)[:, None]  # B T' r
    new_sizes = sizes.gather(1, kept) + weights.sum(dim=-1)
    remaining = _take(tokens, kept)
    change = _take(tokens, merged) - _take(remaining, into)  # B r D
    return Merged(
        torch.baddbmm(remaining, weights / new_sizes[..., None], change),
        new_sizes,
        _new_places(state.places, matching),
    )


def _new_places(places: Int64[Tensor, "B T0"] | None, matching: Matching) -> Int64[Tensor, "B T0"]:
    """Follow each of the first block's tokens to the token that it is part of now."""
    kept, merged, into = matching
    numbers = torch.arange(kept.shape[1], device=kept.device).expand(kept.shape[0], -1)
    inverse = torch.cat([kept, merged], dim=1).argsort(dim=1)
    new = torch.cat([numbers, into], dim=1).gather(1, inverse)  # of each of the block's tokens
    return new if places is None else new.gather(1, places)


def _take(tokens: Tokens, indices: Int64[Tensor, "B n"]) -> Float[Tensor, "B n D"]:
    """Return some tokens of each image: (B, T, D), (B, n) -> (B, n, D)."""
    batch, count, width = tokens.shape
    first = torch.arange(batch, device=indices.device)[:, None] * count
    # Of whole rows: `gather` reads an index for each number, which takes 7 times as long on a CPU.
    return F.embedding(indices + first, tokens.reshape(-1, width))
