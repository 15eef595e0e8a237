"""Measure what a model has learned: filters, positions, attention over depth, artefacts."""

import math
from functools import partial

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit import errors, shapes
from vitkit.explaining.methods.attention import attention
from vitkit.explaining.model import (
    Artefacts,
    DepthStatistics,
    Filters,
    ModelExplanation,
    PositionSimilarity,
)
from vitkit.models import embedding, encoder, hybrid, layers
from vitkit.models.attention import Heads, Mask, attention_weights
from vitkit.models.record import Record
from vitkit.models.vit import ViT

WEIGHTS_AT_ONCE, LARGEST_BATCH = 2**25, 64
"""Attention weights of one layer that a batch may have, 128 MB, and images of it."""
MOST_FILTERS = 28
"""Components that are shown; as many as in Fig. 7 of the paper."""
IMAGES = "preprocessed images, a tensor (B, C, H, W)"
"""The expected images of functions of a model, for messages."""
DEVIATIONS = 4
"""Median absolute deviations above the median from which a norm is high."""
KINDS = {
    "learned": "learned position embedding",
    "rope": "rotary positions (sine and cosine of the angles)",
}
"""Names of kinds of positions; all others are fixed tables."""


class ModelMeasurement:
    """All numbers of a `ModelExplanation`, from batches of images of one size.

    Attention distance ("An Image is Worth 16x16 Words", arXiv 2010.11929, Fig. 7 right and App.
    D.7): for a patch query p, d(p) = sum_q a(p, q) |p - q| / sum_q a(p, q) over all patches q, with
    the attention weights a of one head and the distance |p - q| between the patches' centres in
    pixels of the model's input. Prefix tokens (class, distillation, registers) are neither queries
    nor keys of it. The mean is over all patch queries of all images. In a hybrid the centres are
    those of the cells in the image.

    Attention entropy (arXiv 2303.06296, Sec. 3): -sum_j a(i, j) log a(i, j) over all T tokens j,
    prefix tokens included; the mean is over all T queries of all images.

    Memory is that of the attention maps of one layer. The model runs in eval mode, without
    gradients, and keeps its mode.

    Args:
        model: any ViT.

    >>> import vitkit
    >>> model = vitkit.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)
    >>> measurement = ModelMeasurement(model)
    >>> norms = measurement.add(torch.rand(2, 3, 32, 32))
    >>> measurement.result("tiny").depth.distance.shape
    (12, 3)
    """

    def __init__(self, model: ViT) -> None:
        self.model = model
        size = model.spec.depth, model.spec.num_heads
        self._distance, self._entropy = np.zeros(size), np.zeros(size)  # sums over images
        self._pixels: Float64[Tensor, "N N"] | None = None
        self._norms: list[Float[Tensor, "B gh gw"]] = []
        self._attention: list[Float[Tensor, "B gh gw"]] = []

    def batch_size(self, image_size: tuple[int, int]) -> int:
        """Return how many images of a size (H, W) fit into one batch."""
        spec = self.model.spec
        patches = math.prod(image_size) // math.prod(spec.patch_size)
        tokens = spec.num_prefix_tokens + patches
        # k T^2 weights of each image, in one layer at a time
        return max(1, min(LARGEST_BATCH, WEIGHTS_AT_ONCE // (spec.num_heads * tokens**2)))

    def add(self, images: shapes.Images) -> Float[Tensor, "B 1"]:
        """Measure a batch, whose grid is that of the batches before it.

        Args:
            images: (B, C, H, W) normalised; they are moved to the model's device and dtype.

        Returns:
            The largest norm of a patch token of each image, (B, 1).

        Raises:
            CheckpointError: tokens that are not finite.
        """
        images = images.to(next(self.model.parameters()))
        with layers.eval_mode(self.model), torch.no_grad():
            tokens, context, grid = self.model.embed(images)
            if self._pixels is None:
                self._pixels = _patch_distances(grid, self.model.spec.patch_size)
            pixels = self._pixels.to(tokens)
            for layer, block in enumerate(encoder.block_calls(self.model.blocks)):
                attend = partial(self._attend, layer, pixels)
                tokens = block(tokens, context._replace(attend=attend))
        norms = _patch_norms(self.model, tokens, grid).cpu()
        if not torch.isfinite(norms).all():
            raise errors.CheckpointError(
                "the model's tokens are not finite (NaN or infinity), so they cannot be measured; "
                "check its weights, or use the model in float32"
            )
        self._norms.append(norms)
        self._attention.append(attention(self.model, images).cpu())
        return norms.flatten(1).amax(dim=1, keepdim=True)

    def _attend(
        self,
        layer: int,
        pixels: Tensor,
        q: Heads,
        k: Heads,
        v: Heads,
        mask: Mask | None = None,
        dropout: float = 0.0,
    ) -> Heads:
        """Attend, and measure the weights of one layer, which the fused kernel does not keep."""
        weights = attention_weights(q, k, mask)
        prefix = self.model.spec.num_prefix_tokens
        among_patches = weights[:, :, prefix:, prefix:]
        distance = _row_sums(among_patches * pixels)  # B k N
        # a query that attends to prefix tokens alone has no weight left to divide by
        total = _row_sums(among_patches).clamp_min(torch.finfo(weights.dtype).tiny)
        self._distance[layer] += _over_images(distance / total)
        self._entropy[layer] += _over_images(_row_sums(torch.special.entr(weights)))
        return weights @ v

    def result(self, name: str) -> ModelExplanation:
        """Return the numbers, of the weights and of the images so far.

        Args:
            name: name of the model, for captions.
        """
        filters, positions = first_layer_filters(self.model), position_similarity(self.model)
        if self._pixels is None:
            return ModelExplanation(name, filters, positions)
        norms = torch.cat(self._norms)
        tokens = self.model.spec.num_prefix_tokens + len(self._pixels)
        depth = DepthStatistics(
            len(norms),
            self._distance / len(norms),
            float(self._pixels.mean()),
            self._entropy / len(norms),
            math.log(tokens),
        )
        artefacts = _count_artefacts(norms, torch.cat(self._attention))
        return ModelExplanation(name, filters, positions, depth, artefacts)


def _patch_distances(grid: shapes.Grid, patch_size: tuple[int, int]) -> Float64[Tensor, "N N"]:
    """Return the distances between the centres of all patches, in pixels: (N, N).

    >>> _patch_distances((1, 3), (16, 8))[0].tolist()
    [0.0, 8.0, 16.0]
    """
    cells = torch.cartesian_prod(*map(torch.arange, grid))  # N 2
    centres = cells * torch.tensor(patch_size, dtype=torch.float64)
    return (centres[:, None] - centres).norm(dim=-1)


def _row_sums(values: Float[Tensor, "B k Q M"]) -> Float[Tensor, "B k Q"]:
    """Sum over keys, in float64 where the device has it."""
    precise = torch.float32 if values.device.type == "mps" else torch.float64
    return values.sum(-1, dtype=precise)


def _over_images(values: Float[Tensor, "B k Q"]) -> Float64[np.ndarray, " k"]:
    """Sum over images the mean over queries, in float64 on the CPU."""
    sums: Float64[np.ndarray, " k"] = values.cpu().double().mean(dim=-1).sum(dim=0).numpy()
    return sums


def first_layer_filters(model: ViT) -> Filters:
    """Return the principal components of the first-layer filters, 28 at most.

    "An Image is Worth 16x16 Words" (arXiv 2010.11929), Fig. 7 left. The D filters of the patch
    embedding are D points in the space of C * P * Q pixel values; the components are the directions
    of largest variance around the filters' mean. The sign of a component is chosen so that its
    largest weight is positive. Weights apply to normalised pixels. A patch embedding that begins
    with a norm counts with that norm's scale. In a hybrid the filters are those of the backbone's
    first convolution, standardised where the convolution standardises them.

    Args:
        model: any ViT; only its weights are used.

    Raises:
        CheckpointError: weights that are not finite.
    """
    kernel = _pixel_kernel(model)
    layer = "patch embedding"
    if isinstance(model.patch_embed, embedding.HybridEmbedding):
        layer = "first convolution"
    none = np.zeros((0, 0, 0, model.spec.in_channels)), np.zeros(0)
    if kernel is None:
        return Filters(*none, missing="The backbone has no convolution that takes the image.")
    weights = kernel.detach().double().cpu().numpy()  # D C P Q
    if not np.isfinite(weights).all():
        raise errors.CheckpointError(
            f"the weights of the {layer} are not finite (NaN or infinity); use an earlier model"
        )
    rows = weights.reshape(len(weights), -1)
    rows = rows - rows.mean(axis=0)
    # right singular vectors of the centred filters are the components, largest variance first
    _, sizes, directions = np.linalg.svd(rows, full_matrices=False)
    # components without variance, as with few filters, are rounding errors
    rank = int((sizes > sizes[0] * max(rows.shape) * np.finfo(np.float64).eps).sum())
    if not rank:
        reason = "All first-layer filters are equal, so they have no components."
        return Filters(*none, missing=reason)
    shares = sizes**2 / (sizes**2).sum()
    directions = directions[: min(MOST_FILTERS, rank)]
    # the sign of a singular vector is arbitrary; a fixed rule makes figures repeatable
    largest = np.abs(directions).argmax(axis=1)
    signs = np.sign(directions[np.arange(len(directions)), largest])
    components = (directions * signs[:, None]).reshape(-1, *weights.shape[1:])
    return Filters(components.transpose(0, 2, 3, 1), shares[: len(directions)], layer)


def _pixel_kernel(model: ViT) -> Float[Tensor, "D C P Q"] | None:
    """Return the weights that are applied to pixels first."""
    stem = model.patch_embed
    if isinstance(stem, embedding.HybridEmbedding):
        for part in stem.backbone.modules():
            if isinstance(part, nn.Conv2d) and part.weight.shape[1] == model.spec.in_channels:
                if isinstance(part, hybrid.StdConv2d):
                    return hybrid.standardise(part.weight, part.variant)
                return part.weight
        return None
    weight = stem.proj.weight
    if isinstance(stem, embedding.NormedPatchEmbedding):
        weight = weight * stem.norm_patches.weight  # D (C P Q)
    return weight.reshape(len(weight), stem.in_channels, *stem.patch_size)


def find_artefacts(
    model: ViT, images: shapes.Images, *, threshold: float | None = None
) -> Artefacts:
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
        SettingError: not a model, no image, or a threshold not above 0.
        ShapeError: images that do not fit the model.
    """
    errors.check_type(model, ViT, "find_artefacts", errors.MODEL)
    errors.check_type(images, Tensor, "find_artefacts", IMAGES)
    if not len(images):
        raise errors.SettingError("no images; pass one image or more, (B, C, H, W)")
    if threshold is not None and not threshold > 0:  # NaN, too
        raise errors.SettingError.about("threshold", threshold, "must be above 0")
    record = Record(tokens=[-1])
    with layers.eval_mode(model), torch.inference_mode():
        grid = model.forward_features(images, record).grid
    (tokens,) = record.tokens.values()
    return _count_artefacts(_patch_norms(model, tokens, grid), attention(model, images), threshold)


def _patch_norms(model: ViT, tokens: Tensor, grid: shapes.Grid) -> Float[Tensor, "B gh gw"]:
    """Return the norms of the patches among the tokens of a block (B, T, D)."""
    return tokens[:, model.spec.num_prefix_tokens :].norm(dim=-1).unflatten(1, grid)


def _count_artefacts(
    norms: Float[Tensor, "B gh gw"],
    attention: Float[Tensor, "B gh gw"],
    threshold: float | None = None,
) -> Artefacts:
    """Count the patches of high norm, by the attention to them, of sum 1 in each image."""
    values = norms.double().cpu().numpy()
    if threshold is None:
        median = np.median(values)
        threshold = float(median + DEVIATIONS * np.median(np.abs(values - median)))
    high = values > threshold
    weights = attention.double().cpu().numpy()
    return Artefacts(high, values, threshold, float((weights * high).sum() / len(values)))


def position_similarity(model: ViT) -> PositionSimilarity:
    """Return the cosine similarity between the positions of all patches.

    "An Image is Worth 16x16 Words" (arXiv 2010.11929), Fig. 7 centre. Learned and fixed tables are
    compared row by row, without the rows of prefix tokens. Rotary positions add nothing to a token;
    their vectors are sine and cosine of the angles that a head is turned by. Their cosine is the
    factor by which turning changes the product of a query with an equal key, where all pairs of a
    head are equally long ("RoFormer", arXiv 2104.09864, Eq. 16).

    Args:
        model: any ViT; only its weights are used.
    """
    spec = model.spec
    rows, columns = grid = spec.grid
    if spec.positions == "none":
        nothing = np.zeros((0, 0, 0, 0))
        return PositionSimilarity(nothing, "none", "The model has no positions.")
    weight = next(model.parameters())
    tokens = weight.new_zeros(1, spec.num_prefix_tokens + rows * columns, spec.width)
    with torch.no_grad():
        if model.rope is not None:
            # only the differences of angles matter to attention; these vectors keep them
            table = torch.cat(model.rope(grid, tokens), dim=1)  # T 2h
        else:
            table = model.embedding.positions(model.pos_embed, grid, tokens)[0]
        # the rows of prefix tokens come first; of rows of length 1 the products are cosines
        vectors = F.normalize(table[-rows * columns :].double().cpu(), dim=1)  # N E
    cosine = (vectors @ vectors.T).clamp(-1, 1).reshape(rows, columns, rows, columns)
    kind = KINDS.get(spec.positions, f"fixed positions ({spec.positions})")
    return PositionSimilarity(cosine.numpy(), kind)
