"""Parts of a drawing: boxes, arrows, words, tokens and small grids, as SVG text.

Lengths are units of the drawing, which is 400 units wide: on a phone a unit is a little less than
a pixel. Colours are classes, which `STYLE` and the site's drawings.css give a light and a dark
value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 400
SUBSCRIPT = re.compile(r"([_^])\{([^}]*)\}")
SEVEN = (
    "........",
    ".######.",
    ".....##.",
    "....##..",
    "...##...",
    "...#....",
    "..##....",
    "........",
)
"""A digit of 8 x 8 pixels; # is ink."""


@dataclass(frozen=True)
class Drawing:
    """A drawing without its frame.

    Attributes:
        title: its name, for readers who do not see it.
        description: what it shows, in a few sentences, for the same readers.
        height: in units; the width is `WIDTH`.
        body: SVG elements, where `{link:PAGE#ANCHOR}` stands for an address.
    """

    title: str
    description: str
    height: int
    body: str


def words(text: str) -> str:
    """Return text with `_{...}` lowered and `^{...}` raised."""
    parts, end = [], 0
    for found in SUBSCRIPT.finditer(text):
        shift = 3 if found[1] == "_" else -5
        parts.append(escape(text[end : found.start()]))
        small = f'<tspan dy="{shift}" class="small">{escape(found[2])}</tspan>'
        parts.append(f'{small}<tspan dy="{-shift}">&#8203;</tspan>')
        end = found.end()
    return "".join(parts) + escape(text[end:])


def label(x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> str:
    """Return words whose baseline is at y; anchor is start, middle or end."""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words(text)}</text>'


def note(x: float, y: float, *lines: str, anchor: str = "middle") -> str:
    """Return small lines in the colour of remarks."""
    return "".join(label(x, y + 14 * n, line, "note", anchor) for n, line in enumerate(lines))


def box(
    x: float, y: float, width: float, height: float, text: str = "", kind: str = "plain"
) -> str:
    """Return a rounded box with words in its middle; a line break separates two lines."""
    made = (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="5" class="{kind}"/>'
    )
    lines = text.split("\n") if text else []
    top = y + height / 2 + 4.5 - 8 * (len(lines) - 1)
    return made + "".join(label(x + width / 2, top + 16 * n, s) for n, s in enumerate(lines))


def arrow(*points: tuple[float, float], kind: str = "line") -> str:
    """Return a line through points, with a head at the last."""
    path = " ".join(f"{'L' if n else 'M'}{x:g} {y:g}" for n, (x, y) in enumerate(points))
    return f'<path d="{path}" class="{kind}"/>{arrow_head(points[-2], points[-1])}'


def line(*points: tuple[float, float], kind: str = "line") -> str:
    """Return a line through points."""
    path = " ".join(f"{'L' if n else 'M'}{x:g} {y:g}" for n, (x, y) in enumerate(points))
    return f'<path d="{path}" class="{kind}"/>'


def arrow_head(start: tuple[float, float], end: tuple[float, float], size: float = 7) -> str:
    """Return the head of an arrow along an axis."""
    (x, y), (dx, dy) = end, (end[0] - start[0], end[1] - start[1])
    ux, uy = ((dx > 0) - (dx < 0), 0) if abs(dx) > abs(dy) else (0, (dy > 0) - (dy < 0))
    back, side = (x - size * ux, y - size * uy), (0.45 * size * uy, 0.45 * size * ux)
    corners = [
        (x, y),
        (back[0] + side[0], back[1] + side[1]),
        (back[0] - side[0], back[1] - side[1]),
    ]
    return f'<path d="M{" L".join(f"{a:g} {b:g}" for a, b in corners)} Z" class="head"/>'


def plus(x: float, y: float) -> str:
    """Return the sign of a sum."""
    return (
        f'<circle cx="{x:g}" cy="{y:g}" r="9" class="plain"/>'
        f'<path d="M{x - 5:g} {y:g} H{x + 5:g} M{x:g} {y - 5:g} V{y + 5:g}" class="line"/>'
    )


def link(target: str, body: str, name: str = "") -> str:
    """Return elements that lead to a page of the tutorial, such as `01_patches#cutting`.

    Args:
        target: a page and a heading.
        body: the elements.
        name: what the link says to a screen reader, where the elements have no words.
    """
    named = f' aria-label="{name}"' if name else ""
    return f'<a href="{{link:{target}}}"{named}>{body}</a>'


def grid(
    x: float, y: float, rows: int, columns: int, cell: float, kind: Callable[[int, int], str],
    gap: float = 0,
) -> str:  # fmt: skip
    """Return a grid of squares whose class `kind(row, column)` decides."""
    made = []
    for row in range(rows):
        for column in range(columns):
            left, top = x + column * (cell + gap), y + row * (cell + gap)
            size = f'width="{cell:g}" height="{cell:g}"'
            made.append(f'<rect x="{left:g}" y="{top:g}" {size} class="{kind(row, column)}"/>')
    return "".join(made)


def pixel(row: int, column: int) -> str:
    """Return the class of a pixel of the digit."""
    return "ink" if SEVEN[row][column] == "#" else "paper"


def patch(number: int, x: float, y: float, cell: float) -> str:
    """Return one of the 4 patches of 4 x 4 pixels of the digit, in reading order."""
    top, left = 4 * (number // 2), 4 * (number % 2)
    pixels = grid(x, y, 4, 4, cell, lambda row, column: pixel(top + row, left + column))
    return (
        pixels
        + f'<rect x="{x:g}" y="{y:g}" width="{4 * cell:g}" height="{4 * cell:g}" class="edge"/>'
    )


def token(x: float, y: float, kind: str, text: str = "", height: float = 44) -> str:
    """Return a token: a narrow column of numbers, with a word below."""
    made = f'<rect x="{x:g}" y="{y:g}" width="16" height="{height:g}" rx="2" class="{kind}"/>'
    inner = "".join(
        f'<path d="M{x:g} {y + height * n / 4:g} H{x + 16:g}" class="thin"/>' for n in (1, 2, 3)
    )
    return made + inner + (label(x + 8, y + height + 13, text, "note") if text else "")


def tokens(
    x: float, y: float, kinds: Sequence[str], names: Iterable[str] = (), step: float = 28
) -> str:
    """Return tokens side by side."""
    named = list(names) or [""] * len(kinds)
    return "".join(
        token(x + step * n, y, kind, name)
        for n, (kind, name) in enumerate(zip(kinds, named, strict=True))
    )
