"""Functions that `test_child.py` runs in child processes."""

import os
import sys
import time
from pathlib import Path

from vitkit import SettingError


def add(first: int, second: int) -> int:
    sys.stdout.write("a runtime prints this\n")
    return first + second


def hang(place: str = "") -> None:
    if place:
        Path(place).write_text(str(os.getpid()))
    time.sleep(60)


def refuse() -> None:
    raise SettingError("precision int3 does not exist")


def fail() -> None:
    raise RuntimeError("no such operator\nmore lines")


def leave() -> None:
    sys.stderr.write("first\nlast words\n")
    os._exit(7)
