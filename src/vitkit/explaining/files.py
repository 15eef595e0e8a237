"""The files of explained images: figures, animations, sheets of attention, and the page of all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
from PIL import Image

from vitkit.data.images.preprocess import fit
from vitkit.errors import MissingExtraError, SettingError
from vitkit.explaining.explain import ImageExplainer
from vitkit.explaining.explanation import WRITER, Explanation
from vitkit.explaining.faithfulness import TERMS
from vitkit.explaining.methods import METHODS
from vitkit.explaining.methods.attention import attention_of_heads, rollout_over_depth
from vitkit.io.atomic import write_bytes
from vitkit.io.results import ResultPlaces, check_outputs
from vitkit.plots.html import html_image, page_templates, render_page
from vitkit.plots.overlay import ColourScale, enlarge, place_grid

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure

ALL, ROLLOUT = "all", "rollout"
"""The word for every method, and the method whose layers build on each other."""
IMAGE, TOGETHER, PAGE = "image", "all", "index.html"
"""Names of the files beside the maps: of the image, of the figure of all maps, and of the page."""
SHEETS, GIF = "heads", ".gif"
"""Folder of the sheets of attention, and ending of an animation."""
CSS_DPI = 96
"""Pixels per inch on a page."""
ACROSS, SEVERAL_SIDE = 4, 1.7
"""Images in a row of the figure of all maps, and the longer side of each in inches."""
FRAME, LAST_FRAME = 500, 2000
"""Milliseconds of each frame of an animation, and of the last."""
FRAME_PIXELS, FRAME_SIDE = 370, 2.4
"""Longer side of an image in a frame, in pixels at most and in inches; larger files are slow."""
TILE = 112
"""Pixels of a map of the sheet, on its longer side, at least half and at most twice as many."""
LARGEST_TILE, SHEET_WIDTH = 0.9, 6.4
"""Inches of the longer side of such a map at most, and of all maps of a row."""


class ExplanationFiles:
    """The files of explained images: a figure of each, or, of every method, a folder and a page.

    A file or folder has the name of its image, in folders like those of the images if these come
    from several. It gets a number where another image of the command has that name.

    Args:
        output: the folder where they are written, or the one file.
        method: a name of `METHODS`, or `all`; None for the default one.
        options: of the method; of all methods each takes those that it has.
        ending: of the figures, `.png` or `.svg`; of one file its own, which may be `.gif`.
        sheet: also draw the attention of all layers and heads, in the folder `heads`.
        animate: also write the map of each layer, one after the other, as a GIF file.
        is_file: whether `output` is the file of one image.

    Raises:
        SettingError: an animation of a method that has no map for each layer.

    Attributes:
        refused: method that the model cannot carry -> the reason.
    """

    def __init__(
        self,
        output: Path,
        method: str | None,
        options: Mapping[str, object],
        *,
        ending: str = ".png",
        sheet: bool = False,
        animate: bool = False,
        is_file: bool = False,
    ) -> None:
        self.output, self.options, self.is_file = output, options, is_file
        self.folder = output.parent if is_file else output
        self.ending, self.sheet, self.animate = ending, sheet, animate or ending == GIF
        self.every = method == ALL
        self.method = method
        if self.animate:
            self.method = layered_method(ROLLOUT if self.every else method, options)
        self.refused: dict[str, str] = {}
        self._images: list[dict[str, Any]] = []
        self._places = ResultPlaces(self.folder, "")

    def check(
        self,
        images: Iterable[PurePath],
        inputs: Iterable[Path],
        *,
        overwrite: bool,
    ) -> None:
        """Raise `OutputError` if a file must not be written.

        Args:
            images: places of those that will be explained, as for `save`.
            inputs: files that are never replaced.
            overwrite: replace existing files that are not inputs.
        """
        places = ResultPlaces(self.folder, "")
        paths = [self.folder / PAGE] if self.every else []
        for place in images:
            paths += self._files(places.path(place))
        check_outputs(paths, inputs=inputs, overwrite=overwrite, flag="--output")

    def save(
        self, name: str, place: PurePath, explainer: ImageExplainer
    ) -> tuple[Explanation, Path]:
        """Explain an image, and write its files.

        Args:
            name: path or address of the image.
            place: a relative path for its results, such as `cats/1.jpg`.
            explainer: explainer of the image.

        Returns:
            The first explanation, and the file or the folder that has the figures.

        Raises:
            SettingError: the model can carry no method that was asked for, or an option has a
                value that does not exist.
            OutputError: a file cannot be written.
        """
        stem = self._places.path(place)
        files = self._files(stem)
        if self.every:
            explanation, path = self._save_every(stem, name, explainer), stem
        else:
            if self.ending != GIF:
                explanation, path = explainer.explain(self.method, **self.options), files[0]
                _write(explanation.plot(), path)
            if self.animate:
                path = files[0 if self.ending == GIF else 1]
                animation = animate(explainer, self.method, self.options)
                animation.save(path, overwrite=True)
                if self.ending == GIF:
                    explanation = animation.explanations[-1]
        if self.sheet:
            _write(draw_attention_sheet(explainer), files[-1])
        return explanation, path

    def finish(self, title: str) -> Path:
        """Write the page of every method, with this title, and return the path to open."""
        if not self.every:
            return self.output
        terms = {}
        for name, method in METHODS.items():
            terms[name] = f"{method.summary}. {method.source}."
            if name in self.refused:
                terms[name] = f"not drawn: {self.refused[name]}"
        templates = page_templates("vitkit.explaining")
        values = {"title": title, "images": self._images, "terms": [*terms.items(), *TERMS]}
        page = render_page(templates, "gallery.html", generator=WRITER, **values)
        write_bytes(self.folder / PAGE, page.encode("utf-8", "replace"))
        return self.folder / PAGE

    def _files(self, stem: Path) -> list[Path]:
        """Return all files of the image whose files begin with `stem`; a sheet comes last."""
        if self.is_file:
            return [self.output]
        if self.every:
            names = [f"{name}{self.ending}" for name in (*METHODS, IMAGE, TOGETHER)]
            files = [stem / name for name in (*names, *([ROLLOUT + GIF] if self.animate else []))]
        else:
            endings = [self.ending, *([GIF] if self.animate else [])]
            # not `with_suffix`, as the name of an image may have more points
            files = [stem.with_name(f"{stem.name}{ending}") for ending in endings]
        if self.sheet:
            place = self.folder / SHEETS / stem.relative_to(self.folder)
            files.append(place.with_name(f"{stem.name}{self.ending}"))
        return files

    def _save_every(self, stem: Path, name: str, explainer: ImageExplainer) -> Explanation:
        """Write the map of each method that the model can carry; return the first."""
        # imported here: matplotlib takes half a second
        from vitkit.plots.figure import Panel, image_grid

        made = []
        for method in METHODS:
            own = {key: self.options[key] for key in METHODS[method].options if key in self.options}
            if method in self.refused:  # as an earlier image showed
                continue
            try:
                made.append(explainer.explain(method, **own))
            except (SettingError, MissingExtraError) as error:
                # a wrong value is the user's, and the model's kind is not
                if error.wrong is not None:
                    raise
                self.refused[method] = str(error)
        if not made:
            raise SettingError(
                "no method can explain this model: " + "; ".join(self.refused.values())
            )
        first, shown = made[0], []
        lines: tuple[str, ...] = ()  # those of the image stand above
        panels = [(IMAGE, Panel(first.original(), IMAGE), name, lines)]
        panels += [(one.method, one.panel(caption=()), one.description, one.map_lines)
                   for one in made]  # fmt: skip
        for file, panel, description, lines in panels:
            path, figure = stem / f"{file}{self.ending}", image_grid([panel], across=1)
            _write(figure, path)
            width, height = (round(CSS_DPI * side) for side in figure.get_size_inches())
            shown.append((self._address(path), width, height, description, lines))
        if self.animate and ROLLOUT not in self.refused:
            own = {
                key: self.options[key] for key in METHODS[ROLLOUT].options if key in self.options
            }
            animation = animate(explainer, ROLLOUT, own)
            path = animation.save(stem / f"{ROLLOUT}{GIF}", overwrite=True)
            _, width, height, *_ = shown[-1]
            words = f"{ROLLOUT} of the first layer, then of one layer more in each frame"
            shown.append((self._address(path), width, height, words, (f"{ROLLOUT} over depth",)))
        together = stem / f"{TOGETHER}{self.ending}"
        _write(plot_explanations(made), together)
        self._images.append({"name": name, "lines": first.image_lines, "figures": shown,
                             "more": self._address(together)})  # fmt: skip
        return first

    def _address(self, path: Path) -> str:
        # bytes, as a name need not be UTF-8
        return quote(os.fsencode(path.relative_to(self.folder).as_posix()))


def _write(figure: NotebookFigure, path: Path) -> None:
    """Write the figure of an image over an earlier one."""
    # imported here: matplotlib takes half a second
    from vitkit.plots.figure import save_figure

    save_figure(figure, path, WRITER)


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
        captions = []
        for layer, one in enumerate(self.explanations):
            shown = f"layers 0 to {layer}" if one.method == ROLLOUT and layer else f"layer {layer}"
            words = f"{one.method}, {shown} (the last is {len(self.explanations) - 1})"
            captions.append((words, *one.image_lines))
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
        from vitkit.plots.figure import encode_gif, image_grid

        # one scale, so that a colour means the same in every frame
        scale = ColourScale.of(*(explanation.values for explanation in self.explanations))
        figures = []
        for explanation, caption in zip(self.explanations, self.captions, strict=True):
            # reduced before drawing: a frame takes as long as it has pixels
            panel = _reduce(explanation).panel(caption=caption, scale=scale)
            figures.append(image_grid([panel], across=1, side=FRAME_SIDE))
        return encode_gif(figures, self.durations, WRITER)

    def save(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
        """Write the animation as a GIF file.

        Args:
            path: ends in .gif.
            overwrite: replace an existing file.

        Raises:
            OutputError: another ending, an existing file, or a path that cannot be written.
        """
        path = Path(path)
        check_outputs([path], (GIF,), overwrite=overwrite, flag="path")
        write_bytes(path, self.encode())
        return path

    def _repr_html_(self) -> str:
        """Return the animation as part of a notebook."""
        words = "; ".join([self.explanations[-1].description, *self.captions[-1]])
        return html_image(self.encode(), words, FRAME_SIDE, "gif")


def layered_method(name: str | None, options: Mapping[str, object]) -> str:
    """Return a method that has a map for each layer: the named one, or rollout, or attention.

    Raises:
        SettingError: a method of `METHODS` that has no map for each layer.
    """
    having = [other for other in METHODS if other == ROLLOUT or "layer" in METHODS[other].options]
    wanted = {option for option, value in options.items() if value is not None}
    usual = ROLLOUT if wanted <= set(METHODS[ROLLOUT].options) else "attention"
    method = name or usual
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
    chosen: dict[str, Any] = {name: value for name, value in options.items() if name != "layer"}
    model = explainer.checkpoint.model
    if method != ROLLOUT:
        layers = range(model.spec.depth)
        made = [explainer.explain_untested(method, layer=layer, **chosen) for layer in layers]
        return Animation(tuple(made))
    # the rollout of a layer contains those before it: one pass gives all of them
    grids = rollout_over_depth(model, explainer.images, **chosen)
    return Animation(tuple(explainer.place(grid[0], method, chosen) for grid in grids))


def _reduce(explanation: Explanation) -> Explanation:
    """Return an explanation whose image has at most `FRAME_PIXELS` pixels on a side."""
    height, width = explanation.image.shape[:2]
    image = Image.fromarray(explanation.image)
    image.thumbnail((FRAME_PIXELS, FRAME_PIXELS))
    view = explanation.viewport
    if view is not None:
        down, across = image.height / height, image.width / width
        # the viewport is in pixels of the image, so it shrinks with it
        view = (view[0] * down, view[1] * across, view[2] * down, view[3] * across)
    return replace(explanation, image=np.asarray(image), viewport=view)


def plot_explanations(
    explanations: Sequence[Explanation], *, across: int = ACROSS, title: str = ""
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
    # imported here: matplotlib takes half a second
    from vitkit.plots.figure import SIDE, Panel, image_grid

    if not explanations:
        raise SettingError("expected at least one explanation, got none")
    if across < 1:
        raise SettingError.about("across", across, "must be 1 or more")
    panels: list[Panel] = []
    last: Explanation | None = None
    for explanation in explanations:
        if last is None or not np.array_equal(explanation.image, last.image):
            last = explanation
            panels.append(Panel(last.original(), "image", last.image_lines))
        # those of the image stand below it
        is_same = explanation.image_lines == last.image_lines
        panels.append(explanation.panel(caption=explanation.map_lines if is_same else None))
    side = SIDE if across == 1 else SEVERAL_SIDE
    return image_grid(panels, across=across, title=title, side=side)


def draw_attention_sheet(explainer: ImageExplainer) -> NotebookFigure:
    """Draw the attention map of every layer and head over what the model sees of an image.

    Rows are layers, columns heads. Each map has its own colours, from its smallest value to its
    largest, which stands below it.

    Args:
        explainer: of the image.
    """
    # imported here: matplotlib takes half a second
    from vitkit.plots.figure import Panel, image_grid

    checkpoint = explainer.checkpoint
    maps = attention_of_heads(checkpoint.model, explainer.images)[0].cpu().numpy()  # L k gh gw
    seen = fit(explainer.pixels, checkpoint.preprocess)
    seen = np.broadcast_to(seen, (*seen.shape[:2], 3))
    # whole factors, so that pixels stay squares
    larger = max(seen.shape[:2])
    step = max(1, larger // TILE)
    seen = np.ascontiguousarray(enlarge(seen, max(1, TILE // larger))[::step, ::step])
    height, width = seen.shape[:2]
    whole = (0.0, 0.0, float(height), float(width))
    panels = []
    for layer, head in np.ndindex(*maps.shape[:2]):
        values = place_grid(maps[layer, head], (height, width), whole, smooth=False)
        panel = Panel(
            ColourScale.of(values).blend(seen, values),
            "" if layer else f"head {head}",
            [f"{100 * maps[layer, head].max():.3g} %"],
            row="" if head else f"layer {layer}",
        )
        panels.append(panel)
    across = maps.shape[1]
    caption = ["below each map: the largest share of attention of one patch"]
    side = min(LARGEST_TILE, SHEET_WIDTH / across)
    return image_grid(panels, across=across, caption=caption, side=side)
