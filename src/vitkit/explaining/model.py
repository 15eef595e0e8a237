"""Things that a model has learned: filters, positions, attention over depth, artefacts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn
from torch.nn import functional as F

from vitkit.errors import MODEL, CheckpointError, SettingError, check_type
from vitkit.explaining.methods.attention import attention
from vitkit.io.atomic import write_bytes
from vitkit.io.results import check_outputs
from vitkit.messages import plural
from vitkit.models.attention import Heads, Mask, attention_weights
from vitkit.models.embedding import HybridEmbedding, NormedPatchEmbedding
from vitkit.models.encoder import block_calls
from vitkit.models.hybrid import StdConv2d, standardise
from vitkit.models.layers import eval_mode
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.plots.html import html_image, html_text
from vitkit.shapes import Grid, Images

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vitkit.plots.figure import NotebookFigure

WRITER = "vitkit explain --model"
"""Text in the files of a model's explanation that names their writer."""
PANELS = ("filters", "positions", "distance")
"""Names of the panels, and of their files."""
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


@dataclass(frozen=True)
class DepthStatistics:
    """Means over images of attention, for each of L blocks and k heads.

    Attributes:
        images: how many were measured.
        distance: (L, k) mean attention distance, in pixels of the model's input.
        uniform_distance: the distance of a head that attends to all patches equally, in pixels.
        entropy: (L, k) mean attention entropy, in nats.
        largest_entropy: log T, the entropy of a head that attends to all T tokens equally.
    """

    images: int
    distance: Float64[np.ndarray, "L k"]
    uniform_distance: float
    entropy: Float64[np.ndarray, "L k"]
    largest_entropy: float

    @property
    def relative_entropy(self) -> Float64[np.ndarray, "L k"]:
        """The entropy as a share of its largest value, log T: (L, k) in [0, 1]."""
        return self.entropy / (self.largest_entropy or 1.0)  # 0 of a single token


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


@dataclass(frozen=True)
class ModelExplanation:
    """The things that a model has learned: filters, positions, and attention over depth.

    Attributes:
        name: name of the model, for captions.
        filters: principal components of the first-layer filters.
        positions: cosine similarity of the positions of all patches.
        depth: attention distance and entropy of each head; `None` where no images were given.
        artefacts: patch tokens of high norm; `None` where no images were given.
    """

    name: str
    filters: Filters
    positions: PositionSimilarity
    depth: DepthStatistics | None = None
    artefacts: Artefacts | None = None

    @property
    def images(self) -> int:
        """The number of images that were measured."""
        return 0 if self.depth is None else self.depth.images

    @property
    def caption(self) -> str:
        """The name of the model, and the number of images."""
        return f"{self.name}; {plural(self.images, 'image')}" if self.images else self.name

    @property
    def panels(self) -> tuple[str, ...]:
        """The names of the figures that can be drawn, of `PANELS`."""
        return tuple(self._panels())

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each figure that cannot be drawn, and why."""
        notes = [self.filters.missing, self.positions.missing]
        if self.depth is None:
            notes.append("Attention over depth is measured on images, and none were given.")
        return tuple(note for note in notes if note)

    def plot(self, panel: str | None = None) -> NotebookFigure:
        """Draw one figure, or the sheet of all of them.

        Args:
            panel: a name of `panels`, such as `filters` or `distance`; default the sheet.

        Returns:
            A matplotlib Figure, with a caption of the model's name and the number of images.

        Raises:
            SettingError: another panel, or one that this model does not have.
        """
        # imported here: the numbers need no matplotlib
        from vitkit.plots.curves import draw_sheet, shown_positions

        panels = self._panels()
        if not panels:
            raise SettingError(f"nothing to draw: {' '.join(self.notes)}")
        if panel is None:
            return draw_sheet([*panels.values()], self.caption)
        if panel not in panels:
            expected = f"must be one of {', '.join(panels)}"
            if panel in PANELS:  # a panel that this model or these images do not have
                expected += f". {' '.join(self.notes)}"
            raise SettingError.about("panel", panel, expected)
        caption = self.caption
        if panel == "filters":
            share = 100 * self.filters.shares.sum()
            caption += f"; {self.filters.layer}, {share:.0f} % of the variance"
        elif panel == "positions":
            caption += f"; {self.positions.kind}"
            rows, columns = self.positions.cosine.shape[:2]
            shown = len(shown_positions(rows)) * len(shown_positions(columns))
            if shown < rows * columns:
                caption += f", {shown} of {rows * columns} patches"
        return draw_sheet([panels[panel]], caption)

    def _panels(self) -> dict[str, Callable[[Axes], None]]:
        """Return the panels that this model has, by name."""
        from vitkit.plots import curves

        components, cosine = self.filters.components, self.positions.cosine
        depth = self.depth
        panels: dict[str, Callable[[Axes], None]] = {}
        if components.size:
            panels["filters"] = partial(curves.draw_filters, components=components)
        if cosine.size:
            panels["positions"] = partial(curves.draw_positions, cosine=cosine)
        if depth is not None:
            panels["distance"] = partial(
                curves.draw_distance, distance=depth.distance, uniform=depth.uniform_distance
            )
        return panels

    def save(self, folder: str | Path, *, overwrite: bool = False) -> tuple[Path, ...]:
        """Write each figure and the sheet as PNG and SVG, and the numbers as JSON.

        Args:
            folder: made if it does not exist.
            overwrite: replace existing files of these names.

        Returns:
            The files: the sheet's first, then those of each panel, `numbers.json` last.

        Raises:
            OutputError: an existing file, or a folder that cannot be written.
            SettingError: a model without any figure, as its `notes` say.
        """
        from vitkit.plots.figure import encode_png, encode_svg

        files = check_model_files(Path(folder), self.panels, overwrite=overwrite)
        for png, svg in zip(files[:-1:2], files[1::2], strict=True):
            figure = self.plot(None if png is files[0] else png.stem)
            write_bytes(png, encode_png(figure, WRITER))
            write_bytes(svg, encode_svg(figure, WRITER))
        # JSON has no NaN: better an error here than a file that no other program reads
        write_bytes(files[-1], json.dumps(self.to_json(), indent=1, allow_nan=False).encode())
        return files

    def to_json(self) -> dict[str, Any]:
        """Return the numbers as plain JSON values, without filters and position maps."""
        depth, found = self.depth, self.artefacts
        return {
            "model": self.name,
            "images": self.images,
            "filters": {
                "layer": self.filters.layer,
                "variance_shares": self.filters.shares.tolist(),
            },
            "positions": self.positions.kind,
            "depth": depth
            and {
                "attention_distance_pixels": depth.distance.tolist(),
                "uniform_attention_distance_pixels": depth.uniform_distance,
                "attention_entropy_nats": depth.entropy.tolist(),
                "relative_attention_entropy": depth.relative_entropy.tolist(),
            },
            "artefacts": found
            and {
                "patch_tokens": found.high.size,
                "high_norm": found.count,
                "threshold": found.threshold,
                "share_of_attention": found.attention,
            },
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """Return the main numbers in sentences, one per line."""
        lines, shares, depth = [], self.filters.shares, self.depth
        if len(shares):
            count, share = plural(len(shares), "component"), 100 * shares.sum()
            layer = self.filters.layer
            lines.append(f"filters: {count} have {share:.0f} % of the variance ({layer})")
        if depth is not None:
            distance, entropy = depth.distance.mean(axis=1), depth.relative_entropy
            lines.append(
                f"attention distance: {distance[0]:.1f} pixels in the first block, "
                f"{distance[-1]:.1f} in the last, {depth.uniform_distance:.1f} if equal to all"
            )
            lines.append(
                f"attention entropy: {entropy[0].mean():.2f} of its largest value in the first "
                f"block, {entropy[-1].mean():.2f} in the last"
            )
        if self.artefacts is not None:
            lines.append(f"norms: {self.artefacts}")
        return [*lines, *self.notes]

    def _repr_png_(self) -> bytes:
        return self.plot()._repr_png_()

    def _repr_html_(self) -> str:
        """Return the sheet and the main numbers, for a notebook."""
        figure = self.plot()
        image = html_image(figure._repr_png_(), self.caption, figure.get_figwidth())
        return image + "".join(f"<div>{html_text(line)}</div>" for line in self.lines())


def check_model_files(
    folder: Path,
    panels: Sequence[str] = PANELS,
    *,
    overwrite: bool,
    inputs: Sequence[Path] = (),
    flag: str = "folder",
) -> tuple[Path, ...]:
    """Return the files that `ModelExplanation.save` writes, once they may be written.

    Args:
        folder: where they are.
        panels: names of the figures, beside the sheet.
        overwrite: replace existing files that are not inputs.
        inputs: files that are never replaced.
        flag: flag that named the folder.

    Raises:
        OutputError: an existing file, or a folder that cannot be written.
    """
    figures = [folder / f"{name}{end}" for name in ("sheet", *panels) for end in (".png", ".svg")]
    files = (*figures, folder / "numbers.json")
    check_outputs(files, inputs=inputs, overwrite=overwrite, flag=flag)
    return files


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
        rows, columns = (
            side // patch for side, patch in zip(image_size, spec.patch_size, strict=True)
        )
        tokens = spec.num_prefix_tokens + rows * columns
        # k T^2 weights of each image, in one layer at a time
        return max(1, min(LARGEST_BATCH, WEIGHTS_AT_ONCE // (spec.num_heads * tokens**2)))

    def add(self, images: Images) -> Float[Tensor, "B 1"]:
        """Measure a batch, whose grid is that of the batches before it.

        Args:
            images: (B, C, H, W) normalised; they are moved to the model's device and dtype.

        Returns:
            The largest norm of a patch token of each image, (B, 1).

        Raises:
            CheckpointError: tokens that are not finite.
        """
        images = images.to(next(self.model.parameters()))
        with eval_mode(self.model), torch.no_grad():
            tokens, context, grid = self.model.embed(images)
            if self._pixels is None:
                self._pixels = _patch_distances(grid, self.model.spec.patch_size)
            pixels = self._pixels.to(tokens)
            for layer, block in enumerate(block_calls(self.model.blocks)):
                attend = partial(self._attend, layer, pixels)
                tokens = block(tokens, context._replace(attend=attend))
        norms = _patch_norms(self.model, tokens, grid).cpu()
        if not torch.isfinite(norms).all():
            raise CheckpointError(
                "the model's tokens are not finite (NaN or infinity), so they cannot be measured; "
                "check its weights, or use the model in float32"
            )
        self._norms.append(norms)
        self._attention.append(attention(self.model, images).cpu())
        return norms.flatten(1).amax(dim=1, keepdim=True)

    def _attend(
        self, layer: int, pixels: Tensor, q: Heads, k: Heads, v: Heads,
        mask: Mask | None = None, dropout: float = 0.0,
    ) -> Heads:  # fmt: skip
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


def _patch_distances(grid: Grid, patch_size: tuple[int, int]) -> Float64[Tensor, "N N"]:
    """Return the distances between the centres of all patches, in pixels: (N, N).

    >>> _patch_distances((1, 3), (16, 8))[0].tolist()
    [0.0, 8.0, 16.0]
    """
    rows, columns = (
        torch.arange(count, dtype=torch.float64) * side
        for count, side in zip(grid, patch_size, strict=True)
    )
    centres = torch.cartesian_prod(rows, columns)  # N 2
    return (centres[:, None] - centres).norm(dim=-1)


def _row_sums(values: Float[Tensor, "B k Q M"]) -> Float[Tensor, "B k Q"]:
    """Sum over keys, in float64 where the device has it."""
    precise = torch.float32 if values.device.type == "mps" else torch.float64
    return values.sum(-1, dtype=precise)


def _over_images(values: Float[Tensor, "B k Q"]) -> Float64[np.ndarray, " k"]:
    """Sum over images the mean over queries, in float64 on the CPU."""
    sums: Float64[np.ndarray, " k"] = values.cpu().double().mean(dim=-1).sum(dim=0).numpy()
    return sums


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
    kernel = _pixel_kernel(model)
    layer = "patch embedding"
    if isinstance(model.patch_embed, HybridEmbedding):
        layer = "first convolution"
    none = np.zeros((0, 0, 0, model.spec.in_channels)), np.zeros(0)
    if kernel is None:
        return Filters(*none, missing="The backbone has no convolution that takes the image.")
    weights = kernel.detach().double().cpu().numpy()  # D C P Q
    if not np.isfinite(weights).all():
        raise CheckpointError(
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
    directions = directions[: min(count, rank)]
    # the sign of a singular vector is arbitrary; a fixed rule makes figures repeatable
    largest = np.abs(directions).argmax(axis=1)
    signs = np.sign(directions[np.arange(len(directions)), largest])
    components = (directions * signs[:, None]).reshape(-1, *weights.shape[1:])
    return Filters(components.transpose(0, 2, 3, 1), shares[: len(directions)], layer)


def _pixel_kernel(model: ViT) -> Float[Tensor, "D C P Q"] | None:
    """Return the weights that are applied to pixels first."""
    stem = model.patch_embed
    if isinstance(stem, HybridEmbedding):
        for part in stem.backbone.modules():
            if isinstance(part, StdConv2d):
                return standardise(part.weight, part.variant)
            if isinstance(part, nn.Conv2d) and part.weight.shape[1] == model.spec.in_channels:
                return part.weight
        return None
    weight = stem.proj.weight
    if isinstance(stem, NormedPatchEmbedding):
        weight = weight * stem.norm_patches.weight  # D (C P Q)
    return weight.reshape(len(weight), stem.in_channels, *stem.patch_size)


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
    if not len(images):
        raise SettingError("no images; pass one image or more, (B, C, H, W)")
    if threshold is not None and not threshold > 0:
        raise SettingError.about("threshold", threshold, "must be a positive number")
    record = Record(tokens=[-1])
    with eval_mode(model), torch.inference_mode():
        grid = model.forward_features(images, record).grid
    (tokens,) = record.tokens.values()
    return _count_artefacts(_patch_norms(model, tokens, grid), attention(model, images), threshold)


def _patch_norms(model: ViT, tokens: Tensor, grid: Grid) -> Float[Tensor, "B gh gw"]:
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
    spec = model.spec
    rows, columns = grid = grid or spec.grid
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
