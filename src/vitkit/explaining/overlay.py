"""An explanation of one image: its heat map, drawn over it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch.nn import functional as F

from vitkit.errors import OutputError, SettingError
from vitkit.io.atomic import replacing
from vitkit.io.results import PNG_KEY, png_result

SMALLEST_SIDE = 224
LARGEST_SIDE = 2048
"""Pixels: overlays are scaled to sides between these, so that they are visible on a screen."""
WRITER = "vitkit explain"
"""Text in the PNG of an explanation."""
EXPLANATION_FILE = png_result("an explanation", WRITER)


@dataclass(frozen=True)
class Explanation:
    """A heat map of one image, with the model's prediction.

    Attributes:
        image: (H, W, 3) uint8 RGB, the whole image.
        heatmap: (H, W) float32 in [0, 1], 1 for the most important pixels; 0 outside the part of
            the image that the model sees.
        label: the predicted class, or an empty string.
        probability: of that class, in [0, 1].
        method: the method of the map.
    """

    image: UInt8[np.ndarray, "H W 3"]
    heatmap: Float[np.ndarray, "H W"]
    label: str = ""
    probability: float = 0.0
    method: str = "attention"

    def overlay(self, strength: float = 0.6) -> Image.Image:
        """Draw the heat map over the image, as an RGB PIL image of a size fit for a screen.

        Args:
            strength: opacity of the map where it is 1, in [0, 1]; it fades with the map.

        Raises:
            SettingError: a strength that is not in [0, 1].
        """
        # imported here: a map needs no colours before it is drawn
        from matplotlib import colormaps

        if not 0 <= strength <= 1:
            raise SettingError.about("strength", strength, "must be from 0 to 1")
        image = _scale_for_screen(Image.fromarray(self.image))
        # 8 bits per pixel are enough for a colour map of 256 steps
        smooth = Image.fromarray(np.rint(self.heatmap * 255).astype(np.uint8))
        heat = np.asarray(smooth.resize(image.size, Image.Resampling.BICUBIC))
        colours = Image.fromarray(colormaps["inferno"](heat, bytes=True)[..., :3])
        # At least a quarter everywhere: unimportant regions darken a little, but stay visible.
        alpha = strength * (0.25 + 0.75 * heat.astype(np.float32) / 255)
        return Image.composite(colours, image, Image.fromarray((alpha * 255).astype(np.uint8)))

    def side_by_side(self) -> Image.Image:
        """Draw the image and its overlay side by side."""
        left = _scale_for_screen(Image.fromarray(self.image))
        right = self.overlay()
        sheet = Image.new("RGB", (left.width + right.width + 8, left.height), "white")
        sheet.paste(left, (0, 0))
        sheet.paste(right, (left.width + 8, 0))
        return sheet

    def save(self, path: str | Path) -> Path:
        """Write the image beside its overlay as a PNG, whose text `Software` names vitkit.

        Args:
            path: ends in .png; a file that exists is replaced.

        Raises:
            OutputError: another ending than .png, or a path that cannot be written.
        """
        path = Path(path)
        if path.suffix.lower() != ".png":
            raise OutputError(f"{path}: expected a name that ends in .png")
        mark = PngInfo()
        mark.add_text(PNG_KEY, WRITER)
        with replacing(path) as temporary:
            self.side_by_side().save(temporary, format="PNG", pnginfo=mark)
        return path


def heatmap_over(
    grid: Float[torch.Tensor, "gh gw"],
    size: tuple[int, int],
    viewport: tuple[float, float, float, float],
) -> Float[np.ndarray, "H W"]:
    """Enlarge a grid of patches to the part of the image that the model sees, scaled to [0, 1].

    Args:
        grid: a value for each patch, (gh, gw).
        size: (H, W) of the whole image, in pixels.
        viewport: (top, left, height, width) of the part that the model sees, in the image's pixels.

    Returns:
        (H, W) float32: bilinear inside the viewport, least 0 and most 1; 0 outside. A grid whose
        values are all equal gives 0 everywhere.
    """
    top, left, height, width = map(round, viewport)
    height = max(1, height)
    width = max(1, width)
    view = F.interpolate(grid.float()[None, None], size=(height, width), mode="bilinear")
    low = view.min()
    span = view.max() - low
    # a constant map, or one with NaN, is 0 everywhere
    view = (view - low) / span if span > 0 else torch.zeros_like(view)
    heat = np.zeros(size, dtype=np.float32)
    # the viewport may reach over the image's border by rounding
    part = heat[top : top + height, left : left + width]
    part[:] = view[0, 0].cpu().numpy()[: part.shape[0], : part.shape[1]]
    return heat


def _scale_for_screen(image: Image.Image) -> Image.Image:
    """Enlarge small images by a whole factor, and reduce large ones to a screen's size."""
    factor = min(-(-SMALLEST_SIDE // min(image.size)), LARGEST_SIDE // max(image.size))
    if factor > 1:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if max(image.size) > LARGEST_SIDE:
        image = image.copy()
        image.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    return image
