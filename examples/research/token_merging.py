"""Token merging (ToMe): each block merges the r most similar pairs of patches, without training.

    python examples/research/token_merging.py CHECKPOINT DATA --merge 8

"Token Merging: Your ViT But Faster" (arXiv 2210.09461), Sec. 3. Prints top-1 with and without, the
share of images with the same class, and that of multiply-adds. `merge_tokens(model, r)` is a ViT
for everything else: `torch.compile`, `torch.export`, `vitkit.evaluate`.

The authors' program (github.com/facebookresearch/ToMe, `tome/merge.py`) keeps the class token in
the set A of the matching, where it is never merged; here both sets hold patch tokens alone, so that
registers change nothing.
"""

from __future__ import annotations

import argparse
import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import vitkit


class Merged(NamedTuple):
    """Tokens between two blocks; `sizes` and `places` are None while nothing is merged."""

    tokens: Tensor  # (B, T, D); class, distillation and register tokens first
    sizes: Tensor | None = None  # (B, T): patches that each token stands for
    places: Tensor | None = None  # (B, T0): the token that each of the first block's is part of


class Matching(NamedTuple):
    """The r tokens that a block merges."""

    kept: Tensor  # (B, T - r): indices of all others, in their new order
    merged: Tensor  # (B, r): indices of the merged ones
    into: Tensor  # (B, r): the place of each one's partner among the kept


class MergingViT(vitkit.ViT):
    """A ViT that merges r patch tokens in each block, at most half: (B, C, H, W) -> (B, K).

    Class, distillation and register tokens are never merged. After the last block each patch gets
    the value of the token that it is part of, so that every pooling weights tokens by size.
    """

    def __init__(self, model: vitkit.ViT, r: int) -> None:
        nn.Module.__init__(self)
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        vars(self).update(vars(copy.deepcopy(model, shared)))
        self.r = r

    def forward_features(
        self, images: Tensor, record: vitkit.Record | None = None
    ) -> vitkit.Features:
        """Return all tokens after the last norm, each patch with the value of its merged token."""
        if record is not None:
            raise vitkit.SettingError("merged tokens are no patches: no Record can be kept")
        tokens, _, grid = self.embed(images)
        state = Merged(tokens)
        for block in self.blocks:
            state = merging_block(block, state, self.spec.num_prefix_tokens, self.r)
        tokens = self.norm(state.tokens)
        if state.places is not None:
            tokens = take(tokens, state.places)
        return vitkit.Features.split(tokens, grid, self.spec)

    def forward_intermediates(self, *_: Any, **__: Any) -> Any:
        """Refuse: tokens of inner blocks are no patches."""
        raise vitkit.SettingError("merged tokens are no patches: no inner layer can be returned")


def merge_tokens(model: vitkit.ViT, r: int) -> MergingViT:
    """Return a model that merges r tokens in each block; it shares the weights of the given one.

    Raises:
        SettingError: r is no number from 0 to half of the patches, or a model with rotary
            positions or with another block than pre-norm.
    """
    spec = model.spec
    most = spec.num_patches // 2
    if not isinstance(r, int) or isinstance(r, bool) or not 0 <= r <= most:
        raise vitkit.SettingError(
            f"merge = {r!r}: must be a whole number from 0 to {most}, half of the patches"
        )
    if spec.positions == "rope":
        raise vitkit.SettingError("the model has rotary positions, and merged tokens have no place")
    if spec.block != "pre_norm":
        raise vitkit.SettingError(f"blocks {spec.block!r} are not merged; pre_norm is expected")
    return MergingViT(model, r)


def tokens_per_layer(spec: vitkit.ViTSpec, r: int) -> list[int]:
    """Return the number of tokens after each block."""
    counts, patches = [], spec.num_patches
    for _ in range(spec.depth):
        patches -= min(r, patches // 2)
        counts.append(patches + spec.num_prefix_tokens)
    return counts


def compute_share(model: vitkit.ViT, r: int) -> float:
    """Return the multiply-adds of an image with merging, matching included, over those without."""
    return vitkit.summary(merge_tokens(model, r)).mult_adds / vitkit.summary(model).mult_adds


def merging_block(block: vitkit.EncoderBlock, state: Merged, prefix: int, r: int) -> Merged:
    """Run a pre-norm block with merging between its halves: Sec. 3, "Strategy"."""
    attn, tokens = block.attn, state.tokens
    q, k, v = attn.heads(block.norm1(tokens))
    if state.sizes is None:
        mixed = attn.attend(q, k, v, None, attn.dropout)
    else:  # proportional attention: softmax(q k^T / sqrt(h) + log s), "Tracking Token Size"
        log_sizes = state.sizes.log()[:, None, None].to(q.dtype)  # B 1 1 T
        mixed = F.scaled_dot_product_attention(q, k, v, log_sizes, attn.dropout)
    tokens = tokens + block.drop_path1(block.ls1(attn.mix(mixed)))
    state = state._replace(tokens=tokens)
    count = min(r, (tokens.shape[1] - prefix) // 2)  # the sets of the matching are halves
    if count:
        state = merge(state, match(k, prefix, count))
    changed = block.drop_path2(block.ls2(block.mlp(block.norm2(state.tokens))))
    return state._replace(tokens=state.tokens + changed)


def match(keys: Tensor, prefix: int, count: int) -> Matching:
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


def merge(state: Merged, matching: Matching) -> Merged:
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
    remaining = take(tokens, kept)
    change = take(tokens, merged) - take(remaining, into)  # B r D
    # The place of each of the block's tokens, then of the first block's.
    inverse = torch.cat([kept, merged], dim=1).argsort(dim=1)
    now = torch.cat([places.expand(kept.shape), into], dim=1).gather(1, inverse)
    return Merged(
        torch.baddbmm(remaining, weights / new_sizes[..., None], change),
        new_sizes,
        now if state.places is None else now.gather(1, state.places),
    )


def take(tokens: Tensor, indices: Tensor) -> Tensor:
    """Return some tokens of each image: (B, T, D), (B, n) -> (B, n, D)."""
    batch, count, width = tokens.shape
    first = torch.arange(batch, device=indices.device)[:, None] * count
    # Of whole rows: `gather` reads an index for each number, which takes 7 times as long on a CPU.
    return F.embedding(indices + first, tokens.reshape(-1, width))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("checkpoint")
    parser.add_argument("data")
    parser.add_argument("--merge", type=int, default=8, help="pairs of patches a block merges")
    args = parser.parse_args()
    checkpoint = vitkit.load(args.checkpoint)
    merging = merge_tokens(checkpoint.model, args.merge)
    plain = vitkit.evaluate(checkpoint, args.data)
    merged = vitkit.evaluate(replace(checkpoint, model=merging), args.data)
    same = (plain.predicted == merged.predicted).mean()
    print(f"top-1 {plain['top1']:.4f} without merging, {merged['top1']:.4f} with {args.merge}")
    print(f"same class: {same:.2%} of {len(plain.predicted):,} images")
    print(f"multiply-adds: {compute_share(checkpoint.model, args.merge):.3f} of those without")


if __name__ == "__main__":
    main()
