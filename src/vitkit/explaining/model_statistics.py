"""Statistics of a model: attention over depth, filters, artefacts, positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.errors import MODEL, CheckpointError, SettingError, check_type
from vitkit.explaining.methods.attention import attention
from vitkit.messages import plural
from vitkit.models.attention import Attend, Heads, Mask, attention_weights
from vitkit.models.embedding import HybridEmbedding, NormedPatchEmbedding
from vitkit.models.encoder import block_calls
from vitkit.models.hybrid import StdConv2d, standardise
from vitkit.models.layers import eval_mode
from vitkit.models.record import Record
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
                self._pixels = _patch_distances(grid, self.model.spec.patch_size).to(tokens)
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
        distances = _patch_distances(self._grid, self.model.spec.patch_size)
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


def _patch_distances(grid: Grid, patch_size: tuple[int, int]) -> Float64[Tensor, "N N"]:
    """Return the distances between the centres of all patches, in pixels: (N, N).

    >>> _patch_distances((1, 3), (16, 8))[0].tolist()
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


# First-layer filters: the principal components of the patch embedding.

MOST_FILTERS = 28
"""Components that are shown; as many as in Fig. 7 of the paper."""


@dataclass(frozen=True)
class Filters:
    """Principal components of the filters that a model applies to pixels first.

    Attributes:
        components: (n, P, Q, C), each of length 1, the one of the largest variance first; P and Q
            are the filter's height and width in pixels, C is 1 for grey images and 3 for RGB.
        shares: (n,) share of the variance of each, in [0, 1].
        layer: the layer whose filters these are, in words.
        missing: why there are none, as a sentence; else empty.
    """

    components: Float64[np.ndarray, "n P Q C"]
    shares: Float64[np.ndarray, " n"]
    layer: str = "patch embedding"
    missing: str = ""


def first_layer_filters(model: ViT, count: int = MOST_FILTERS) -> Filters:
    """Return the principal components of the first-layer filters.

    "An Image is Worth 16x16 Words" (arXiv 2010.11929), Fig. 7 left. The D filters of the patch
    embedding are D points in the space of C * P * Q pixel values; the components are the directions
    of largest variance around the filters' mean. The sign of a component is chosen so that its
    largest weight is positive. Weights apply to normalised pixels. A patch embedding that begins
    with a norm counts with that norm's scale. In a hybrid the filters are those of the backbone's
    first convolution, standardised where the convolution standardises them.

    Args:
        model: any ViT; only its weights are used.
        count: components at most; those without variance are left out.

    Raises:
        CheckpointError: weights that are not finite.
    """
    found = _pixel_kernel(model)
    if found is None:
        return _no_filters(model, "The backbone has no convolution that takes the image.")
    kernel, layer = found
    weights = kernel.detach().double().cpu().numpy()  # D C P Q
    if not np.isfinite(weights).all():
        raise CheckpointError(
            f"the weights of the {layer} are not finite (NaN or infinity); use an earlier model"
        )
    rows = weights.reshape(len(weights), -1)
    rows = rows - rows.mean(axis=0)
    # right singular vectors of the centred filters are the components, largest variance first
    _, sizes, directions = np.linalg.svd(rows, full_matrices=False)
    variances = sizes**2
    # components without variance, as with few filters, are rounding errors
    rank = int((sizes > sizes[0] * max(rows.shape) * np.finfo(np.float64).eps).sum())
    if not rank:
        return _no_filters(model, "All first-layer filters are equal, so they have no components.")
    shares = variances / variances.sum()
    directions = directions[: min(count, rank)]
    largest = np.abs(directions).argmax(axis=1)
    # The sign of a singular vector is arbitrary; a fixed rule makes figures repeatable.
    signs = np.sign(directions[np.arange(len(directions)), largest])
    components = (directions * signs[:, None]).reshape(-1, *weights.shape[1:])
    return Filters(components.transpose(0, 2, 3, 1), shares[: len(directions)], layer)


def _no_filters(model: ViT, reason: str) -> Filters:
    empty = np.zeros((0, 0, 0, model.spec.in_channels))
    return Filters(empty, np.zeros(0), missing=reason)


def _pixel_kernel(model: ViT) -> tuple[Float[Tensor, "D C P Q"], str] | None:
    """Return the weights that are applied to pixels first, and the name of their layer."""
    stem = model.patch_embed
    if isinstance(stem, HybridEmbedding):
        for part in stem.backbone.modules():
            if isinstance(part, StdConv2d):
                return standardise(part.weight, part.variant), "first convolution"
            if isinstance(part, nn.Conv2d) and part.weight.shape[1] == model.spec.in_channels:
                return part.weight, "first convolution"
        return None
    weight = stem.proj.weight
    if isinstance(stem, NormedPatchEmbedding):
        weight = weight * stem.norm_patches.weight  # D (C P Q)
    return weight.reshape(len(weight), stem.in_channels, *stem.patch_size), "patch embedding"


# Artefacts: patch tokens of very high norm, and the attention that they draw.

IMAGES = "preprocessed images, a tensor (B, C, H, W)"
"""The expected images of functions of a model, for messages."""
DEVIATIONS = 4
"""Median absolute deviations above the median from which a norm is high."""


@dataclass(frozen=True)
class Artefacts:
    """High-norm patch tokens of a model on some images.

    "Vision Transformers Need Registers" (arXiv 2309.16588), Sec. 2: large models without registers
    write a few background patches with norms far above the others, and keep no local information
    there.

    Attributes:
        high: (B, gh, gw), True for each patch of high norm.
        norms: (B, gh, gw) norms of the last block's patch outputs, before the last norm.
        threshold: a norm above it is high.
        attention: share of the readout's attention to patches that goes to those of high norm, mean
            over images, in [0, 1].
    """

    high: Bool[np.ndarray, "B gh gw"]
    norms: Float64[np.ndarray, "B gh gw"]
    threshold: float
    attention: float

    @property
    def count(self) -> int:
        """The number of high-norm patches in all images."""
        return int(self.high.sum())

    @property
    def share(self) -> float:
        """The share of all patches that have a high norm, in [0, 1]."""
        return self.count / self.high.size

    def __str__(self) -> str:
        """Return one line: how many patches, their norms, and their share of the attention."""
        patches = f"{self.count:,} of {plural(self.high.size, 'patch token')}"
        line = f"{patches} ({100 * self.share:.1f} %) have a norm above {self.threshold:.3g}"
        if not self.count:
            return line
        return (
            f"{line} (largest {self.norms.max():.3g}, median {np.median(self.norms):.3g}) and get "
            f"{100 * self.attention:.1f} % of the attention to patches"
        )

    def _repr_html_(self) -> str:
        return f"<p>{self}</p>"


def find_artefacts(model: ViT, images: Images, *, threshold: float | None = None) -> Artefacts:
    """Find patch tokens of high norm, and their share of the readout's attention.

    The norm of a patch is that of its output of the last block, before the last norm. It is high
    above the median + 4 median absolute deviations of all patches of all images; about 0.3 % of
    normally distributed norms are. The attention is that of the method `attention` in the last
    layer: of the class token, the mean query or the MAP head's query, mean over heads, without the
    attention to prefix tokens.

    Args:
        model: any ViT, in any mode; it runs in eval mode without gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device.
        threshold: a norm above it is high; default as above. To compare before with after, pass the
            threshold of before.

    Raises:
        SettingError: not a model, no image, or a threshold that is not a positive number.
        ShapeError: images that do not fit the model.
    """
    check_type(model, ViT, "find_artefacts", MODEL)
    check_type(images, Tensor, "find_artefacts", IMAGES)
    record = Record(tokens=[-1])
    with eval_mode(model), torch.inference_mode():
        grid = model.forward_features(images, record).grid
    (tokens,) = record.tokens.values()
    return count_artefacts(patch_norms(model, tokens, grid), attention(model, images), threshold)


def patch_norms(model: ViT, tokens: Tokens, grid: Grid) -> Float[Tensor, "B gh gw"]:
    """Return the norms of the patches among the tokens of a block (B, T, D).

    Args:
        model: the model of the tokens.
        tokens: (B, T, D), prefix tokens first.
        grid: (gh, gw) of the patches.
    """
    return tokens[:, model.spec.num_prefix_tokens :].norm(dim=-1).unflatten(1, grid)


def high_norm(norms: Float64[np.ndarray, "..."]) -> float:
    """Return the median + 4 median absolute deviations of norms.

    >>> high_norm(np.array([1.0, 2.0, 3.0, 4.0, 50.0]))
    7.0
    """
    median = np.median(norms)
    return float(median + DEVIATIONS * np.median(np.abs(norms - median)))


def count_artefacts(
    norms: Float[Tensor, "B gh gw"],
    attention: Float[Tensor, "B gh gw"],
    threshold: float | None = None,
) -> Artefacts:
    """Count the patches of high norm.

    Args:
        norms: norms of the patches of each image.
        attention: attention of the readout to the patches, each image's sum is 1.
        threshold: as for `find_artefacts`.

    Raises:
        SettingError: no image, or a threshold that is not a positive number.
    """
    if not len(norms):
        raise SettingError("no images; pass one image or more, (B, C, H, W)")
    if threshold is not None and not threshold > 0:
        raise SettingError.about("threshold", threshold, "must be a positive number")
    values = norms.double().cpu().numpy()
    limit = high_norm(values) if threshold is None else threshold
    high = values > limit
    # Each image's weights sum to 1, so its sum over high patches is a share.
    weights = attention.double().cpu().numpy()
    return Artefacts(high, values, limit, float((weights * high).sum() / len(values)))


# Position similarity: how alike the position embeddings of two patches are.

KINDS = {
    "learned": "learned position embedding",
    "rope": "rotary positions (sine and cosine of the angles)",
}
"""Names of kinds of positions; all others are fixed tables."""


@dataclass(frozen=True)
class PositionSimilarity:
    """Cosine similarity of the position embedding of each patch with that of every other.

    Attributes:
        cosine: (gh, gw, gh, gw) in [-1, 1]; at [i, j] the map of the patch in row i and column j.
        kind: kind of the positions, in words.
        missing: why there is none, as a sentence; else empty.
    """

    cosine: Float64[np.ndarray, "gh gw gh gw"]
    kind: str
    missing: str = ""


def position_similarity(model: ViT, grid: Grid | None = None) -> PositionSimilarity:
    """Return the cosine similarity between the positions of all patches.

    "An Image is Worth 16x16 Words" (arXiv 2010.11929), Fig. 7 centre. Learned and fixed tables are
    compared row by row, without the rows of prefix tokens. Rotary positions add nothing to a token;
    their vectors are sine and cosine of the angles that a head is turned by. Their cosine is the
    factor by which turning changes the product of a query with an equal key, where all pairs of a
    head are equally long ("RoFormer", arXiv 2104.09864, Eq. 16).

    Args:
        model: any ViT; only its weights are used.
        grid: (gh, gw) of the patches, to which a learned table is resampled; default the model's.
    """
    grid = grid or model.spec.grid
    kind = model.spec.positions
    if kind == "none":
        return PositionSimilarity(
            np.zeros((0, 0, 0, 0)), "none", missing="The model has no positions."
        )
    with torch.no_grad():
        # Of rows of length 1 the products are cosines.
        vectors = F.normalize(_position_vectors(model, grid).double().cpu(), dim=1)  # N E
    rows, columns = grid
    cosine = (vectors @ vectors.T).clamp(-1, 1).reshape(rows, columns, rows, columns)
    return PositionSimilarity(cosine.numpy(), KINDS.get(kind, f"fixed positions ({kind})"))


def _position_vectors(model: ViT, grid: Grid) -> Float[Tensor, "N E"]:
    """Return a vector for the position of each patch."""
    spec = model.spec
    patches = grid[0] * grid[1]
    weight = next(model.parameters())
    tokens = weight.new_zeros(1, spec.num_prefix_tokens + patches, spec.width)
    if model.rope is not None:
        # Only the differences of angles matter to attention; these vectors keep them.
        sin, cos = model.rope(grid, tokens)
        table = torch.cat([sin, cos], dim=1)  # T 2h
    else:
        table = model.embedding.positions(model.pos_embed, grid, tokens)[0]
    # The rows of prefix tokens come first.
    return table[-patches:]
