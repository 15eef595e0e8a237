"""A heat map laid over its picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch.nn import functional as F

from vitkit.errors import OutputError
from vitkit.weights.files import replacing

SMALLEST_SIDE = 224
"""Overlays of smaller pictures are enlarged to this, in pixels, so that a person can see them."""


@dataclass(frozen=True)
class Explanation:
    """What a model looked at in one picture.

    Attributes:
        picture: (H, W, 3) uint8 RGB, the whole picture.
        heatmap: (H, W) float32 in [0, 1], 1 where the model looked most; 0 outside its view.
        label: the class the model predicted, or an empty string.
        probability: of that class, in [0, 1].
        method: how the map was made.
    """

    picture: UInt8[np.ndarray, "H W 3"]
    heatmap: Float[np.ndarray, "H W"]
    label: str = ""
    probability: float = 0.0
    method: str = "attention"

    def overlay(self, strength: float = 0.6) -> Image.Image:
        """The picture under the heat map, as an RGB PIL image; small pictures are enlarged.

        Args:
            strength: opacity of the map where it is 1; it fades with the map.
        """
        from matplotlib import colormaps

        heat = self.heatmap[..., None]
        colours = colormaps["inferno"](self.heatmap)[..., :3] * 255.0
        # A floor keeps cold regions readable: they darken a little, but stay the picture's.
        alpha = strength * (0.25 + 0.75 * heat)
        mixed = (1 - alpha) * self.picture + alpha * colours
        image = Image.fromarray(np.rint(mixed).astype(np.uint8))
        return _enlarged(image)

    def side_by_side(self) -> Image.Image:
        """The picture and its overlay, left and right."""
        left, right = _enlarged(Image.fromarray(self.picture)), self.overlay()
        sheet = Image.new("RGB", (left.width + right.width + 8, left.height), "white")
        sheet.paste(left, (0, 0))
        sheet.paste(right, (left.width + 8, 0))
        return sheet

    def save(self, path: str | Path) -> Path:
        """Write the picture beside its overlay as a PNG.

        Raises:
            OutputError: another ending than .png, or a place that cannot be written.
        """
        path = Path(path)
        if path.suffix.lower() != ".png":
            raise OutputError(f"{path}: overlays are written as .png; name it so")
        with replacing(path) as temporary:
            self.side_by_side().save(temporary, format="PNG")
        return path


def heatmap_over(
    grid: Float[torch.Tensor, "gh gw"],
    size: tuple[int, int],
    viewport: tuple[float, float, float, float],
) -> Float[np.ndarray, "H W"]:
    """Enlarge a grid of patches to the part of the picture the model saw, scaled to [0, 1].

    Args:
        grid: one value a patch, (gh, gw).
        size: (H, W) of the whole picture, in pixels.
        viewport: (top, left, height, width) of what the model saw, in pixels of the picture.

    Returns:
        (H, W) float32: bilinear inside the viewport, least 0 and most 1; 0 outside. A grid whose
        values are all equal gives 0 everywhere.
    """
    top, left, height, width = (round(v) for v in viewport)
    span = grid.max() - grid.min()
    scaled = (grid - grid.min()) / span if span > 0 else torch.zeros_like(grid)
    view = F.interpolate(scaled.float()[None, None], size=(height, width), mode="bilinear")
    heat = np.zeros(size, dtype=np.float32)
    heat[top : top + height, left : left + width] = view[0, 0].cpu().numpy()
    return heat


def _enlarged(image: Image.Image) -> Image.Image:
    factor = -(-SMALLEST_SIDE // min(image.size))
    if factor <= 1:
        return image
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
