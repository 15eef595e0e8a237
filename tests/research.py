"""The scripts of examples/research as modules."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

RESEARCH = Path(__file__).parent.parent / "examples" / "research"


def script(name: str) -> ModuleType:
    """Import a script, whose name begins with a number."""
    if str(RESEARCH) not in sys.path:
        sys.path.append(str(RESEARCH))
    return importlib.import_module(name)
