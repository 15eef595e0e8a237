"""Panels of a model as figures: one figure each, or all on one sheet, above a caption."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes

from vitkit.messages import escape
from vitkit.plots.figure import SCREEN_DPI, NotebookFigure, drawing_style, fit_to_contents
from vitkit.plots.wrapping import wrap_name

PANEL = (1.6, 1.5)
"""Width and height of a panel on the sheet, in inches."""
LARGE_PANEL = (3.0, 2.7)
"""The same of a panel alone: with its axis titles as wide as a column of a paper."""
GAPS = (1.08, 1.12)
"""Inches between panels, across and down."""
ACROSS = 3
"""Panels in a row of the sheet."""
LETTER_WIDTH = 0.062
"""Inches of a letter of the caption, on average."""


class ModelPanel(NamedTuple):
    """One panel: its name in file names, and the function that draws it into axes."""

    name: str
    draw: Callable[[Axes], None]


def draw_model_panels(panels: Sequence[ModelPanel], caption: str) -> NotebookFigure:
    """Draw panels on one sheet, or a single one as a figure of its own.

    Args:
        panels: one or more, row by row.
        caption: a line below all of them; broken where it is longer than the figure.
    """
    alone = len(panels) == 1
    side = LARGE_PANEL if alone else PANEL
    across = min(ACROSS, len(panels))
    if len(panels) == 4:
        across = 2
    rows = -(-len(panels) // across)  # rounded up
    width = across * (side[0] + GAPS[0])
    height = rows * (side[1] + GAPS[1])
    text = escape(caption)
    with drawing_style(text) as missing:
        figure = NotebookFigure(figsize=(width, height), dpi=SCREEN_DPI)
        figure.missing = missing
        for number, panel in enumerate(panels):
            left = number % across * (side[0] + GAPS[0])
            bottom = height - number // across * (side[1] + GAPS[1]) - side[1]
            place = (left / width, bottom / height, side[0] / width, side[1] / height)
            axes = figure.add_axes(place)
            panel.draw(axes)
            if not alone:
                # papers refer to the panels by letters
                axes.title.set_text(f"({'abcdefghi'[number]}) {axes.get_title()}")
        _write_caption(figure, text, bottom=min(axes.get_position().y0 for axes in figure.axes))
        fit_to_contents(figure)
    return figure


def _write_caption(figure: NotebookFigure, text: str, bottom: float) -> None:
    """Write the caption below the panels, as part of invisible axes in the lower left corner."""
    width = figure.get_size_inches()[0]
    lines = wrap_name(text, int(width / LETTER_WIDTH))
    axes = figure.add_axes((0, bottom, 0.01, 0.01))
    axes.set_axis_off()
    axes.annotate(
        "\n".join(lines),
        (0, 0),
        xycoords="axes fraction",
        xytext=(-28, -38),
        textcoords="offset points",
        ha="left",
        va="top",
        fontsize=7,
        parse_math=False,
    )
