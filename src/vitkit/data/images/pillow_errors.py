"""The exceptions of Pillow at damaged files, and silence for its warnings, which name no file."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import threading
import warnings
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar

from PIL import Image, ImageCms, _imaging

# Pillow's plugins parse files with plain Python, and any of these can come out. A list, not
# `Exception`, so that a bug of vitkit is not blamed on the image.
PILLOW_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RuntimeError,
    EOFError,
    MemoryError,
    BufferError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    ImageCms.PyCMSError,
)
"""All that Pillow raises at damaged files."""


class PillowKeptQuiet:
    """A context manager that silences Pillow's warnings and libtiff's error lines.

    It is shared by all threads and ends when the last of them leaves it.

    `warnings.catch_warnings` would not do: it swaps the filters of the whole process and puts the
    wrong ones back when threads overlap. Here one filter is added by the first and taken out by
    the last.
    """

    FILTER: ClassVar = ("ignore", None, Warning, re.compile(r"PIL\."), 0)
    lock: ClassVar = threading.Lock()
    inside: ClassVar[int] = 0
    tiff_handler: ClassVar[int | None] = None
    """The function that prints libtiff's errors, while it is replaced."""

    def __enter__(self) -> None:
        cls = type(self)
        with cls.lock:
            cls.inside += 1
            if cls.FILTER not in warnings.filters:
                warnings.filters.insert(0, cls.FILTER)  # type: ignore[attr-defined]
            set_handler = _tiff_error_handler()
            if cls.inside == 1 and set_handler:
                cls.tiff_handler = set_handler(None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        cls = type(self)
        with cls.lock:
            cls.inside -= 1
            if cls.inside == 0 and cls.FILTER in warnings.filters:
                warnings.filters.remove(cls.FILTER)  # type: ignore[attr-defined]
            set_handler = _tiff_error_handler()
            if cls.inside == 0 and set_handler:
                set_handler(cls.tiff_handler)


@functools.cache
def _tiff_error_handler() -> Callable[[int | None], int | None] | None:
    """Return `TIFFSetErrorHandler` of the libtiff that Pillow uses; None where it is not found.

    It takes the function that prints errors, None for none, and returns the one before.
    """
    try:
        set_handler = ctypes.CDLL(_imaging.__file__).TIFFSetErrorHandler
    except (AttributeError, OSError, TypeError):  # no libtiff, or no such way to it
        return None
    set_handler.argtypes = [ctypes.c_void_p]
    set_handler.restype = ctypes.c_void_p
    return set_handler
