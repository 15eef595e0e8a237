"""Maps over depth: one for each layer, as an animated GIF."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image

from vitkit.errors import SettingError
from vitkit.explaining.explain import ImageExplainer
from vitkit.explaining.explanation import WRITER, Explanation, writable_path
from vitkit.explaining.methods import DEFAULTS, METHODS
from vitkit.explaining.methods.rollout import rollout_over_depth
from vitkit.io.atomic import write_bytes
from vitkit.plots.animation import encode_gif, gif_result
from vitkit.plots.html import html_text
from vitkit.plots.overlay import ColourScale

LONGEST_SIDE, SIDE = 370, 2.4
"""Longer side of an image in a frame, in pixels at most and in inches; larger ones make large
files."""
FRAME, LAST_FRAME = 500, 2000
"""Milliseconds of each frame, and of the last."""
ANIMATION_FILE = gif_result("an animation", WRITER)
ROLLOUT = "rollout"


@dataclass(frozen=True)
class Animation:
    """Maps of one image by one method, from the first layer to the last.

    A notebook shows it.

    Attributes:
        explanations: one for each layer, in order.
    """

    explanations: tuple[Explanation, ...]

    @property
    def captions(self) -> tuple[tuple[str, ...], ...]:
        """The lines below each frame: the image's, and the method with its layers."""
        last = len(self.explanations) - 1
        captions = []
        for layer, explanation in enumerate(self.explanations):
            shown = f"layer {layer}"
            if explanation.method == ROLLOUT and layer:
                shown = f"layers 0 to {layer}"
            words = f"{explanation.method}, {shown} (the last is {last})"
            captions.append((words, *explanation.image_lines))
        return tuple(captions)

    @property
    def durations(self) -> tuple[int, ...]:
        """Milliseconds of each frame; the last one stays longer."""
        return (*[FRAME] * (len(self.explanations) - 1), LAST_FRAME)

    def encode(self) -> bytes:
        """Return the content of a GIF file that repeats; all frames have one scale of colours.

        Images have at most 370 pixels on a side.
        """
        # imported here: matplotlib takes half a second
        from vitkit.plots.panels import draw_panels

        # Reduced before drawing: a frame takes as long as it has pixels.
        small = [_reduce(explanation) for explanation in self.explanations]
        # One scale, so that a colour means the same in every frame.
        scale = ColourScale.of(*(explanation.values for explanation in small))
        figures = []
        for explanation, caption in zip(small, self.captions, strict=True):
            panel = explanation.panel(caption=caption, scale=scale)
            figures.append(draw_panels([panel], across=1, side=SIDE))
        return encode_gif(figures, self.durations, WRITER)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the animation as a GIF file.

        Args:
            path: ends in .gif; an earlier animation is replaced.
            overwrite: also replace any other file.

        Raises:
            OutputError: another ending, a file that is not an animation by vitkit, or a path that
                cannot be written.
        """
        path = writable_path(path, {".gif": ANIMATION_FILE}, overwrite=overwrite)
        write_bytes(path, self.encode())
        return path

    def _repr_html_(self) -> str:
        """Return the animation as part of a notebook."""
        words = "; ".join([self.explanations[-1].description, *self.captions[-1]])
        data = b64encode(self.encode()).decode("ascii")
        return (
            f'<img alt="{html_text(words)}" style="max-width:100%;background:white" '
            f'src="data:image/gif;base64,{data}">'
        )


def layered_method(name: str | None, options: Mapping[str, object]) -> str:
    """Return a method that has a map for each layer; where none is named, the first of `DEFAULTS`.

    Raises:
        SettingError: a method of `METHODS` that has no map for each layer.
    """
    having = [other.name for other in METHODS.values() if _has_layers(other.name)]
    wanted = {option for option, value in options.items() if value is not None}
    usual = [name for name in DEFAULTS if name in having]
    fitting = [other for other in usual if wanted <= set(METHODS[other].options)]
    method = name or (fitting or usual)[0]
    if method not in having:
        raise SettingError(
            f"{method} has no map for each layer, so it cannot be animated; methods that have: "
            f"{', '.join(having)}"
        )
    return method


def animate(
    explainer: ImageExplainer, name: str | None, options: Mapping[str, object]
) -> Animation:
    """Explain an image by each layer.

    Args:
        explainer: of the image.
        name: `rollout`, whose map of a layer is that of all layers up to it, or a method with the
            option `layer`; None for the default one that has such maps.
        options: of the method; `layer` is left out.

    Raises:
        SettingError: a method without a map for each layer, or a wrong option.
    """
    method = layered_method(name, options)
    chosen = {name: value for name, value in options.items() if name != "layer"}
    depth = explainer.checkpoint.model.spec.depth
    # The rollout of a layer contains those before it: one pass gives all of them.
    if method != ROLLOUT:
        made = [explainer.explain_untested(method, layer=n, **chosen) for n in range(depth)]
        return Animation(tuple(made))
    model = explainer.checkpoint.model
    grids = rollout_over_depth(model, explainer.images, **chosen)  # type: ignore[arg-type]
    return Animation(tuple(explainer.place(grid[0], method, chosen) for grid in grids))


def _has_layers(method: str) -> bool:
    return method == ROLLOUT or "layer" in METHODS[method].options


def _reduce(explanation: Explanation) -> Explanation:
    """Return an explanation whose image has at most `LONGEST_SIDE` pixels on a side."""
    height, width = explanation.image.shape[:2]
    if max(height, width) <= LONGEST_SIDE:
        return explanation
    image = Image.fromarray(explanation.image)
    image.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    view = explanation.viewport
    if view is not None:
        down, across = image.height / height, image.width / width
        # The viewport is in pixels of the image, so it shrinks with it.
        view = (view[0] * down, view[1] * across, view[2] * down, view[3] * across)
    return replace(explanation, image=np.asarray(image), viewport=view)
