"""The files of explained images: a figure for each image, or a folder of all methods and a page."""

from __future__ import annotations

import hashlib
import os
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from PIL import Image

from vitkit.errors import MissingExtraError, SettingError
from vitkit.explaining.animation import ANIMATION_FILE, ROLLOUT, animate, layered_method
from vitkit.explaining.explain import ImageExplainer
from vitkit.explaining.explanation import EXPLANATION_FILES, WRITER, Explanation
from vitkit.explaining.methods import METHODS
from vitkit.explaining.truth.score import SCORE_TERMS
from vitkit.io.results import ResultPlaces, check_outputs
from vitkit.plots.gallery import GALLERY_FILE, GalleryFigure, GalleryPage, GallerySection

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure

IMAGE, TOGETHER, PAGE = "image", "all", "index.html"
"""Names of the files beside the maps: of the image, of the figure of all maps, and of the page."""
SHEETS = "heads"
"""Folder of the sheets of attention."""
GIF = ".gif"
CSS_DPI, SCREEN_DPI = 96, 150
"""Pixels per inch on a page, and in an animation."""
BELOW_BAR = 0.05
"""Inches of the lowest number of a colour bar that are below the bar."""
ACROSS = 4
"""Images in a row of the figure of all maps."""
FILE_KINDS = {**EXPLANATION_FILES, GIF: ANIMATION_FILE, ".html": GALLERY_FILE}


class ImageName(NamedTuple):
    """An image, as the files of its explanations are named.

    Attributes:
        name: its path or address.
        place: a relative path for its results, such as `cats/1.jpg`.
    """

    name: str
    place: PurePath


@dataclass(frozen=True)
class Figures:
    """The figures of each image.

    Attributes:
        ending: of their names, `.png` or `.svg`.
        sheets: also the attention of all layers and heads, in the folder `heads`.
        animate: also the map of each layer, one after the other, as a GIF file.
    """

    ending: str = ".png"
    sheets: bool = False
    animate: bool = False


class ExplanationFiles(ABC):
    """The files that are written for images.

    Each figure has the name of its image, in folders like those of the images if these come from
    several. It gets a number where another image, or an earlier explanation of one, has that name.

    Args:
        folder: where they are written.
        figures: which ones.

    Attributes:
        refused: method that the model cannot carry -> the reason.
        earlier: number of images that the page shows of earlier commands.
    """

    def __init__(self, folder: Path, figures: Figures) -> None:
        self.folder, self.figures = folder, figures
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
            explainer: of the image.
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
        if self.figures.sheets:
            # imported here: matplotlib takes half a second
            from vitkit.explaining.figures import draw_attention_sheet

            sheet = draw_attention_sheet(explainer.checkpoint, explainer.pixels)
            _write(sheet, self._sheet(stem), image.name)
        return explanation, path

    def finish(self, title: str) -> Path:
        """Write what belongs to all images, and return the path to open.

        Args:
            title: of a page.
        """
        return self.folder

    def _new_places(self) -> ResultPlaces:
        return ResultPlaces(self.folder, "", is_other=self._is_of_another)

    def _is_of_another(self, stem: Path, name: str) -> bool:
        """Return True for the stem of an earlier explanation of another image."""
        return any(is_of_another(path, name) for path in self._files(stem))

    def _files(self, stem: Path) -> list[Path]:
        """Return all files of the image whose files begin with `stem`."""
        return [*self._own(stem), *([self._sheet(stem)] if self.figures.sheets else [])]

    def _sheet(self, stem: Path) -> Path:
        below = stem.relative_to(self.folder)
        return _with_ending(self.folder / SHEETS / below, self.figures.ending)

    def _check(self, paths: Iterable[Path], inputs: Iterable[Path], *, overwrite: bool) -> None:
        by_ending: dict[str, list[Path]] = {}
        for path in paths:
            by_ending.setdefault(path.suffix.lower(), []).append(path)
        inputs = [*inputs]
        for ending, same in by_ending.items():
            kind = FILE_KINDS[ending]
            check_outputs(same, kind, inputs=inputs, overwrite=overwrite, flag="--output")

    @abstractmethod
    def _own(self, stem: Path) -> list[Path]:
        """Return the files of an image, without its sheet."""

    def _pages(self) -> list[Path]:
        return []

    @abstractmethod
    def _save(self, stem: Path, name: str, explainer: ImageExplainer) -> tuple[Explanation, Path]:
        """Explain and write as `save`, without the sheet."""


class OneMethod(ExplanationFiles):
    """The files of one method: a figure for each image.

    Args:
        method: a name of `METHODS`; None for the default one.
        options: of the method.
        **others: as for `ExplanationFiles`.

    Raises:
        SettingError: an animation of a method that has no map for each layer.
    """

    def __init__(self, method: str | None, options: Mapping[str, object], **others: Any) -> None:
        super().__init__(**others)
        if self.figures.animate:
            method = layered_method(method, options)
        self.method, self.options = method, options

    def _own(self, stem: Path) -> list[Path]:
        endings = [self.figures.ending, *([GIF] if self.figures.animate else [])]
        return [_with_ending(stem, ending) for ending in endings]

    def _save(self, stem: Path, name: str, explainer: ImageExplainer) -> tuple[Explanation, Path]:
        explanation = explainer.explain(self.method, **self.options)
        path = _with_ending(stem, self.figures.ending)
        _write(explanation.plot(), path, name)
        if self.figures.animate:
            animation = animate(explainer, self.method, self.options)
            path = animation.save(_with_ending(stem, GIF), overwrite=True)
        return explanation, path


class OneFile(OneMethod):
    """The file of one image and one method, under a name that the user chose.

    Args:
        path: ends in .png, .svg or .gif.
        method: a name of `METHODS`; None for the default one.
        options: of the method.
    """

    def __init__(self, path: Path, method: str | None, options: Mapping[str, object]) -> None:
        ending = path.suffix.lower()
        figures = Figures(ending, animate=ending == GIF)
        super().__init__(method, options, folder=path.parent, figures=figures)
        self.file = path

    def _own(self, stem: Path) -> list[Path]:
        return [self.file]

    def _is_of_another(self, stem: Path, name: str) -> bool:
        return False  # the user chose the name

    def finish(self, title: str) -> Path:
        """Return the file.

        Args:
            title: of a page, which there is none of.
        """
        return self.file

    def _save(self, stem: Path, name: str, explainer: ImageExplainer) -> tuple[Explanation, Path]:
        if self.figures.animate:
            animation = animate(explainer, self.method, self.options)
            return animation.explanations[-1], animation.save(self.file, overwrite=True)
        explanation = explainer.explain(self.method, **self.options)
        _write(explanation.plot(), self.file, name)
        return explanation, self.file


class EveryMethod(ExplanationFiles):
    """The files of every method: a folder for each image, and a page that shows all of them.

    Args:
        options: of the methods; each takes those that it has.
        **others: as for `ExplanationFiles`.
    """

    def __init__(self, options: Mapping[str, object], **others: Any) -> None:
        super().__init__(**others)
        self.options = options
        self._sections: list[GallerySection] = []

    def _own(self, stem: Path) -> list[Path]:
        names = [f"{name}{self.figures.ending}" for name in (*METHODS, IMAGE, TOGETHER)]
        return [
            stem / name for name in (*names, *([ROLLOUT + GIF] if self.figures.animate else []))
        ]

    def _pages(self) -> list[Path]:
        return [self.folder / PAGE]

    def _is_of_another(self, stem: Path, name: str) -> bool:
        # the folder of `index.html.png` must not stand where the page, or a report, will be
        is_report = stem.parent == self.folder and stem.suffix.lower() in (".html", ".json")
        return is_report or super()._is_of_another(stem, name)

    def _save(self, stem: Path, name: str, explainer: ImageExplainer) -> tuple[Explanation, Path]:
        # imported here: matplotlib takes half a second
        from vitkit.explaining.figures import draw_image, draw_maps

        explanations = [made for method in METHODS if (made := self._explain(method, explainer))]
        if not explanations:
            raise SettingError(
                "no method can explain this model: " + "; ".join(self.refused.values())
            )
        figures = []

        def add(file: str, figure: NotebookFigure, description: str, *lines: str) -> None:
            path = _with_ending(stem / file, self.figures.ending)
            _write(figure, path, name)
            size = _size_on_page(figure)
            figures.append(GalleryFigure(path.relative_to(self.folder), size, description, lines))

        first = explanations[0]
        add(IMAGE, draw_image(first), name)
        for made in explanations:
            figure = draw_maps([made], across=1, with_image=False)
            add(made.method, figure, made.description, *made.map_lines)
        add(TOGETHER, draw_maps(explanations, across=ACROSS), "all maps side by side")
        together = figures.pop()
        if self.figures.animate and ROLLOUT not in self.refused:
            figures.append(self._animate(stem, explainer))
        self._sections.append(GallerySection(name, first.image_lines, figures, together.file))
        return first, stem

    def _animate(self, stem: Path, explainer: ImageExplainer) -> GalleryFigure:
        options = self._options_of(ROLLOUT)
        animation = animate(explainer, ROLLOUT, options)
        path = animation.save(stem / f"{ROLLOUT}{GIF}", overwrite=True)
        with Image.open(path) as gif:
            size = round(gif.width * CSS_DPI / SCREEN_DPI), round(gif.height * CSS_DPI / SCREEN_DPI)
        description = f"{ROLLOUT} of the first layer, then of one layer more in each frame"
        place = path.relative_to(self.folder)
        # its caption changes with the frame, so that it stays in it
        return GalleryFigure(place, size, description, [f"{ROLLOUT} over depth"])

    def finish(self, title: str) -> Path:
        """Write the page of all images, earlier ones included, and return its path.

        Args:
            title: of the page.
        """
        terms = []
        for method in METHODS.values():
            meaning = f"{method.summary}. {method.source}."
            if method.name in self.refused:
                meaning = f"not drawn: {self.refused[method.name]}"
            terms.append((method.name, meaning))
        terms += SCORE_TERMS
        page = GalleryPage(self.folder / PAGE, title, self._sections)
        page.write(terms)
        self.earlier = page.earlier
        return page.path

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


def source_mark(name: str) -> str:
    """Return the image's mark in the metadata of a figure: a digest, as names may be private."""
    digest = hashlib.sha256(os.fsencode(os.path.normpath(name))).hexdigest()
    return f"sha256:{digest}"


def is_of_another(path: Path, name: str) -> bool:
    """Return True for the earlier explanation of another image than `name`.

    Args:
        path: of the figure; there need not be one.
        name: path or address of the image.
    """
    kind = EXPLANATION_FILES.get(path.suffix.lower())
    if kind is None or not kind.is_result(path):
        return False
    with path.open("rb") as file:
        head = file.read(2048)
    mark = source_mark(name).encode()
    if kind.ending == ".svg":
        return b"<dc:source>" in head and b"<dc:source>" + mark not in head
    text = b"Source\0" + mark
    # a chunk: length of the data, type, data
    return b"tEXtSource\0" in head and struct.pack(">I", len(text)) + b"tEXt" + text not in head


def _write(figure: NotebookFigure, path: Path, name: str) -> None:
    """Write the figure of an image over an earlier one."""
    # imported here: matplotlib takes half a second
    from vitkit.plots.panels import save_panels

    save_panels(figure, path, WRITER, source_mark(name))


def _size_on_page(figure: NotebookFigure) -> tuple[int, int]:
    """Return width and height of a figure without its caption, in pixels of a page."""
    width, height = figure.get_size_inches()
    lowest = min(axes.get_position().y0 for axes in figure.axes)
    # the lowest number of a colour bar is half below it
    shown = height * (1 - lowest) + BELOW_BAR
    return round(CSS_DPI * width), round(CSS_DPI * min(shown, height))


def _with_ending(stem: Path, ending: str) -> Path:
    # not `with_suffix`, as the name of an image may have more points
    return stem.with_name(f"{stem.name}{ending}")
