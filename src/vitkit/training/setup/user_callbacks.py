"""The user's own callbacks, made from the classes, functions or objects that the settings name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitkit.errors import SettingError
from vitkit.io.import_path import import_setting
from vitkit.training.trainer import Callback


def import_callbacks(names: Sequence[str]) -> list[Callback]:
    """Return the callbacks of these names: objects, or made by classes or functions.

    Raises:
        SettingError: one that cannot be imported or made, or is no `vitkit.Callback`.
    """
    return [as_callback(import_setting("callbacks", name), name) for name in names]


def as_callback(thing: Any, name: str) -> Callback:
    """Return a callback, or the one that a class or a function without arguments makes.

    Raises:
        SettingError: it cannot be made, or is no `vitkit.Callback`.
    """
    made = thing
    # an object may be a callback and callable as well
    if callable(thing) and not isinstance(thing, Callback):
        try:
            made = thing()
        except Exception as error:  # whatever the user's class or function raises
            raise SettingError(
                f"--callbacks {name} cannot be made: {type(error).__name__}: {error}; pass an "
                "object, or a class or function without arguments"
            ) from error
    if not isinstance(made, Callback):
        raise SettingError(
            f"--callbacks {name} is a {type(made).__name__}; expected a vitkit.Callback"
        )
    return made
