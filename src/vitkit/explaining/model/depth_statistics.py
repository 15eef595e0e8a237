"""Attention distance, attention entropy and token similarity of every layer, over images."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn import functional as F

from vitkit.models.attention import Attend, Heads, Mask, attention_weights
from vitkit.models.encoder import block_calls
from vitkit.models.layers import eval_mode
from vitkit.models.vit import ViT
from vitkit.shapes import Grid, Images, Pooled, Tokens

WEIGHTS_AT_ONCE = 2**25
"""Attention weights of one layer that a batch may have: 128 MB."""
LARGEST_BATCH = 64


@dataclass(frozen=True)
class DepthStatistics:
    """Means over images of attention and tokens, for each of L blocks and k heads.

    Attributes:
        images: how many were measured.
        distance: (L, k) mean attention distance, in pixels of the model's input.
        uniform_distance: the distance of a head that attends to all patches equally, in pixels.
        entropy: (L, k) mean attention entropy, in nats.
        largest_entropy: log T, the entropy of a head that attends to all T tokens equally.
        similarity: (L + 1,) mean cosine similarity with the last layer: of the embedding, then
            after each block.
        similarity_spread: (L + 1,) its standard deviation over the images.
        token: the token compared, `class token` or `mean patch token`.
    """

    images: int
    distance: Float64[np.ndarray, "L k"]
    uniform_distance: float
    entropy: Float64[np.ndarray, "L k"]
    largest_entropy: float
    similarity: Float64[np.ndarray, " depths"]
    similarity_spread: Float64[np.ndarray, " depths"]
    token: str

    @property
    def relative_entropy(self) -> Float64[np.ndarray, "L k"]:
        """The entropy as a share of its largest value, log T: (L, k) in [0, 1]."""
        if self.largest_entropy == 0:  # a single token
            return np.zeros_like(self.entropy)
        return self.entropy / self.largest_entropy


class DepthMeasurement:
    """Running sums for `DepthStatistics`, one batch of images after the other.

    Attention distance ("An Image is Worth 16x16 Words", arXiv 2010.11929, Fig. 7 right and App.
    D.7): for a patch query p, d(p) = sum_q a(p, q) |p - q| / sum_q a(p, q) over all patches q, with
    the attention weights a of one head and the distance |p - q| between the patches' centres in
    pixels of the model's input. Prefix tokens (class, distillation, registers) are neither queries
    nor keys of it. The mean is over all patch queries of all images. In a hybrid the centres are
    those of the cells in the image.

    Attention entropy (arXiv 2303.06296, Sec. 3): -sum_j a(i, j) log a(i, j) over all T tokens j,
    prefix tokens included; the mean is over all T queries of all images.

    Similarity over depth: the cosine between the class token after a block and that after the last
    block, before the last norm; without a class token, of the mean over the patch tokens.

    Memory is that of the attention maps of one layer. The model runs in eval mode, without
    gradients, and keeps its mode.

    Args:
        model: any ViT.

    >>> import vitkit
    >>> model = vitkit.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    >>> measurement = DepthMeasurement(model)
    >>> tokens = measurement.add(torch.zeros(2, 3, 32, 32))
    >>> measurement.result().distance.shape
    (12, 3)
    """

    def __init__(self, model: ViT) -> None:
        self.model = model
        spec = model.spec
        self._distance = np.zeros((spec.depth, spec.num_heads))  # sums over images
        self._entropy = np.zeros((spec.depth, spec.num_heads))
        self._similarity: list[Float64[np.ndarray, "depths B"]] = []
        self._grid: Grid = spec.grid
        self._pixels: Float[Tensor, "N N"] | None = None

    def add(self, images: Images) -> Tokens:
        """Measure a batch, whose grid is that of the batches before it.

        Args:
            images: (B, C, H, W) normalised, on the model's device; B of 1 or more.

        Returns:
            The tokens after the last block, before the last norm (B, T, D).
        """
        with eval_mode(self.model), torch.no_grad():
            tokens, context, grid = self.model.embed(images)
            if self._pixels is None:
                self._grid = grid
                self._pixels = patch_distances(grid, self.model.spec.patch_size).to(tokens)
            summaries = [self._summary(tokens)]
            for layer, block in enumerate(block_calls(self.model.blocks)):
                tokens = block(tokens, context._replace(attend=self._attend(layer)))
                summaries.append(self._summary(tokens))
        # All layers of a batch at once, as they are compared with the last layer.
        depths = torch.stack(summaries).double()  # L+1 B D
        self._similarity.append(F.cosine_similarity(depths, depths[-1:], dim=-1).numpy())
        return tokens

    def result(self) -> DepthStatistics:
        """Return the means over the images measured so far, one or more."""
        similarity = np.concatenate(self._similarity, axis=1)  # L+1 images
        images = similarity.shape[1]
        patches = self._grid[0] * self._grid[1]
        distances = patch_distances(self._grid, self.model.spec.patch_size)
        return DepthStatistics(
            images,
            self._distance / images,
            float(distances.mean()),
            self._entropy / images,
            math.log(self.model.spec.num_prefix_tokens + patches),
            similarity.mean(axis=1),
            similarity.std(axis=1),
            "class token" if self.model.spec.class_token else "mean patch token",
        )

    def _summary(self, tokens: Tokens) -> Pooled:
        """Return the class token, or the mean patch token, on the CPU."""
        spec = self.model.spec
        if spec.class_token:
            return tokens[:, 0].cpu()
        return tokens[:, spec.num_prefix_tokens :].mean(dim=1).cpu()

    def _attend(self, layer: int) -> Attend:
        """Return an attention function that measures the weights of one layer."""

        def attend(
            q: Heads, k: Heads, v: Heads, mask: Mask | None = None, dropout: float = 0.0
        ) -> Heads:
            # The fused kernel keeps no weights, so they are computed here.
            weights = attention_weights(q, k, mask)
            self._distance[layer] += self._mean_distance(weights)
            self._entropy[layer] += _over_images(_row_sums(torch.special.entr(weights)))
            return weights @ v

        return attend

    def _mean_distance(self, weights: Float[Tensor, "B k T T"]) -> Float64[np.ndarray, " k"]:
        assert self._pixels is not None, "set by the first batch"
        prefix = self.model.spec.num_prefix_tokens
        among_patches = weights[:, :, prefix:, prefix:]
        distance = _row_sums(among_patches * self._pixels)  # B k N
        # a query that attends to prefix tokens alone has no weight left to divide by
        total = _row_sums(among_patches).clamp_min(torch.finfo(weights.dtype).tiny)
        return _over_images(distance / total)


def patch_distances(grid: Grid, patch_size: tuple[int, int]) -> Float64[Tensor, "N N"]:
    """Return the distances between the centres of all patches, in pixels: (N, N).

    >>> patch_distances((1, 3), (16, 8))[0].tolist()
    [0.0, 8.0, 16.0]

    Args:
        grid: (gh, gw).
        patch_size: height and width of a patch, in pixels.
    """
    rows, columns = (
        torch.arange(count, dtype=torch.float64) * side
        for count, side in zip(grid, patch_size, strict=True)
    )
    centres = torch.cartesian_prod(rows, columns)  # N 2
    return (centres[:, None] - centres).norm(dim=-1)


def batch_size_for(model: ViT, grid: Grid) -> int:
    """Return how many images of a grid fit into one batch of `DepthMeasurement`."""
    tokens = model.spec.num_prefix_tokens + grid[0] * grid[1]
    # k T^2 weights of each image, in one layer at a time.
    fitting = WEIGHTS_AT_ONCE // (model.spec.num_heads * tokens**2)
    return max(1, min(LARGEST_BATCH, fitting))


def _row_sums(values: Float[Tensor, "B k Q M"]) -> Float[Tensor, "B k Q"]:
    """Sum over keys, in float64 where the device has it."""
    precise = torch.float32 if values.device.type == "mps" else torch.float64
    return values.sum(-1, dtype=precise)


def _over_images(values: Float[Tensor, "B k Q"]) -> Float64[np.ndarray, " k"]:
    """Sum over images the mean over queries, in float64 on the CPU."""
    sums: Float64[np.ndarray, " k"] = values.cpu().double().mean(dim=-1).sum(dim=0).numpy()
    return sums
