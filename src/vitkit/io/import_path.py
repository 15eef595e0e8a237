"""Import a user's own function by `package.module:function`."""

from __future__ import annotations

import os
import sys
from pkgutil import resolve_name
from typing import Any


def import_by_name(name: str) -> Any:
    """Return the object of this name; its module may lie in the current folder.

    Raises:
        ImportError, AttributeError, ValueError: no such module, no such name in it, or not a name;
            also whatever the module itself raises.
    """
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that installed modules take precedence
    return resolve_name(name)
