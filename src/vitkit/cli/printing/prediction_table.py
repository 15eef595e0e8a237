"""The table of predictions on a terminal: image, class, probability and a bar, as they come."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rich.cells import cell_len, set_cell_size

from vitkit.messages import escape, percent

GAP = "  "
NUMBER = len("100.0 %")
"""Characters of a probability."""
EIGHTHS = ("", *"▏▎▍▌▋▊▉")
"""The last character of a bar, which is filled by so many eighths."""


class PredictionTable:
    """Formats predictions as rows of a table, whose columns are known before the first image.

    A name that is wider than its column has a line of its own, so that nothing is cut.

    Args:
        names: names of the images, as far as they are known.
        classes: classes that can be predicted.
        width: columns of the terminal.
    """

    def __init__(self, names: Iterable[str], classes: Iterable[str], width: int) -> None:
        self._bar = width // 5
        room = width - self._bar - NUMBER - 3 * len(GAP)
        name = max((cell_len(escape(name)) for name in names), default=room)
        label = max((cell_len(escape(label)) for label in classes), default=room)
        # the other column gets the space that a short column leaves
        self._label = max(len("class"), min(label, max(room // 2, room - name)))
        self._name = max(len("image"), min(name, room - self._label))

    def header(self) -> str:
        """Return the line of titles."""
        cells = ("image".ljust(self._name), "class".ljust(self._label), "prob.".rjust(NUMBER))
        return GAP.join(cells) + "\n"

    def rows(self, name: str, top: Sequence[tuple[str, float]]) -> str:
        """Return the lines of one image.

        Args:
            name: name of the image.
            top: its most probable classes with their probabilities [0, 1]; after the first, those
                that round to 0.0 % are left out.
        """
        lines = []
        name = escape(name)
        if cell_len(name) > self._name:
            lines.append(name)
            name = ""
        for rank, (label, probability) in enumerate(top):
            number = percent(probability)
            if rank and number == percent(0.0):
                break
            first, second = set_cell_size(name, self._name), escape(label)
            if cell_len(second) > self._label:
                lines.append(f"{first}{GAP}{second}")
                first, second = " " * self._name, ""
            second = set_cell_size(second, self._label)
            cells = (first, second, number.rjust(NUMBER), self._filled(probability))
            lines.append(GAP.join(cells).rstrip())
            name = ""
        return "".join(f"{line}\n" for line in lines)

    def _filled(self, probability: float) -> str:
        """Return a bar as long as the probability is high."""
        if not math.isfinite(probability):
            return ""
        whole, eighths = divmod(round(probability * self._bar * 8), 8)
        return "█" * whole + EIGHTHS[eighths]
