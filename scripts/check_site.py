"""Check a built site: `python scripts/check_site.py build/docs`.

It reports dead links (pages, files, anchors), anything that a page fetches from another host (links
for readers may lead anywhere), and images in the text without a caption.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {"src", "srcset", "poster", "data", "background"}
FETCHED_LINKS = {"stylesheet", "icon", "shortcut", "preload", "prefetch", "modulepreload",
                 "preconnect", "dns-prefetch", "manifest", "apple-touch-icon"}  # fmt: skip
IN_STYLES = re.compile(r"""url\(\s*["']?([^"')]+)|@import\s+["']([^"']+)""")


class Page(HTMLParser):
    """The links of a page, the files that it fetches, and its anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.anchors: set[str] = set()
        self.uncaptioned: list[str] = []
        self.open: list[str] = []
        self.inside: list[str] = []
        self.styled = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what the tag fetches; images of a figure wait for its caption."""
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        relations = set(given.get("rel", "").split())
        if tag == "link" and relations & FETCHED_LINKS:
            self.fetched.append(given.get("href", ""))
        elif "href" in given:
            self.links.append(given["href"])
        for name in FETCHED & set(given):
            values = given[name].split(",") if name == "srcset" else [given[name]]
            self.fetched += [value.split()[0] for value in values if value.split()]
        self.fetched += addresses(given.get("style", ""))
        self.styled = tag == "style"
        if tag in ("article", "figure"):
            self.inside.append(tag)
        if tag == "img" and "article" in self.inside:
            (self.open if "figure" in self.inside else self.uncaptioned).append(
                given.get("src", "")
            )
        if tag == "figcaption":
            self.open.clear()

    def handle_endtag(self, tag: str) -> None:
        """Count the images of a figure that ends without a caption."""
        self.styled = False
        if tag in self.inside:
            self.inside.remove(tag)
        if tag == "figure":
            self.uncaptioned += self.open
            self.open.clear()

    def handle_data(self, data: str) -> None:
        """Note what styles within the page fetch."""
        if self.styled:
            self.fetched += addresses(data)


def addresses(style: str) -> list[str]:
    """Return the addresses that a style sheet fetches."""
    return [first or second for first, second in IN_STYLES.findall(style)]


def problems(site: Path) -> Iterator[str]:
    """Yield a line for each problem, beginning with its file."""
    pages = {path.resolve(): parsed(path) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}: no page"
    for path, page in pages.items():
        name = path.relative_to(site.resolve())
        for address in page.fetched:
            if is_foreign(address):
                yield f"{name}: fetched from another host: {address}"
        for address in dict.fromkeys([*page.links, *page.fetched]):
            yield from (f"{name}: {what}" for what in dead(address, path, site.resolve(), pages))
        yield from (f"{name}: image without a caption: {src}" for src in page.uncaptioned)
    for path in sorted(site.rglob("*.css")):
        for address in addresses(path.read_text(encoding="utf-8")):
            if is_foreign(address):
                yield f"{path.relative_to(site)}: fetched from another host: {address}"


def parsed(path: Path) -> Page:
    """Parse a page."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    return page


def is_foreign(address: str) -> bool:
    """Return True for an address with a host; data: and fragments have none."""
    return bool(urlsplit(address).netloc)


def dead(address: str, page: Path, site: Path, pages: dict[Path, Page]) -> Iterator[str]:
    """Yield the reason why a link within the site is dead."""
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file() or not target.is_relative_to(site):
        yield f"dead link: {address}"
        return
    anchors = pages[target].anchors if target in pages else set()
    if target in pages and unquote(parts.fragment) not in anchors | {"", "top"}:
        yield f"dead anchor: {address}"


def main() -> int:
    """Print the problems; return 1 if there are any."""
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    site = Path(sys.argv[1])
    found = list(problems(site))
    print("\n".join(found) or f"{site}: {len(list(site.rglob('*.html')))} pages, nothing wrong")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
