"""Class names in several lines: broken between words, and never cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from unicodedata import east_asian_width

PIECES = re.compile(
    r"(?:(?<!\S)-(?=\d)|\d+(?:[.,]\d+)*(?: %)?|[^\s_\-/.,;:|])*(?:(?!(?<=\s)-\d)[\s_\-/.,;:|])*"
)
"""A word with the signs after it, where a line may end; -0.19 and 97.3 % are one word each."""


def text_width(text: str) -> int:
    """Return the width of a text in letters; a Chinese character is as wide as two.

    >>> text_width("cat"), text_width("猫")
    (3, 2)
    """
    return sum(2 if east_asian_width(letter) in "WF" else 1 for letter in text)


def wrap_name(
    name: str, width: int | float, measure: Callable[[str], int | float] = text_width
) -> list[str]:
    """Break a name into lines of at most `width`, between its words where it can.

    >>> wrap_name("golden_retriever puppy", 10)
    ['golden_', 'retriever', 'puppy']
    >>> wrap_name("Donaudampfschiff", 9)
    ['Donaudamp', 'fschiff']
    >>> wrap_name("(p = 0.048), deletion -0.19", 20)
    ['(p = 0.048),', 'deletion -0.19']
    >>> wrap_name("(p = 0.048), deletion -0.19", 8)
    ['(p =', '0.048),', 'deletion', '-0.19']

    Args:
        name: any text; of spaces alone one empty line remains.
        width: of a line, in the unit of `measure`; a letter that is wider has a line of its own.
        measure: returns the width of a text; default in letters.
    """
    lines = [""]
    for piece in PIECES.findall(name):
        if measure((lines[-1] + piece).rstrip()) <= width:
            lines[-1] += piece
            continue
        if lines[-1]:
            lines.append("")
        # a word that is longer than a line is broken where the line ends
        for letter in piece:
            if lines[-1] and measure((lines[-1] + letter).rstrip()) > width:
                lines.append("")
            lines[-1] += letter
    return [line.rstrip() for line in lines if line.strip()] or [""]


def wrap_names(names: list[str], most_lines: int, least_width: int) -> list[str]:
    """Break names into at most `most_lines` lines each, as narrow as they can be.

    Args:
        names: the names.
        most_lines: lines of a name at most; 1 leaves all names whole.
        least_width: letters of a line that is always allowed.

    Returns:
        The names with line breaks.
    """
    if most_lines == 1:
        return names
    # all names get the width of the longest, so that their lines look alike
    width = least_width
    while any(len(wrap_name(name, width)) > most_lines for name in names):
        width += 1
    return ["\n".join(wrap_name(name, width)) for name in names]
