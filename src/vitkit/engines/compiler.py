"""The C++ compiler that torch's inductor calls for a processor."""

from __future__ import annotations

import os
import shutil
import sys

USUAL = {"darwin": "clang++", "win32": "cl"}
"""Platform -> the compiler that inductor calls there; g++ on all others."""


def compiler_name() -> str:
    """Return the program that inductor calls: `$CXX`, else the usual one of the platform."""
    return os.environ.get("CXX") or USUAL.get(sys.platform, "g++")


def has_compiler() -> bool:
    """Return True if that program is installed; it is not run."""
    return shutil.which(compiler_name()) is not None
