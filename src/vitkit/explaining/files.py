"""The files of explained images: a figure for each image, or a folder of all methods and a page."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from vitkit.errors import MissingExtraError, SettingError
from vitkit.explaining.explain import ImageExplainer
from vitkit.explaining.explanation import EXPLANATION_FILES, WRITER, Explanation
from vitkit.explaining.methods import METHODS
from vitkit.io.results import ResultPlaces, check_outputs
from vitkit.plots.gallery import GALLERY_FILE, GalleryFigure, GallerySection, write_gallery

if TYPE_CHECKING:
    from vitkit.plots.figure import NotebookFigure

IMAGE, TOGETHER, PAGE = "image", "all", "index.html"
"""Names of the files beside the maps: of the image, of the figure of all maps, and of the page."""
SHEETS = "heads"
"""Folder of the sheets of attention."""
ACROSS = 4
"""Images in a row of the figure of all maps."""


def every_file(
    folder: Path,
    names: Sequence[PurePath],
    ending: str,
    *,
    method: str | None,
    options: Mapping[str, object],
    sheets: bool = False,
) -> ExplanationFiles:
    """Return the files of one method, or of every method where `method` is None.

    Args:
        folder: where they are written.
        names: of the images.
        ending: of the figures' names, `.png` or `.svg`.
        method: a name of `METHODS`.
        options: of the method, or of the methods that have them.
        sheets: also draw the attention of all layers and heads, in the folder `heads`.
    """
    files = {"folder": folder, "names": names, "ending": ending, "sheets": sheets}
    if method is None:
        return EveryMethod(options, **files)
    return OneMethod(method, options, **files)


class ExplanationFiles(ABC):
    """The files that are written for a list of images; with `sheets`, one of these for each too.

    Args:
        folder: where they are written.
        names: of the images.
        ending: of the figures' names, `.png` or `.svg`.
        sheets: also draw the attention of all layers and heads, in the folder `heads`.

    Attributes:
        refused: method that the model cannot carry -> the reason.
    """

    def __init__(
        self, folder: Path, names: Sequence[PurePath], ending: str, *, sheets: bool
    ) -> None:
        self.folder, self.names, self.ending = folder, names, ending
        self.refused: dict[str, str] = {}
        places = ResultPlaces(folder / SHEETS, ending)
        self._sheets = [places.path(name) for name in names] if sheets else []

    def check(self, inputs: Sequence[Path], *, overwrite: bool) -> None:
        """Raise `OutputError` if a file must not be written.

        Args:
            inputs: files that are never replaced.
            overwrite: replace other files, not only earlier explanations.
        """
        groups = [([*self._figures(), *self._sheets], EXPLANATION_FILES[self.ending])]
        groups.append((self._pages(), GALLERY_FILE))
        for paths, kind in groups:
            check_outputs(paths, kind, inputs=inputs, overwrite=overwrite, flag="--output")

    def save(self, number: int, explainer: ImageExplainer) -> tuple[Explanation, Path]:
        """Explain an image, and write its files over those that are there.

        Args:
            number: of the image in the list.
            explainer: of the image.

        Returns:
            The first explanation, and the file or the folder that has the figures.

        Raises:
            SettingError: the model can carry no method that was asked for, or an option has a
                value that does not exist.
        """
        explanation, path = self._save(number, explainer)
        if self._sheets:
            # imported here: matplotlib takes half a second
            from vitkit.explaining.figures import draw_attention_sheet
            from vitkit.plots.panels import save_panels

            sheet = draw_attention_sheet(explainer.checkpoint, explainer.pixels)
            save_panels(sheet, self._sheets[number], WRITER)
        return explanation, path

    def finish(self, title: str) -> Path:
        """Write what belongs to all images, and return the path to open.

        Args:
            title: of a page.
        """
        return self.folder

    @abstractmethod
    def _figures(self) -> list[Path]:
        """Return the figures of all images, without sheets."""

    def _pages(self) -> list[Path]:
        return []

    @abstractmethod
    def _save(self, number: int, explainer: ImageExplainer) -> tuple[Explanation, Path]:
        """Do as `save`, without sheets."""


class OneMethod(ExplanationFiles):
    """The files of one method: a figure for each image.

    Args:
        method: a name of `METHODS`.
        options: of the method.
        **files: as for `ExplanationFiles`.
    """

    def __init__(self, method: str, options: Mapping[str, object], **files: Any) -> None:
        super().__init__(**files)
        self.method, self.options = method, options
        places = ResultPlaces(self.folder, self.ending)
        self._paths = [places.path(name) for name in self.names]

    def _figures(self) -> list[Path]:
        return self._paths

    def _save(self, number: int, explainer: ImageExplainer) -> tuple[Explanation, Path]:
        explanation = explainer.explain(self.method, **self.options)
        return explanation, explanation.save(self._paths[number], overwrite=True)


class EveryMethod(ExplanationFiles):
    """The files of every method: a folder for each image, and a page that shows all of them.

    Args:
        options: of the methods; each takes those that it has.
        **files: as for `ExplanationFiles`.
    """

    def __init__(self, options: Mapping[str, object], **files: Any) -> None:
        super().__init__(**files)
        self.options = options
        places = ResultPlaces(self.folder, "")
        self._folders = [places.path(name) for name in self.names]
        self._sections: list[GallerySection] = []

    def _figures(self) -> list[Path]:
        figures = []
        for folder in self._folders:
            figures += [folder / f"{name}{self.ending}" for name in (*METHODS, IMAGE, TOGETHER)]
        return figures

    def _pages(self) -> list[Path]:
        return [self.folder / PAGE]

    def _save(self, number: int, explainer: ImageExplainer) -> tuple[Explanation, Path]:
        # imported here: matplotlib takes half a second
        from vitkit.explaining.figures import draw_image, draw_maps
        from vitkit.plots.panels import save_panels

        explanations = [made for name in METHODS if (made := self._explain(name, explainer))]
        if not explanations:
            raise SettingError("no method: " + "; ".join(self.refused.values()))
        folder = self._folders[number]
        figures = []

        def write(name: str, figure: NotebookFigure, description: str, *lines: str) -> None:
            file = folder / f"{name}{self.ending}"
            save_panels(figure, file, WRITER)
            # as wide as its texts need to be read
            width = round(96 * figure.get_figwidth())
            place = file.relative_to(self.folder)
            figures.append(GalleryFigure(place, width, description, lines))

        first, name = explanations[0], str(self.names[number])
        write(IMAGE, draw_image(first), name)
        for made in explanations:
            figure = draw_maps([made], across=1, with_image=False)
            write(made.method, figure, made.description, *made.map_lines)
        write(TOGETHER, draw_maps(explanations, across=ACROSS), "all maps side by side")
        self._sections.append(
            GallerySection(name, first.image_lines, figures[:-1], figures[-1].file)
        )
        return first, folder

    def finish(self, title: str) -> Path:
        """Write the page of all images, and return its path.

        Args:
            title: of the page.
        """
        terms = []
        for method in METHODS.values():
            meaning = f"{method.summary}. {method.source}."
            if method.name in self.refused:
                meaning = f"not drawn: {self.refused[method.name]}"
            terms.append((method.name, meaning))
        path = self.folder / PAGE
        write_gallery(path, title, self._sections, terms)
        return path

    def _explain(self, name: str, explainer: ImageExplainer) -> Explanation | None:
        """Explain by one method; None where the model cannot carry it."""
        if name in self.refused:
            return None
        method = METHODS[name]
        options = {key: value for key, value in self.options.items() if key in method.options}
        try:
            return explainer.explain(name, **options)
        except (SettingError, MissingExtraError) as error:
            # a wrong value is the user's, and the model's kind is not
            if error.wrong is not None:
                raise
            self.refused[name] = str(error)
            return None
