"""An explanation of one image: its heat map, drawn over it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image

from vitkit import errors, messages
from vitkit.explaining.methods import METHODS
from vitkit.io.results import check_outputs
from vitkit.plots.html import html_image
from vitkit.plots.overlay import STRENGTH, ColourScale, Viewport, box, enlarge, outline, place_grid

if TYPE_CHECKING:
    from torch import Tensor

    from vitkit.explaining.faithfulness import Faithfulness
    from vitkit.plots.figure import NotebookFigure, Panel

SMALLEST_SIDE = 224
LARGEST_SIDE = 2048
"""Pixels: overlays are scaled to sides between these, so that they are visible on a screen."""
WRITER = "vitkit explain"
"""Text in the PNG and SVG files of explanations."""


@dataclass(frozen=True)
class Explanation:
    """A heat map of one image for one class, with the model's prediction.

    A notebook shows it as `plot()` draws it.

    Attributes:
        image: (H, W, 3) uint8 RGB, the whole image.
        heatmap: (H, W) float32 in [0, 1], 1 for the most important pixels; 0 outside the part of
            the image that the model sees. Of a method with colours (H, W, 3): red, green, blue.
        label: the class that is explained: the predicted one, if no other was asked for. Empty
            where the model has no head.
        probability: of that class, in [0, 1], with the temperature that the checkpoint stores.
        method: the method of the map.
        grid: the method's own values, one for each patch (gh, gw), or three (gh, gw, 3).
        viewport: (top, left, height, width) of the part that the model sees, in the image's pixels;
            None for the whole image.
        options: the method's options with their values, such as `{"layer": 3, "head": None}`.
        class_number: number of the class that is explained; None without one.
        predicted: the most probable class.
        predicted_probability: its probability, in [0, 1].
        notes: further lines of the caption, about the image.
        faithfulness: how well the map names the patches that the model uses; None if not measured.
    """

    image: UInt8[np.ndarray, "H W 3"]
    heatmap: Float[np.ndarray, "H W *colours"]
    label: str = ""
    probability: float = 0.0
    method: str = "attention"
    grid: Float[np.ndarray, "gh gw *colours"] | None = None
    viewport: Viewport | None = None
    options: Mapping[str, object] = field(default_factory=dict)
    class_number: int | None = None
    predicted: str = ""
    predicted_probability: float = 0.0
    notes: tuple[str, ...] = ()
    faithfulness: Faithfulness | None = None

    @property
    def unit(self) -> str:
        """The unit of the values of `grid`, such as `share of attention`."""
        if self.grid is None:
            return "importance, scaled to 0 to 1"
        if self.method in METHODS:
            return METHODS[self.method].unit
        return "importance"

    @property
    def caption(self) -> tuple[str, ...]:
        """The lines below the figure: of the image, and of the map."""
        return (*self.image_lines, *self.map_lines)

    @property
    def image_lines(self) -> tuple[str, ...]:
        """The class with its probability, the visible part if the image is cropped, and `notes`."""
        lines = []
        if self.label:
            lines = [f"{self.label}: {messages.percent(self.probability)}"]
        if self.label and self.predicted not in ("", self.label):
            lines[0] += (
                f" (predicted: {self.predicted}, {messages.percent(self.predicted_probability)})"
            )
        height, width = self.image.shape[:2]
        top, left, bottom, right = box(self._view)
        # in whole pixels: a view may be off by a rounding error
        if (top, left, bottom, right) != (0, 0, height, width):
            seen = f"{right - left} x {bottom - top}"
            lines.append(f"the model sees {seen} of {width} x {height} pixels")
        return (*lines, *self.notes)

    @property
    def map_lines(self) -> tuple[str, ...]:
        """The method with its options, and its faithfulness."""
        words = [self.method]
        for name, value in self.options.items():
            if value is not None:
                words.append(f"{name.replace('_', ' ')} {value}")
            elif name == "head":
                words.append("mean of the heads")
        if self.label and self.method in METHODS and not METHODS[self.method].by_class:
            words.append("the same for every class")
        lines = [", ".join(words)]
        if not np.isfinite(self.values).all():
            lines.append("values that are not finite have no colour")
        if self.faithfulness is not None:
            lines.append(self.faithfulness.line)
        return tuple(lines)

    @property
    def description(self) -> str:
        """The map in words, for readers who cannot see it."""
        words = f"{self.method} over the image"
        if self.label:
            words += f" of class {self.label}"
        if self._has_colours or not np.isfinite(self.values).any():
            return words
        rows, columns = self.values.shape
        # NaN sorts last.
        numbers = np.where(np.isfinite(self.values), self.values, -np.inf)
        row, column = np.unravel_index(numbers.argmax(), numbers.shape)
        place = f"row {row + 1} of {rows}, column {column + 1} of {columns}"
        return f"{words}: the most important patch is in {place}"

    def overlay(self, strength: float = STRENGTH, *, smooth: bool | None = None) -> Image.Image:
        """Draw the heat map over the grey version of the image, as an RGB PIL image.

        It has the image's own size; images below 224 pixels are enlarged by a whole factor, those
        above 2,048 reduced. What the model does not see is pale, with a border around the rest.

        Args:
            strength: opacity of the map where it is most important, in [0, 1]; it fades with the
                map. Three colours cover the image.
            smooth: whether to interpolate between patches; default: not for enlarged images, whose
                patches are few pixels wide.

        Raises:
            SettingError: a strength outside [0, 1].
        """
        if not 0 <= strength <= 1:
            raise errors.SettingError.about("strength", strength, "must be from 0 to 1")
        return Image.fromarray(self._overlay(strength, smooth))

    def plot(self) -> NotebookFigure:
        """Draw the image beside its overlay, with a colour bar and a caption.

        Returns:
            A matplotlib figure; `.savefig("cat.pdf")` writes it. `save` writes a PNG of the image's
            own resolution.
        """
        # imported here: matplotlib takes half a second
        from vitkit.plots.figure import Panel, image_grid

        panels = [Panel(self.original(), "image"), self.panel(caption=())]
        return image_grid(panels, across=2, caption=self.caption)

    def panel(
        self, caption: Sequence[str] | None = None, scale: ColourScale | None = None
    ) -> Panel:
        """Return the overlay with its colour bar below the name of the method, for a figure.

        Args:
            caption: lines below it; default its own.
            scale: of the colours, such as one for several maps; default from the map's smallest to
                its largest value.
        """
        from vitkit.plots.figure import Panel

        if not self._has_colours:
            scale = scale or ColourScale.of(self.values)
        return Panel(
            self._overlay(scale=scale),
            self.method,
            self.caption if caption is None else caption,
            None if self._has_colours else scale,
            self.unit,
        )

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the figure of `plot` as PNG or SVG; its metadata name vitkit.

        A PNG file has all pixels of the image, of sides up to 2,048 pixels.

        Args:
            path: ends in .png or .svg.
            overwrite: replace an existing file.

        Raises:
            OutputError: another ending, an existing file, or a path that cannot be written.
        """
        from vitkit.plots.figure import save_figure

        path = Path(path)
        check_outputs([path], (".png", ".svg"), overwrite=overwrite, flag="path")
        save_figure(self.plot(), path, WRITER)
        return path

    def _repr_png_(self) -> bytes:
        """Return the figure, for a notebook."""
        return self.plot()._repr_png_()

    def _repr_html_(self) -> str:
        """Return the figure with its caption as the text for readers who cannot see it."""
        return html_image(self.plot(), "; ".join([self.description, *self.caption]))

    @property
    def _has_colours(self) -> bool:
        return self.heatmap.ndim == 3

    @property
    def values(self) -> Float[np.ndarray, "gh gw *colours"]:
        """The values that are drawn: `grid`, or else `heatmap`."""
        if self.grid is None:
            return self.heatmap
        return self.grid

    @property
    def _view(self) -> Viewport:
        height, width = self.image.shape[:2]
        whole = 0.0, 0.0, float(height), float(width)
        if self.viewport is None or self.grid is None:
            return whole
        return self.viewport

    def original(self) -> UInt8[np.ndarray, "h w 3"]:
        """Return the image in the size of the overlay, with a border around what the model sees."""
        image, view, _ = self._on_screen()
        return outline(image, view, pale=False)

    def _overlay(
        self,
        strength: float = STRENGTH,
        smooth: bool | None = None,
        scale: ColourScale | None = None,
    ) -> UInt8[np.ndarray, "h w 3"]:
        image, view, is_enlarged = self._on_screen()
        size = image.shape[0], image.shape[1]
        values = place_grid(
            self.values, size, view, smooth=not is_enlarged if smooth is None else smooth
        )
        if self._has_colours:
            # Pixels without colours, such as those that the model does not see, stay grey.
            grey = np.asarray(Image.fromarray(image).convert("L"))[..., None]
            colours = np.rint(np.nan_to_num(np.clip(values, 0, 1)) * 255).astype(np.uint8)
            drawn = np.where(np.isnan(values), grey, colours)
        else:
            drawn = (scale or ColourScale.of(self.values)).blend(image, values, strength)
        return outline(drawn, view)

    def _on_screen(self) -> tuple[UInt8[np.ndarray, "h w 3"], Viewport, bool]:
        """Return the image in a size fit for a screen, its viewport, and whether it is enlarged."""
        smaller, larger = sorted(self.image.shape[:2])
        # whole factors, so that the pixels of a small image stay squares
        factor = max(1, min(math.ceil(SMALLEST_SIDE / smaller), LARGEST_SIDE // larger))
        image = enlarge(self.image, factor)
        if larger > LARGEST_SIDE:
            reduced = Image.fromarray(image)
            reduced.thumbnail((LARGEST_SIDE, LARGEST_SIDE))  # keeps the aspect ratio
            image = np.asarray(reduced)
        top, left, height, width = self._view
        down, across = image.shape[0] / self.image.shape[0], image.shape[1] / self.image.shape[1]
        return image, (top * down, left * across, height * down, width * across), factor > 1


def heatmap_over(
    grid: Tensor | Float[np.ndarray, "gh gw *colours"], size: tuple[int, int], viewport: Viewport
) -> Float[np.ndarray, "H W *colours"]:
    """Enlarge a grid of patches to the part of the image that the model sees, scaled to [0, 1].

    Args:
        grid: a value for each patch (gh, gw); or three, red, green and blue in [0, 1], (gh, gw, 3).
        size: (H, W) of the whole image, in pixels.
        viewport: (top, left, height, width) of the part that the model sees, in the image's pixels.

    Returns:
        (H, W) float32: bilinear inside the viewport, least 0 and most 1; 0 outside, and where a
        value is not finite. A grid whose values are all equal gives 0 everywhere. Colours keep
        their values: (H, W, 3).
    """
    heat = place_grid(np.asarray(grid, dtype=np.float32), size, viewport, smooth=True)
    if heat.ndim == 3:
        return np.nan_to_num(np.clip(heat, 0, 1))
    inside = heat[np.isfinite(heat)]
    low, high = (inside.min(), inside.max()) if inside.size else (0.0, 0.0)
    # No patch differs from another, so none is important.
    if high <= low:
        return np.zeros(size, np.float32)
    # non-finite values are like the outside: no colour
    return np.where(np.isfinite(heat), (heat - low) / (high - low), 0).astype(np.float32)
