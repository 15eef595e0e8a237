"""Checks of the options that several methods of explanation share: numbers of layers, patches."""

from __future__ import annotations

from vitkit.errors import SettingError
from vitkit.explaining.method import whole_number
from vitkit.models.vit import ViT
from vitkit.shapes import Grid, resolve_layers


def check_number(name: str, value: object) -> int:
    """Return an option as a whole number; NumPy's are taken too.

    Raises:
        SettingError: not one whole number.
    """
    number = whole_number(value)
    if number is None:
        more = "; for the maps of several use vitkit.Record"
        raise SettingError.about(name, value, "must be one whole number", more)
    return number


def check_layer(layer: object, model: ViT) -> int:
    """Return the number of a block, from 0; negative ones count from the end.

    Raises:
        SettingError: not one whole number, or a block that the model does not have.
    """
    (number,) = resolve_layers([check_number("layer", layer)], model.spec.depth)
    return number


def check_patch(query: object, grid: Grid) -> int:
    """Return the number of a patch, from 0, row by row.

    Raises:
        SettingError: not one whole number, or a patch that the images do not have.
    """
    number = check_number("query", query)
    rows, columns = grid
    if not 0 <= number < rows * columns:
        expected = f"must be a patch, 0 to {rows * columns - 1} (row by row, {rows} x {columns})"
        raise SettingError.about("query", number, expected)
    return number
