"""Explain one image: from pixels to a heat map over them, by any method."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8

from vitkit.data.images.preprocess import preprocess_images, viewport
from vitkit.errors import SettingError
from vitkit.explaining.methods import METHODS, ExplainMethod
from vitkit.explaining.overlay import Explanation, heatmap_over
from vitkit.messages import did_you_mean
from vitkit.weights.checkpoint import Checkpoint


def find_method(name: str) -> ExplainMethod:
    """Return a method of `METHODS` by its name.

    Raises:
        SettingError: another name; the message lists the methods.
    """
    if name not in METHODS:
        raise SettingError(
            f"method {name!r} does not exist{did_you_mean(name, METHODS)}; "
            f"methods are {', '.join(METHODS)}"
        )
    return METHODS[name]


def explain_pixels(
    checkpoint: Checkpoint,
    pixels: UInt8[np.ndarray, "H W 3"],
    *,
    method: str = "attention",
    layer: int = -1,
    head: int | None = None,
) -> Explanation:
    """Compute the heat map of one image on the device of the model; predict nothing.

    Args:
        checkpoint: the model and its preprocessing.
        pixels: (H, W, 3) uint8 RGB.
        method: a name of `METHODS`.
        layer: encoder block, from 0; negative ones count from the end.
        head: one attention head; default the mean over heads.

    Returns:
        The image and its heat map, without a label.

    Raises:
        SettingError: a method, layer or head that does not exist.
    """
    device = next(checkpoint.model.parameters()).device
    images = preprocess_images([pixels], checkpoint.preprocess).to(device)
    # (gh, gw), a value for each patch
    (grid,) = find_method(method)(checkpoint.model, images, layer=layer, head=head)
    size = (pixels.shape[0], pixels.shape[1])
    # what the crop cuts off stays 0, as the model does not see it
    heatmap = heatmap_over(grid, size, viewport(size, checkpoint.preprocess))
    return Explanation(pixels, heatmap, method=method)
