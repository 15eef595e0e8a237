"""Heat maps over images: from a value for each patch to colours in the image's own pixels."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw

Viewport: TypeAlias = tuple[float, float, float, float]
"""(top, left, height, width) of the part of an image that the model sees, in pixels."""

ONE_SIDED, SIGNED = "inferno", "RdBu_r"
"""Colour maps of matplotlib: the first gets steadily lighter, so that it survives grey print; the
second is white at 0, and its two sides differ for people with any colour vision."""
FAINTEST = 0.4
"""Opacity of the least important pixels, as a part of that of the most important ones."""
STRENGTH = 0.75
"""Opacity of the most important pixels."""
PALE = 0.7
"""Share of white mixed into the part that the model does not see."""
GREY = 128
"""Grey level behind the colours of a colour bar."""


class ColourScale(NamedTuple):
    """The colours of values: which value is the first colour of a map, and which the last.

    Attributes:
        low: value of the first colour.
        high: value of the last colour.
        name: name of matplotlib's colour map.
    """

    low: float
    high: float
    name: str

    @classmethod
    def of(cls, *values: Float[np.ndarray, "..."]) -> ColourScale:
        """Return the scale for maps that are to be compared: one for all of them.

        With any value below 0 it is symmetric about 0, and 0 is white; otherwise it goes from the
        smallest value to the largest. Values that are not finite do not count.

        Args:
            *values: of any shapes.
        """
        finite = [array[np.isfinite(array)] for array in values]
        joined = np.concatenate([np.zeros(0), *finite])
        if not joined.size:
            return cls(0.0, 0.0, ONE_SIDED)
        low, high = float(joined.min()), float(joined.max())
        if low < 0:
            return cls(-max(-low, high), max(-low, high), SIGNED)
        return cls(low, high, ONE_SIDED)

    @property
    def is_signed(self) -> bool:
        """True where values have a sign, and 0 lies in the middle."""
        return self.name == SIGNED

    def places(self, values: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
        """Return the positions of values on the scale, in [0, 1]; non-finite values are at zero."""
        neutral = 0.5 if self.is_signed else 0.0
        span = self.high - self.low
        if span <= 0:
            return np.full(values.shape, neutral)
        places = np.clip((values - self.low) / span, 0, 1)
        return np.where(np.isfinite(values), places, neutral)

    def blend(
        self,
        pixels: UInt8[np.ndarray, "H W 3"],
        values: Float[np.ndarray, "H W"],
        strength: float = STRENGTH,
    ) -> UInt8[np.ndarray, "H W 3"]:
        """Blend colours over the grey image; important patches are more opaque.

        Args:
            pixels: (H, W, 3) uint8 RGB.
            values: (H, W); what is not finite has no colour.
            strength: opacity of the most important values, in [0, 1].
        """
        # imported here: values need no colours before they are drawn
        from matplotlib import colormaps

        places = self.places(values)
        colours = colormaps[self.name](places)[..., :3] * 255
        # the root, because the colours of a signed scale fade towards its middle by themselves
        importance = np.sqrt(np.abs(2 * places - 1)) if self.is_signed else places
        # at least a little everywhere: the colours of unimportant parts show, and the image too
        opacity = strength * (FAINTEST + (1 - FAINTEST) * importance) * np.isfinite(values)
        opacity = opacity[..., None]
        # grey, because the image's own colours would be taken for values
        grey = np.asarray(Image.fromarray(pixels).convert("L"), dtype=np.float32)[..., None]
        return _as_pixels(colours * opacity + grey * (1 - opacity))

    def bar(self, steps: int = 256) -> UInt8[np.ndarray, "steps 1 3"]:
        """Return the scale's colours (steps, 1, 3) as they look over grey, the largest first."""
        values = np.linspace(self.high, self.low, steps)[:, None]
        if self.high <= self.low:  # a single value
            values = np.full((steps, 1), self.low)
        return self.blend(np.full((steps, 1, 3), GREY, np.uint8), values)


def place_grid(
    grid: Float[np.ndarray, "gh gw *colours"],
    size: tuple[int, int],
    viewport: Viewport,
    *,
    smooth: bool,
) -> Float[np.ndarray, "H W *colours"]:
    """Enlarge a grid of patches to the part of the image that the model sees.

    Args:
        grid: a value for each patch (gh, gw), or three (gh, gw, 3).
        size: (H, W) of the whole image, in pixels.
        viewport: of the part that the model sees, in the image's pixels; what reaches over the
            image's border is cut off.
        smooth: bilinear between the centres of patches; else each patch is one flat rectangle.

    Returns:
        (H, W) or (H, W, 3) float32; NaN outside the viewport.
    """
    top, left, bottom, right = box(viewport)
    how = Image.Resampling.BILINEAR if smooth else Image.Resampling.NEAREST
    placed = []
    for values in np.moveaxis(grid.astype(np.float32).reshape(*grid.shape[:2], -1), 2, 0):
        view = Image.fromarray(np.ascontiguousarray(values))
        whole = Image.new("F", (size[1], size[0]), np.nan)
        whole.paste(view.resize((right - left, bottom - top), how), (left, top))
        placed.append(np.asarray(whole))
    return np.stack(placed, axis=2).reshape(*size, *grid.shape[2:])


def box(viewport: Viewport) -> tuple[int, int, int, int]:
    """Return (top, left, bottom, right) of a viewport in whole pixels, one pixel at least."""
    top, left = round(viewport[0]), round(viewport[1])
    return top, left, top + max(1, round(viewport[2])), left + max(1, round(viewport[3]))


def enlarge(pixels: UInt8[np.ndarray, "H W 3"], factor: int) -> UInt8[np.ndarray, "h w 3"]:
    """Enlarge an image by a whole factor: each pixel becomes a square."""
    return pixels.repeat(factor, axis=0).repeat(factor, axis=1)


def outline(
    pixels: UInt8[np.ndarray, "H W 3"], viewport: Viewport, *, pale: bool = True
) -> UInt8[np.ndarray, "H W 3"]:
    """Fade the part of an image that the model does not see, and draw a border.

    Args:
        pixels: (H, W, 3) uint8 RGB.
        viewport: viewport of the part that it sees; of the whole image nothing is drawn.
        pale: False draws the border alone.
    """
    height, width = pixels.shape[:2]
    top, left, bottom, right = box(viewport)
    if top <= 0 and left <= 0 and bottom >= height and right >= width:
        return pixels
    drawn = pixels.copy()
    if pale:
        drawn = _as_pixels(pixels * (1 - PALE) + 255.0 * PALE)
        inside = slice(max(top, 0), bottom), slice(max(left, 0), right)
        drawn[inside] = pixels[inside]
    image = Image.fromarray(drawn)
    pen = ImageDraw.Draw(image)
    line = max(1, round(max(height, width) / 300))
    # dark beside light, so that it shows on any image
    edges = (left, top, right - 1, bottom - 1)
    pen.rectangle(edges, outline="black", width=2 * line)
    pen.rectangle(edges, outline="white", width=line)
    return np.asarray(image)


def _as_pixels(values: Float[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    return np.rint(np.clip(values, 0, 255)).astype(np.uint8)
