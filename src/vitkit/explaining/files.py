"""The files of explained images: figures, animations, sheets of attention, and the page of all."""

from __future__ import annotations

import hashlib
import os
import re
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, unquote_to_bytes

import numpy as np
from PIL import Image

from vitkit.data.images.preprocess import fit
from vitkit.errors import MissingExtraError, SettingError
from vitkit.explaining.explain import ImageExplainer
from vitkit.explaining.explanation import EXPLANATION_FILES, WRITER, Explanation, writable_path
from vitkit.explaining.faithfulness import TERMS
from vitkit.explaining.methods import DEFAULTS, METHODS
from vitkit.explaining.methods.attention import attention_of_heads
from vitkit.explaining.methods.rollout import rollout_over_depth
from vitkit.io.atomic import write_bytes
from vitkit.io.results import ResultKind, ResultPlaces, check_outputs
from vitkit.plots.html import html_text, page_templates, render_page
from vitkit.plots.overlay import ColourScale, enlarge, place_grid

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure

ALL, ROLLOUT = "all", "rollout"
"""The word for every method, and the method whose layers build on each other."""
IMAGE, TOGETHER, PAGE = "image", "all", "index.html"
"""Names of the files beside the maps: of the image, of the figure of all maps, and of the page."""
SHEETS, GIF = "heads", ".gif"
"""Folder of the sheets of attention, and ending of an animation."""
CSS_DPI, SCREEN_DPI = 96, 150
"""Pixels per inch on a page, and in an animation."""
BELOW_BAR = 0.05
"""Inches of the lowest number of a colour bar that are below the bar."""
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
SECTION = re.compile(
    r'<section data-title="(?P<title>[^"]*)" data-file="(?P<file>[^"]*)">.*?</section>\n', re.DOTALL
)
"""An image of a page; no name in it can look like its end, as all are escaped."""


def _is_animation(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(2048)
    return head.startswith(b"GIF8") and WRITER.encode() in head


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return f'<meta name="generator" content="{WRITER}">'.encode() in file.read(1024)


ANIMATION_FILE = ResultKind("an animation", GIF, _is_animation)
PAGE_FILE = ResultKind("a page of explanations", ".html", _is_page)
FILE_KINDS = {**EXPLANATION_FILES, GIF: ANIMATION_FILE, ".html": PAGE_FILE}


class ImageName(NamedTuple):
    """An image, as the files of its explanations are named.

    Attributes:
        name: its path or address.
        place: a relative path for its results, such as `cats/1.jpg`.
    """

    name: str
    place: PurePath


class ExplanationFiles:
    """The files of one method: a figure for each image.

    Each has the name of its image, in folders like those of the images if these come from several.
    It gets a number where another image, or an earlier explanation of one, has that name.

    Args:
        output: the folder where they are written, or the one file.
        method: a name of `METHODS`; None for the default one.
        options: of the method.
        ending: of the figures, `.png` or `.svg`; of one file its own, which may be `.gif`.
        sheet: also draw the attention of all layers and heads, in the folder `heads`.
        animate: also write the map of each layer, one after the other, as a GIF file.
        is_file: whether `output` is the file of one image.

    Raises:
        SettingError: an animation of a method that has no map for each layer.

    Attributes:
        refused: method that the model cannot carry -> the reason.
        earlier: number of images that the page shows of earlier commands.
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
        self.method = layered_method(method, options) if self.animate else method
        self.earlier = 0
        self.refused: dict[str, str] = {}
        self._places = self._new_places()

    def check(
        self, images: Iterable[ImageName], inputs: Iterable[Path], *, overwrite: bool
    ) -> None:
        """Raise `OutputError` if a file must not be written.

        Args:
            images: those that will be explained.
            inputs: files that are never replaced.
            overwrite: replace other files, not only earlier explanations.
        """
        places = self._new_places()
        paths = self._pages()
        for image in images:
            paths += self._files(places.path(image.place, image.name))
        self._check(paths, inputs, overwrite=overwrite)

    def save(
        self, image: ImageName, explainer: ImageExplainer, *, known: bool = True
    ) -> tuple[Explanation, Path]:
        """Explain an image, and write its files over those that are there.

        Args:
            image: the image.
            explainer: explainer of the image.
            known: whether `check` has seen the image; of another one the files are checked now.

        Returns:
            The first explanation, and the file or the folder that has the figures.

        Raises:
            SettingError: the model can carry no method that was asked for, or an option has a
                value that does not exist.
            OutputError: a file of an image that `check` has not seen must not be written.
        """
        stem = self._places.path(image.place, image.name)
        if not known:
            self._check(self._files(stem), [Path(image.name)], overwrite=False)
        explanation, path = self._save(stem, image.name, explainer)
        if self.sheet:
            _write(draw_attention_sheet(explainer), self._sheet(stem), image.name)
        return explanation, path

    def finish(self, title: str) -> Path:
        """Write what belongs to all images, and return the path to open.

        Args:
            title: title of a page.
        """
        return self.output

    def _new_places(self) -> ResultPlaces:
        return ResultPlaces(self.folder, "", is_other=self._is_of_another)

    def _is_of_another(self, stem: Path, name: str) -> bool:
        """Return True for the stem of an earlier explanation of another image."""
        # the user has chosen the name of a single file
        return not self.is_file and any(_has_other_source(p, name) for p in self._files(stem))

    def _files(self, stem: Path) -> list[Path]:
        """Return all files of the image whose files begin with `stem`."""
        return [*self._own(stem), *([self._sheet(stem)] if self.sheet else [])]

    def _sheet(self, stem: Path) -> Path:
        return _with_ending(self.folder / SHEETS / stem.relative_to(self.folder), self.ending)

    def _check(self, paths: Sequence[Path], inputs: Iterable[Path], *, overwrite: bool) -> None:
        inputs = [*inputs]
        for ending in {path.suffix.lower() for path in paths}:
            same = [path for path in paths if path.suffix.lower() == ending]
            kind = FILE_KINDS[ending]
            check_outputs(same, kind, inputs=inputs, overwrite=overwrite, flag="--output")

    def _own(self, stem: Path) -> list[Path]:
        """Return the files of an image, without its sheet."""
        if self.is_file:
            return [self.output]
        endings = [self.ending, *([GIF] if self.animate else [])]
        return [_with_ending(stem, ending) for ending in endings]

    def _pages(self) -> list[Path]:
        return []

    def _save(self, stem: Path, name: str, explainer: ImageExplainer) -> tuple[Explanation, Path]:
        """Explain and write as `save`, without the sheet."""
        own = self._own(stem)
        if self.ending != GIF:
            explanation = explainer.explain(self.method, **self.options)
            _write(explanation.plot(), own[0], name)
        if self.animate:
            animation = animate(explainer, self.method, self.options)
            animation.save(own[-1], overwrite=True)
            if self.ending == GIF:
                explanation = animation.explanations[-1]
        return explanation, own[-1]


class EveryMethod(ExplanationFiles):
    """The files of every method: a folder for each image, and a page that shows all of them.

    Args:
        output: as for `ExplanationFiles`.
        options: of the methods; each takes those that it has.
        **others: as for `ExplanationFiles`.
    """

    def __init__(self, output: Path, options: Mapping[str, object], **others: Any) -> None:
        self._sections: list[dict[str, Any]] = []
        super().__init__(output, ROLLOUT, options, **others)

    def _own(self, stem: Path) -> list[Path]:
        names = [f"{name}{self.ending}" for name in (*METHODS, IMAGE, TOGETHER)]
        return [stem / name for name in (*names, *([ROLLOUT + GIF] if self.animate else []))]

    def _pages(self) -> list[Path]:
        return [self.folder / PAGE]

    def _is_of_another(self, stem: Path, name: str) -> bool:
        # the folder of `index.html.png` must not stand where the page, or a report, will be
        is_report = stem.parent == self.folder and stem.suffix.lower() in (".html", ".json")
        return is_report or super()._is_of_another(stem, name)

    def _save(self, stem: Path, name: str, explainer: ImageExplainer) -> tuple[Explanation, Path]:
        made = [one for method in METHODS if (one := self._explain(method, explainer))]
        if not made:
            raise SettingError(
                "no method can explain this model: " + "; ".join(self.refused.values())
            )
        # imported here: matplotlib takes half a second
        from vitkit.plots.panels import Panel, draw_panels

        first, figures = made[0], []

        def add(file: str, panel: Panel, description: str, caption: Sequence[str] = ()) -> None:
            path, figure = _with_ending(stem / file, self.ending), draw_panels([panel], across=1)
            _write(figure, path, name)
            figures.append(self._on_page(path, _size_on_page(figure), description, caption))

        add(IMAGE, Panel(first.original(), "image", first.image_lines), name)
        for one in made:
            add(one.method, one.panel(), one.description, one.map_lines)
        if self.animate and ROLLOUT not in self.refused:
            animation = animate(explainer, ROLLOUT, self._options_of(ROLLOUT))
            path = animation.save(stem / f"{ROLLOUT}{GIF}", overwrite=True)
            with Image.open(path) as gif:
                size = gif.width / SCREEN_DPI, gif.height / SCREEN_DPI
            # its caption changes with the frame, so that it stays in it
            words = f"{ROLLOUT} of the first layer, then of one layer more in each frame"
            figures.append(self._on_page(path, size, words, [f"{ROLLOUT} over depth"]))
        together = _with_ending(stem / TOGETHER, self.ending)
        _write(plot_explanations(made), together, name)
        section = {"name": name, "lines": first.image_lines, "figures": figures}
        self._sections.append({**section, "more": self._address(together)})
        return first, stem

    def _on_page(
        self, path: Path, inches: tuple[float, float], description: str, caption: Sequence[str]
    ) -> dict[str, Any]:
        """Return what the page shows of a file; what is lower than its size is cut off."""
        width, height = (round(CSS_DPI * side) for side in inches)
        shown = {"address": self._address(path), "width": width, "height": height}
        return {**shown, "description": description, "caption": caption}

    def _address(self, path: Path) -> str:
        # bytes, as a name need not be UTF-8
        return quote(os.fsencode(path.relative_to(self.folder).as_posix()))

    def finish(self, title: str) -> Path:
        """Write the page of all images, earlier ones included, and return its path.

        Args:
            title: title of the page.
        """
        terms = []
        for method in METHODS.values():
            meaning = f"{method.summary}. {method.source}."
            if method.name in self.refused:
                meaning = f"not drawn: {self.refused[method.name]}"
            terms.append((method.name, meaning))
        path = self.folder / PAGE
        templates = page_templates("vitkit.explaining")
        section = templates.get_template("section.html")
        texts = [section.render(title=title, **values) for values in self._sections]
        found = {match["file"]: match for match in SECTION.finditer("".join(texts))}
        earlier = [match for match in _sections_of(path) if match["file"] not in found]
        groups: dict[str, str] = {}
        for match in [*found.values(), *earlier]:  # those of this title first
            groups[match["title"]] = groups.get(match["title"], "") + match[0]
        values = {"title": title, "groups": groups, "terms": [*terms, *TERMS]}
        page = render_page(templates, "gallery.html", generator=WRITER, **values)
        write_bytes(path, page.encode("utf-8", "replace"))
        self.earlier = len(earlier)
        return path

    def _options_of(self, method: str) -> dict[str, object]:
        own = METHODS[method].options
        return {name: value for name, value in self.options.items() if name in own}

    def _explain(self, method: str, explainer: ImageExplainer) -> Explanation | None:
        """Explain by one method; None if the model does not support it."""
        # Unsupported by the model, as an earlier image showed.
        if method in self.refused:
            return None
        try:
            return explainer.explain(method, **self._options_of(method))
        except (SettingError, MissingExtraError) as error:
            # a wrong value is the user's, and the model's kind is not
            if error.wrong is not None:
                raise
            self.refused[method] = str(error)
            return None


def _sections_of(path: Path) -> Iterator[re.Match[str]]:
    """Yield the images of an earlier page whose files are still there."""
    if PAGE_FILE.is_result(path):
        for match in SECTION.finditer(path.read_text(encoding="utf-8", errors="replace")):
            if (path.parent / os.fsdecode(unquote_to_bytes(match["file"]))).is_file():
                yield match


def _source_mark(name: str) -> str:
    """Return the image's mark in the metadata of a figure: a digest, as names may be private."""
    digest = hashlib.sha256(os.fsencode(os.path.normpath(name))).hexdigest()
    return f"sha256:{digest}"


def _has_other_source(path: Path, name: str) -> bool:
    """Return True for the earlier explanation of another image than `name`."""
    kind = EXPLANATION_FILES.get(path.suffix.lower())
    if kind is None or not kind.is_result(path):
        return False
    with path.open("rb") as file:
        found = re.search(rb"(?:tEXtSource\0|<dc:source>)(sha256:\w{64})", file.read(2048))
    return found is not None and found[1].decode() != _source_mark(name)


def _write(figure: NotebookFigure, path: Path, name: str) -> None:
    """Write the figure of an image over an earlier one."""
    # imported here: matplotlib takes half a second
    from vitkit.plots.panels import save_panels

    save_panels(figure, path, WRITER, _source_mark(name))


def _size_on_page(figure: NotebookFigure) -> tuple[float, float]:
    """Return width and height of a figure without its caption, in inches."""
    width, height = figure.get_size_inches()
    lowest = min(axes.get_position().y0 for axes in figure.axes)
    # the lowest number of a colour bar is half below it
    return width, min(height * (1 - lowest) + BELOW_BAR, height)


def _with_ending(stem: Path, ending: str) -> Path:
    # not `with_suffix`, as the name of an image may have more points
    return stem.with_name(f"{stem.name}{ending}")


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
        from vitkit.plots.figure import encode_gif
        from vitkit.plots.panels import draw_panels

        # Reduced before drawing: a frame takes as long as it has pixels.
        small = [_reduce(explanation) for explanation in self.explanations]
        # One scale, so that a colour means the same in every frame.
        scale = ColourScale.of(*(explanation.values for explanation in small))
        figures = []
        for explanation, caption in zip(small, self.captions, strict=True):
            panel = explanation.panel(caption=caption, scale=scale)
            figures.append(draw_panels([panel], across=1, side=FRAME_SIDE))
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
        path = writable_path(path, {GIF: ANIMATION_FILE}, overwrite=overwrite)
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
    having = [other for other in METHODS if other == ROLLOUT or "layer" in METHODS[other].options]
    wanted = {option for option, value in options.items() if value is not None}
    usual = [other for other in DEFAULTS if other in having]
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
    chosen: dict[str, Any] = {name: value for name, value in options.items() if name != "layer"}
    model = explainer.checkpoint.model
    if method != ROLLOUT:
        layers = range(model.spec.depth)
        made = [explainer.explain_untested(method, layer=layer, **chosen) for layer in layers]
        return Animation(tuple(made))
    # The rollout of a layer contains those before it: one pass gives all of them.
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
        # The viewport is in pixels of the image, so it shrinks with it.
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
    from vitkit.plots.panels import SIDE, Panel, draw_panels

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
    return draw_panels(panels, across=across, title=title, side=side)


def draw_attention_sheet(explainer: ImageExplainer) -> NotebookFigure:
    """Draw the attention map of every layer and head over what the model sees of an image.

    Rows are layers, columns heads. Each map has its own colours, from its smallest value to its
    largest, which stands below it.

    Args:
        explainer: of the image.
    """
    # imported here: matplotlib takes half a second
    from vitkit.plots.panels import Panel, draw_panels

    checkpoint = explainer.checkpoint
    maps = attention_of_heads(checkpoint.model, explainer.images)[0].cpu().numpy()  # L k gh gw
    seen = fit(explainer.pixels, checkpoint.preprocess)
    seen = np.repeat(seen, 3, axis=2) if seen.shape[2] == 1 else seen
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
    return draw_panels(panels, across=across, caption=caption, side=side)
