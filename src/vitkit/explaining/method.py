"""`Method`: the facts about a method of explanation, known before it is imported."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    ExplainFunction: TypeAlias = Callable[..., Float[Tensor, "B gh gw *colours"]]
    """(model, images (B, C, H, W), *, classes (B,) where `by_class`, **options) -> (B, gh, gw)."""


@dataclass(frozen=True)
class Method:
    """One method of explanation. Its function is imported at its first use, and torch with it.

    Attributes:
        name: as the user writes it; the function and its file have the name with underscores.
        summary: what the map shows, in a few words without a full stop.
        source: the paper, with its number at arXiv.
        by_class: whether the map depends on the class; the function then takes `classes`, (B,)
            class numbers.
        options: further keywords of the function, such as `layer`.
        colours: whether a patch has three values (red, green, blue) instead of one.
        by_passes: whether the map comes from forward passes alone, without gradients or attention.
        unit: unit of the values, for the colour bar, such as `share of attention`.
    """

    name: str
    summary: str
    source: str
    by_class: bool = False
    options: tuple[str, ...] = ()
    colours: bool = False
    by_passes: bool = False
    unit: str = "importance"

    @property
    def compute(self) -> ExplainFunction:
        """The function: (model, images (B, C, H, W), ...) -> a value for each patch (B, gh, gw).

        A larger value means more important. The model runs in eval mode, gets no gradients, and
        keeps its mode.
        """
        file = self.name.replace("-", "_")
        function: ExplainFunction = getattr(
            import_module(f"vitkit.explaining.methods.{file}"), file
        )
        return function


def whole_number(value: object) -> int | None:
    """Return a whole number, NumPy's too, as an `int`; None for any other value, also for True."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
