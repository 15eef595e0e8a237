"""Figures of several explanations: grids of maps, and the attention of all layers and heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitkit.data.images.colour import RGBPixels
from vitkit.data.images.preprocess import fit, preprocess_images
from vitkit.errors import SettingError
from vitkit.explaining.class_scores import at_least_float32
from vitkit.explaining.explanation import Explanation
from vitkit.explaining.readout_rows import has_map_head, pooling_map, token_weights
from vitkit.models.layers import eval_mode
from vitkit.models.record import Record
from vitkit.models.vit import ViT
from vitkit.plots.figure import NotebookFigure
from vitkit.plots.overlay import ColourScale, place_grid
from vitkit.plots.panels import SIDE, Panel, draw_panels
from vitkit.plots.tiles import draw_tiles
from vitkit.shapes import Images
from vitkit.weights.checkpoint import Checkpoint

SEVERAL_SIDE = 1.7
"""Longer side of an image, in inches, where there are several in a row."""
TILE = 112
"""Pixels of a map of the sheet, on its longer side, at least half and at most twice as many."""


def plot_explanations(
    explanations: Sequence[Explanation], *, across: int = 4, title: str = ""
) -> NotebookFigure:
    """Draw several explanations as one figure: each image once, then its maps.

    Args:
        explanations: of one image by several methods or for several classes, or of several images.
        across: images and maps in a row.
        title: of the figure.

    Returns:
        A matplotlib figure; `.savefig("maps.pdf")` writes it.

    Raises:
        SettingError: no explanation, or `across` below 1.
    """
    if not explanations:
        raise SettingError("expected at least one explanation, got none")
    if across < 1:
        raise SettingError.about("across", across, "must be 1 or more")
    return draw_maps(explanations, across=across, title=title)


def draw_maps(
    explanations: Sequence[Explanation],
    *,
    across: int,
    with_image: bool = True,
    title: str = "",
) -> NotebookFigure:
    """Draw the maps of explanations in rows, each with its colour bar and its caption.

    Args:
        explanations: of one image or of several.
        across: images and maps in a row.
        with_image: draw each image before its first map.
        title: of the figure.
    """
    panels: list[Panel] = []
    last: Explanation | None = None
    for explanation in explanations:
        lines = explanation.caption
        if with_image:
            if last is None or not np.array_equal(explanation.image, last.image):
                last = explanation
                panels.append(Panel(last.original(), "image", last.image_lines))
            if explanation.image_lines == last.image_lines:  # they stand below the image
                lines = explanation.map_lines
        panels.append(explanation.panel(caption=lines))
    side = SIDE if across == 1 else SEVERAL_SIDE
    return draw_panels(panels, across=across, title=title, side=side)


def draw_image(explanation: Explanation) -> NotebookFigure:
    """Draw the image of an explanation alone, with what is known of it."""
    panel = Panel(explanation.original(), "image", explanation.image_lines)
    return draw_panels([panel], across=1)


def draw_attention_sheet(checkpoint: Checkpoint, pixels: RGBPixels) -> NotebookFigure:
    """Draw the attention map of every layer and head over what the model sees of an image.

    Rows are layers, columns heads. Each map has its own colours, from its smallest value to its
    largest, which stands below it.

    Args:
        checkpoint: the model, on its device, and its preprocessing.
        pixels: (H, W, 3) uint8 RGB.
    """
    model = checkpoint.model
    # of the model's device and dtype
    images = preprocess_images([pixels], checkpoint.preprocess).to(next(model.parameters()))
    maps = attention_of_heads(model, images)[0].cpu().numpy()  # L k gh gw
    seen = fit(pixels, checkpoint.preprocess)
    seen = np.repeat(seen, 3, axis=2) if seen.shape[2] == 1 else seen
    # whole factors, so that pixels stay squares
    larger = max(seen.shape[:2])
    seen = seen.repeat(max(1, TILE // larger), axis=0).repeat(max(1, TILE // larger), axis=1)
    step = max(1, larger // TILE)
    seen = np.ascontiguousarray(seen[::step, ::step])
    size = seen.shape[0], seen.shape[1]
    whole = (0.0, 0.0, float(size[0]), float(size[1]))
    tiles = np.empty((*maps.shape[:2], *seen.shape), np.uint8)
    for layer, head in np.ndindex(*maps.shape[:2]):
        values = place_grid(maps[layer, head], size, whole, smooth=False)
        tiles[layer, head] = ColourScale.of(values).blend(seen, values)
    notes = [f"{100 * value:.3g} %" for value in maps.max(axis=(2, 3)).flat]
    return draw_tiles(
        tiles,
        rows=[f"layer {layer}" for layer in range(maps.shape[0])],
        columns=[f"head {head}" for head in range(maps.shape[1])],
        notes=notes,
        caption="below each map: the largest share of attention of one patch",
    )


def attention_of_heads(model: ViT, images: Images) -> Float[Tensor, "B L k gh gw"]:
    """Return the map of the method `attention` for every layer and head, by one forward pass.

    Args:
        model: in any mode; it runs in eval mode and without gradients, and keeps its mode.
        images: (B, C, H, W) normalised, on the model's device.

    Returns:
        (B, L, k, gh, gw), the patches of each map summing to 1.
    """
    spec, grid = model.spec, model.patch_embed.grid(images)
    weights = token_weights(model, grid)
    queries = weights.nonzero().flatten().tolist()
    is_map = has_map_head(model)
    record = Record(
        attention=range(spec.depth), pooling=is_map, queries=None if is_map else queries
    )
    with eval_mode(model), torch.inference_mode():
        features = model.forward_features(images, record)
        pooling = pooling_map(model, features, record)
    layers = []
    for maps in record.attention.values():  # B k Q T
        rows = at_least_float32(maps[:, :, queries] if is_map else maps)
        patches = (weights[queries] @ rows)[..., spec.num_prefix_tokens :]  # B k N
        layers.append(patches / patches.sum(dim=-1, keepdim=True))
    if pooling is not None:  # as the method: the last map is that of the head's own query
        layers[-1] = at_least_float32(pooling).mean(dim=2)
    return torch.stack(layers, dim=1).unflatten(-1, grid)
