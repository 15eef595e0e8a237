"""A user's own function, by `package.module:function`."""

from __future__ import annotations

import os
import sys
from pkgutil import resolve_name
from typing import Any


def import_by_name(name: str) -> Any:
    """What the name means; a module may lie in the current folder, behind all that is installed.

    Raises:
        ImportError, AttributeError, ValueError: there is no such module, no such name in it, or it
            is no name; whatever else the module raises.
    """
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    return resolve_name(name)
