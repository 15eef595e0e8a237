"""A page of explained images: one offline HTML file beside the image files that it shows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

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
p { margin: .25rem 0 } figcaption { color: var(--pale); font-size: .875rem }
section { border-top: 1px solid var(--line) }
.maps { display: grid; gap: 1.5rem 1rem; margin: .5rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)) }
figure { margin: 0 }
/* the caption in the image file is text below it here */
img { max-width: 100%; height: auto; object-fit: cover; object-position: top; background: #fff;
  border-radius: 4px }
dt { font-weight: 600 } dd { margin: 0 0 .5rem 1rem } a { color: inherit }
@media print { figure { break-inside: avoid } }
"""
SECTION = re.compile(
    r'<section data-title="(?P<title>[^"]*)" data-file="(?P<file>[^"]*)">.*?</section>\n', re.DOTALL
)
"""A section of a page; no name in it can look like its end, as all are escaped."""


class GalleryFigure(NamedTuple):
    """An image file of a page.

    Attributes:
        file: relative to the page.
        size: width and height on the page, in pixels; what is lower in the file, such as its own
            caption, is cut off.
        description: for readers who cannot see it.
        caption: lines below it.
    """

    file: Path
    size: tuple[int, int]
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


class GalleryPage:
    """A page of images, those of an earlier page in the same place included.

    Args:
        path: of the page; a file that exists is replaced.
        title: of the sections.
        sections: one for each image.

    Attributes:
        earlier: number of images that only the earlier page has; their files are still there.
    """

    def __init__(self, path: Path, title: str, sections: Iterable[GallerySection]) -> None:
        self.path, self.title = path, title
        by_file = {_address(section.more): _section(title, section) for section in sections}
        earlier = _earlier(path)
        self.earlier = len(earlier.keys() - by_file.keys())
        # those of this title first
        self._sections = by_file | {
            file: text for file, text in earlier.items() if file not in by_file
        }

    def write(self, terms: Iterable[tuple[str, str]]) -> None:
        """Write the page; it loads nothing but its own image files, and all names are escaped.

        Args:
            terms: a name and its meaning, for a list at the end.

        Raises:
            OutputError: a path that cannot be written.
        """
        title = html_text(self.title)
        parts = [
            f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{MARK}\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        ]
        groups: dict[str, list[str]] = {title: []}
        for section in self._sections.values():
            found = SECTION.match(section)
            assert found
            groups.setdefault(found["title"], []).append(section)
        for name, sections in groups.items():
            parts += [f"<h1>{name}</h1>\n", *sections]
        parts.append("<section>\n<h2>Methods and scores</h2>\n<dl>\n")
        for name, meaning in terms:
            parts.append(f"<dt>{html_text(name)}</dt><dd>{html_text(meaning)}</dd>\n")
        parts.append("</dl>\n</section>\n</body>\n</html>\n")
        with replacing(self.path) as temporary:
            temporary.write_text("".join(parts), encoding="utf-8")


def _earlier(path: Path) -> dict[str, str]:
    """Return the sections of an earlier page whose files are still there: address -> HTML."""
    if not path.is_file() or not _is_gallery(path):
        return {}
    found = {}
    for match in SECTION.finditer(path.read_text(encoding="utf-8", errors="replace")):
        # bytes, as a name need not be UTF-8
        if (path.parent / os.fsdecode(unquote_to_bytes(match["file"]))).is_file():
            found[match["file"]] = match[0]
    return found


def _section(title: str, section: GallerySection) -> str:
    lines = "".join(f"<p>{html_text(line)}</p>\n" for line in section.lines)
    figures = "".join(map(_figure, section.figures))
    address = _address(section.more)
    return (
        f'<section data-title="{html_text(title)}" data-file="{address}">\n'
        f"<h2>{html_text(section.title)}</h2>\n{lines}"
        f'<div class="maps">\n{figures}</div>\n'
        f'<p><a href="{address}">all maps in one figure</a></p>\n</section>\n'
    )


def _figure(figure: GalleryFigure) -> str:
    address = _address(figure.file)
    caption = "<br>".join(map(html_text, figure.caption))
    width, height = figure.size
    return (
        f'<figure><a href="{address}"><img src="{address}" alt="{html_text(figure.description)}" '
        f'width="{width}" style="aspect-ratio:{width}/{height}" loading="lazy"></a>'
        f"<figcaption>{caption}</figcaption></figure>\n"
    )


def _address(file: Path) -> str:
    # bytes, as a name need not be UTF-8
    return quote(os.fsencode(file.as_posix()))


def _is_gallery(path: Path) -> bool:
    with path.open("rb") as file:
        # The mark is in the head of the page; large files are not read through.
        return MARK.encode() in file.read(1024)


GALLERY_FILE = ResultKind("a page of explanations", ".html", _is_gallery)
