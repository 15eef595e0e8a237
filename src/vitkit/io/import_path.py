"""User functions and objects by name: imported, or passed in the call.

Settings are text, so that config.yaml can hold them. A dataset in memory or a function of a
notebook has a name there, and is found by it as long as the call lasts.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pkgutil import resolve_name
from typing import Any

from vitkit.errors import SettingError, VitkitError

NOT_IMPORTABLE = ("__main__:", "<", "()")
"""Parts of the names of objects that no other process can import."""
MEMORY_PREFIX = "memory://"
"""Begins the name of data that were passed as an object: `memory://arrays-1f3a5c7e`."""
_GIVEN: dict[str, Any] = {}


@contextmanager
def given(objects: Mapping[str, Any]) -> Iterator[None]:
    """Keep objects under their names while the block runs; an inner block may replace some."""
    before = dict(_GIVEN)
    _GIVEN.update(objects)
    try:
        yield
    finally:
        _GIVEN.clear()
        _GIVEN.update(before)


def is_given(name: str) -> bool:
    """Return True if an object was passed under this name."""
    return name in _GIVEN


def find_given(name: str) -> Any:
    """Return the object of a name. Raises `KeyError`."""
    return _GIVEN[name]


def import_by_name(name: str) -> Any:
    """Return the object of this name; its module may lie in the current folder.

    An object that the call passed under this name comes first.

    Raises:
        ImportError, AttributeError, ValueError: no such module, no such name in it, or not a name;
            also whatever the module itself raises.
    """
    if is_given(name):
        return find_given(name)
    if names_an_object(name):
        raise ImportError("it is an object of a script or a notebook, which must be passed itself")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # appended, so that installed modules take precedence
    return resolve_name(name)


def import_setting(setting: str, name: str) -> Any:
    """Return the object that a setting names, such as `package.module:function`.

    Args:
        setting: name of the setting, for messages.
        name: its value.

    Raises:
        SettingError: there is no such object, or its module fails while it is imported.
    """
    try:
        return import_by_name(name)
    except VitkitError:  # a signal, too
        raise
    except (ImportError, AttributeError, ValueError) as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a user's module may raise anything
        reason = f"{type(error).__name__}: {error}"
    raise SettingError(f"--{setting} {name} cannot be imported: {reason}")


def names_an_object(name: str) -> bool:
    """Return True for the name of an object that no import finds, such as a notebook's function."""
    return ":" in name and any(part in name for part in NOT_IMPORTABLE)


def import_name(thing: object) -> str:
    """Return `module:name` of a function or a class; of any other object, that of its class + `()`.

    >>> from collections import OrderedDict
    >>> import_name(OrderedDict), import_name(OrderedDict())
    ('collections:OrderedDict', 'collections:OrderedDict()')
    """
    if hasattr(thing, "__qualname__"):
        return f"{thing.__module__}:{thing.__qualname__}"
    return f"{type(thing).__module__}:{type(thing).__qualname__}()"


def is_importable(thing: object) -> bool:
    """Return True if another process can import an object by its name."""
    name = import_name(thing)
    found: object = None
    # in another process `__main__` is another module
    if not names_an_object(name):
        with suppress(ImportError, AttributeError, ValueError):
            found = resolve_name(name)
    return found is thing
