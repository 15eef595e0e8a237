"""The files of explained images: figures, sheets of attention, and the page of all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np

from vitkit.data.images.preprocess import fit
from vitkit.errors import SettingError
from vitkit.explaining import explain, faithfulness
from vitkit.explaining.explanation import WRITER, Explanation
from vitkit.explaining.methods import METHODS
from vitkit.explaining.methods.attention import attention_of_heads
from vitkit.io import atomic, results
from vitkit.plots import html, overlay

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure

ALL = "all"
"""The word for every method."""
IMAGE, TOGETHER, PAGE = "image", "all", "index.html"
"""Names of the files beside the maps: of the image, of the figure of all maps, and of the page."""
SHEETS = "heads"
"""Folder of the sheets of attention."""
CSS_DPI = 96
"""Pixels per inch on a page."""
ACROSS, SEVERAL_SIDE = 4, 1.7
"""Images in a row of the figure of all maps, and the longer side of each in inches."""
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
        ending: of the figures, `.png` or `.svg`.
        sheet: also draw the attention of all layers and heads, in the folder `heads`.
        is_file: whether `output` is the file of one image.

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
        is_file: bool = False,
    ) -> None:
        self.output, self.options, self.is_file = output, options, is_file
        self.folder = output.parent if is_file else output
        self.ending, self.sheet = ending, sheet
        self.method, self.every = method, method == ALL
        self.refused: dict[str, str] = {}
        self._images: list[dict[str, Any]] = []
        self._places = results.ResultPlaces(self.folder, "")

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
        places = results.ResultPlaces(self.folder, "")
        paths = [self.folder / PAGE] if self.every else []
        for place in images:
            paths += self._files(places.path(place))
        results.check_outputs(paths, inputs=inputs, overwrite=overwrite, flag="--output")

    def save(
        self, name: str, place: PurePath, explainer: explain.ImageExplainer
    ) -> tuple[Explanation, Path]:
        """Explain an image, and write its files.

        Args:
            name: path or address of the image.
            place: a relative path for its results, such as `cats/1.jpg`.
            explainer: explainer of the image.

        Returns:
            The first explanation, and the file or the folder that has the figures.

        Raises:
            SettingError: the model cannot carry the method that was asked for, or an option has a
                value that does not exist.
            OutputError: a file cannot be written.
        """
        stem = self._places.path(place)
        files = self._files(stem)
        if self.every:
            explanation, path = self._save_every(stem, name, explainer), stem
        else:
            explanation, path = explainer.explain(self.method, **self.options), files[0]
            _write(explanation.plot(), path)
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
        templates = html.page_templates("vitkit.explaining")
        values = {
            "title": title,
            "images": self._images,
            "terms": [*terms.items(), *faithfulness.TERMS],
        }
        page = html.render_page(templates, "gallery.html", generator=WRITER, **values)
        atomic.write_bytes(self.folder / PAGE, page.encode("utf-8", "replace"))
        return self.folder / PAGE

    def _files(self, stem: Path) -> list[Path]:
        """Return all files of the image whose files begin with `stem`; a sheet comes last."""
        if self.is_file:
            return [self.output]
        name = f"{stem.name}{self.ending}"  # the name of an image may have more points
        files = [stem.with_name(name)]
        if self.every:
            files = [stem / f"{one}{self.ending}" for one in (*METHODS, IMAGE, TOGETHER)]
        if self.sheet:
            files.append((self.folder / SHEETS / stem.relative_to(self.folder)).with_name(name))
        return files

    def _save_every(self, stem: Path, name: str, explainer: explain.ImageExplainer) -> Explanation:
        """Write the map of each method that the model can carry; return the first."""
        # imported here: matplotlib takes half a second
        from vitkit.plots.figure import Panel, image_grid

        made = []
        for method, known in METHODS.items():
            if method in self.refused:  # as an earlier image showed
                continue
            own = {key: self.options[key] for key in known.options if key in self.options}
            try:
                made.append(explainer.explain(method, **own))
            except SettingError as error:
                # a wrong value is the user's, and the model's kind is not
                if error.wrong is not None:
                    raise
                self.refused[method] = str(error)
        figures = []
        lines: tuple[str, ...] = ()  # those of the image stand above
        panels = [(Panel(made[0].original(), IMAGE), name, lines)]
        panels += [(one.panel(caption=()), one.description, one.map_lines) for one in made]
        for panel, description, lines in panels:
            path, figure = stem / f"{panel.title}{self.ending}", image_grid([panel], across=1)
            _write(figure, path)
            width, height = (CSS_DPI * figure.get_size_inches()).round().astype(int)
            figures.append((self._address(path), width, height, description, lines))
        together = stem / f"{TOGETHER}{self.ending}"
        _write(plot_explanations(made), together)
        image = {"name": name, "lines": made[0].image_lines, "figures": figures}
        self._images.append(image | {"more": self._address(together)})
        return made[0]

    def _address(self, path: Path) -> str:
        # bytes, as a name need not be UTF-8
        return quote(os.fsencode(path.relative_to(self.folder).as_posix()))


def _write(figure: NotebookFigure, path: Path) -> None:
    """Write the figure of an image over an earlier one."""
    # imported here: matplotlib takes half a second
    from vitkit.plots.figure import save_figure

    save_figure(figure, path, WRITER)


def plot_explanations(
    explanations: Sequence[Explanation], *, across: int = ACROSS, title: str = ""
) -> NotebookFigure:
    """Draw several explanations as one figure: each image once, then its maps.

    Args:
        explanations: of one image by several methods or for several classes, or of several images.
        across: images and maps in a row, 1 or more.
        title: of the figure.

    Returns:
        A matplotlib figure; `.savefig("maps.pdf")` writes it.

    Raises:
        SettingError: no explanation.
    """
    # imported here: matplotlib takes half a second
    from vitkit.plots.figure import SIDE, Panel, image_grid

    if not explanations:
        raise SettingError("expected at least one explanation, got none")
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


def draw_attention_sheet(explainer: explain.ImageExplainer) -> NotebookFigure:
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
    seen = np.ascontiguousarray(overlay.enlarge(seen, max(1, TILE // larger))[::step, ::step])
    height, width = seen.shape[:2]
    whole = (0.0, 0.0, float(height), float(width))
    panels = []
    for layer, head in np.ndindex(*maps.shape[:2]):
        values = overlay.place_grid(maps[layer, head], (height, width), whole, smooth=False)
        panel = Panel(
            overlay.ColourScale.of(values).blend(seen, values),
            "" if layer else f"head {head}",
            [f"{100 * maps[layer, head].max():.3g} %"],
            row="" if head else f"layer {layer}",
        )
        panels.append(panel)
    across = maps.shape[1]
    caption = ["below each map: the largest share of attention of one patch"]
    side = min(LARGEST_TILE, SHEET_WIDTH / across)
    return image_grid(panels, across=across, caption=caption, side=side)
