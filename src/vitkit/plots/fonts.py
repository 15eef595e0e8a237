"""Fonts that have the characters of a text: matplotlib's own, and others of this computer."""

from __future__ import annotations

from functools import lru_cache

from matplotlib.font_manager import FontEntry, FontProperties, findfont, fontManager, get_font

OWN_FONT = "DejaVu Sans"
"""The font that is part of matplotlib."""
BOXES = "Last Resort"
"""First words of the name of a font of boxes, which show the script of a missing character."""


@lru_cache(maxsize=16)
def covering_families(text: str) -> tuple[list[str], str]:
    """Return font families that together have the characters of a text.

    Args:
        text: any text; line breaks and spaces need no font.

    Returns:
        The families, matplotlib's own first, and the characters that no font has, sorted.
    """
    families = [OWN_FONT]
    boxes = [entry.name for entry in fontManager.ttflist if entry.name.startswith(BOXES)][:1]
    missing = {letter for letter in text if not letter.isascii() and not letter.isspace()}
    if missing:
        missing -= _characters(findfont(FontProperties(family=OWN_FONT)))
    if missing:
        # an upright sans-serif font looks most like matplotlib's own
        for entry in sorted(fontManager.ttflist, key=_order):
            if entry.name.startswith(BOXES):
                continue
            found = missing & _characters(str(entry.fname))
            if found:
                families.append(entry.name)
                missing -= found
            if not missing:
                break
    # the font of boxes comes last, so that it replaces no letter of another font
    if missing:
        families += boxes
    return families, "".join(sorted(missing))


def _order(entry: FontEntry) -> tuple[bool, bool, bool, str]:
    """Sort fonts: upright, sans-serif and of normal weight first, then by name."""
    weight_differs = str(entry.weight) not in ("400", "normal", "regular")
    return entry.style != "normal", weight_differs, "Sans" not in entry.name, entry.name


def _characters(path: str) -> set[str]:
    """Return the characters of a font file; none of a file that cannot be opened."""
    try:
        return {chr(code) for code in get_font(path).get_charmap()}
    except (OSError, RuntimeError):
        return set()
