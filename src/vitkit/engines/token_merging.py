"""Token merging: similar patch tokens become one between attention and MLP of each block.

"Token Merging: Your ViT But Faster" (ToMe, arXiv 2210.09461), Sec. 3. Numbers of tokens depend on
the image size and r alone, so a merged model can be compiled and exported.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.errors import MODEL, SettingError, check_type
from vitkit.layer_table import summary
from vitkit.models.attention import KERNELS, Context, Heads, MultiHeadSelfAttention
from vitkit.models.encoder import EncoderBlock, PostNormBlock, ResPostNormBlock
from vitkit.models.readout import Features
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.shapes import Images, Tokens
from vitkit.spec import ViTSpec

Sizes = Float[Tensor, "B N"]
"""Patches that each patch token stands for; they add up to the number of patches."""
Places = Int64[Tensor, "B N0"]
"""Index of the patch token that each patch of the image is part of."""


class Merged(NamedTuple):
    """Patch tokens on their way through the blocks.

    Attributes:
        tokens: all tokens (B, T, D), the class, distillation and register tokens first.
        sizes: of the patch tokens (B, N); `None` while each stands for one patch.
        places: for each patch of the image (B, N0); `None` likewise.
    """

    tokens: Tokens
    sizes: Sizes | None = None
    places: Places | None = None


class Matching(NamedTuple):
    """The pairs of a layer: patch tokens at even places (A) to those at odd places (B).

    Attributes:
        order: indices in A (B, a), the most similar to its partner first.
        partner: index in B of the partner of each token of A (B, a), in A's own order.
    """

    order: Int64[Tensor, "B a"]
    partner: Int64[Tensor, "B a"]


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
        SettingError: not a ViT, a number below 0, or a model with rotary positions.
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

    def _refusal(self, what: str) -> SettingError:
        return SettingError(
            f"merge = {self.r}: {what}, as merged tokens are no patches; set merge to 0"
        )

    def _unmerged(self, state: Merged) -> Tokens:
        """Apply the last norm, and give each patch of the image its token."""
        tokens = self.norm(state.tokens)
        if state.places is None:
            return tokens
        prefix = self.spec.num_prefix_tokens
        return torch.cat([tokens[:, :prefix], _take(tokens[:, prefix:], state.places)], dim=1)


def merge_tokens(model: ViT, r: int) -> MergingViT:
    """Return a model that merges r tokens in each block (ToMe, arXiv 2210.09461), without training.

    It shares the weights of the given model, which stays as it is; with r = 0 logits are the same.

    Args:
        model: a ViT; rotary positions are not supported.
        r: tokens that a block has fewer than the block before, such as 8 for ViT-B/16.

    Raises:
        SettingError: not a ViT, a number below 0, or a model with rotary positions.

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
    if r and spec.positions == "rope":
        raise SettingError(
            f"merge = {r}: the model has rotary positions (positions='rope'), and a merged token "
            "has no single position; set merge to 0"
        )


def _merged_of(patches: int, r: int) -> int:
    """Return how many of so many patch tokens a block merges: at most half (appendix D)."""
    return min(r, patches // 2)


def _take(tokens: Tensor, indices: Int64[Tensor, "B n"]) -> Tensor:
    """Return some tokens of each image: (B, N, D), (B, n) -> (B, n, D)."""
    return tokens.gather(1, indices.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))


def _merging_block(block: nn.Module, state: Merged, prefix: int, r: int) -> Merged:
    """Run a block with merging between its halves (Fig. 1)."""
    assert isinstance(block, EncoderBlock)
    log_sizes = None if state.sizes is None else _log_sizes(state.sizes, prefix)
    keys: list[Heads] = []
    attend = partial(_proportional, block.attn, log_sizes, keys)
    tokens = _attention_half(block, state.tokens, Context(attend=attend))
    count = _merged_of(tokens.shape[1] - prefix, r)
    state = state._replace(tokens=tokens)
    if count:
        state = _merge(state, _match(keys[0][:, :, prefix:]), prefix, count)
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


def _log_sizes(sizes: Sizes, prefix: int) -> Float[Tensor, "B 1 1 T"]:
    """Return log s of every token, to add to the scores; 0 for those before the patches."""
    return F.pad(sizes.log(), (prefix, 0))[:, None, None]


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


def _match(keys: Float[Tensor, "B k N h"]) -> Matching:
    """Match patch tokens at even places to those at odd ones: Sec. 3, Bipartite Soft Matching.

    Similarity is the cosine of the keys' means over heads.
    """
    metric = F.normalize(keys.mean(dim=1), dim=-1)  # B N h
    similarity = metric[:, ::2] @ metric[:, 1::2].transpose(1, 2)  # B a b
    best, partner = similarity.max(dim=-1)
    return Matching(best.argsort(dim=1, descending=True), partner)


def _merge(state: Merged, matching: Matching, prefix: int, count: int) -> Merged:
    """Merge the first `count` pairs by their mean, weighted by size; A's others come before B."""
    patches = state.tokens[:, prefix:]
    sizes = patches.new_ones(patches.shape[:2]) if state.sizes is None else state.sizes
    order, partner = matching
    merged, others = order[:, :count], order[:, count:]
    even, odd, even_sizes, odd_sizes = (
        patches[:, ::2],
        patches[:, 1::2],
        sizes[:, ::2],
        sizes[:, 1::2],
    )
    # (B, b, r), the size of a merged token in the row of its partner: a small matrix product in
    # place of a scatter, which engines compute in turn, or not at all
    rows = torch.arange(odd.shape[1], device=odd.device)[:, None]
    into = (partner.gather(1, merged)[:, None] == rows).to(sizes.dtype)
    into = into * even_sizes.gather(1, merged)[:, None]
    new_sizes = odd_sizes + into.sum(dim=-1)  # B b
    means = odd * (odd_sizes / new_sizes)[..., None]
    means = means + (into / new_sizes[..., None]) @ _take(even, merged)
    return Merged(
        torch.cat([state.tokens[:, :prefix], _take(even, others), means], dim=1),
        torch.cat([even_sizes.gather(1, others), new_sizes], dim=1),
        _new_places(state.places, matching, count, patches.shape[1]),
    )


def _new_places(places: Places | None, matching: Matching, count: int, patches: int) -> Places:
    """Follow each patch of the image into the token that it is part of now."""
    order, partner = matching
    half = order.shape[1]
    rank = order.argsort(dim=1)  # of each token of A
    odd = torch.arange(patches - half, device=order.device) + (half - count)
    even = torch.where(rank < count, partner + (half - count), rank - count)
    new = torch.cat([even, odd.expand(order.shape[0], -1)], dim=1)  # A, then B
    if places is None:
        places = torch.arange(patches, device=order.device).expand(order.shape[0], -1)
    return new.gather(1, places // 2 + places % 2 * half)
