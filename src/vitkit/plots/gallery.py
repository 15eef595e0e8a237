"""A page of explained images: one offline HTML file beside the image files that it shows."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from vitkit.io.atomic import replacing
from vitkit.io.results import ResultKind
from vitkit.plots.html import html_text

WRITER = "vitkit explain"
MARK = f'<meta name="generator" content="{WRITER}">'
"""Names the command that wrote a page; it stands in the first kilobyte."""
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #fff; --pale: #59636e; --line: #d1d9e0 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --pale: #9198a1; --line: #3d444d }
}
body { margin: 0 auto; max-width: 72rem; padding: 1rem; color: var(--ink); background: var(--paper);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem }
p { margin: .25rem 0 } small, figcaption { color: var(--pale); font-size: .875rem }
section { border-top: 1px solid var(--line) }
.maps { display: flex; flex-wrap: wrap; gap: 1.5rem 1rem; align-items: flex-start }
figure { margin: 0; width: min-content; min-width: min(100%, 20rem) }
img { max-width: 100%; height: auto; background: #fff; border-radius: 4px }
dt { font-weight: 600 } dd { margin: 0 0 .5rem 1rem } a { color: inherit }
@media print { .maps { break-inside: avoid } }
"""


class GalleryFigure(NamedTuple):
    """An image file of a page.

    Attributes:
        file: relative to the page.
        width: pixels on the page.
        description: for readers who cannot see it.
        caption: lines below it.
    """

    file: Path
    width: int
    description: str
    caption: Sequence[str]


class GallerySection(NamedTuple):
    """One image of a page with its figures.

    Attributes:
        title: the image's name.
        lines: what is known of it.
        figures: the image and its maps.
        more: a file with all of them side by side, relative to the page.
    """

    title: str
    lines: Sequence[str]
    figures: Sequence[GalleryFigure]
    more: Path


def write_gallery(
    path: Path, title: str, sections: Iterable[GallerySection], terms: Iterable[tuple[str, str]]
) -> None:
    """Write a page that loads nothing but its own image files; all names are escaped.

    Args:
        path: of the page; a file that exists is replaced.
        title: of the page.
        sections: one for each image.
        terms: a name and its meaning, for a list at the end.

    Raises:
        OutputError: a path that cannot be written.
    """
    parts = [
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{MARK}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html_text(title)}</h1>\n"
    ]
    parts += [_section(section) for section in sections]
    parts.append("<section>\n<h2>Methods and scores</h2>\n<dl>\n")
    for name, meaning in terms:
        parts.append(f"<dt>{html_text(name)}</dt><dd>{html_text(meaning)}</dd>\n")
    parts.append("</dl>\n</section>\n</body>\n</html>\n")
    with replacing(path) as temporary:
        temporary.write_text("".join(parts), encoding="utf-8")


def _section(section: GallerySection) -> str:
    lines = "".join(f"<p>{html_text(line)}</p>\n" for line in section.lines)
    figures = "".join(map(_figure, section.figures))
    return (
        f"<section>\n<h2>{html_text(section.title)}</h2>\n{lines}"
        f'<div class="maps">\n{figures}</div>\n'
        f'<p><a href="{_address(section.more)}">all maps in one figure</a></p>\n</section>\n'
    )


def _figure(figure: GalleryFigure) -> str:
    address = _address(figure.file)
    caption = "<br>".join(map(html_text, figure.caption))
    return (
        f'<figure><a href="{address}"><img src="{address}" alt="{html_text(figure.description)}" '
        f'width="{figure.width}" loading="lazy"></a><figcaption>{caption}</figcaption></figure>\n'
    )


def _address(file: Path) -> str:
    # bytes, as a name need not be UTF-8
    return quote(os.fsencode(file.as_posix()))


def _is_gallery(path: Path) -> bool:
    with path.open("rb") as file:
        # The mark is in the head of the page; large files are not read through.
        return MARK.encode() in file.read(1024)


GALLERY_FILE = ResultKind("a page of explanations", ".html", _is_gallery)
