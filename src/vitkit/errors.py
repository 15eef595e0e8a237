"""The errors vitkit raises on purpose, each with an exit code and an HTTP status.

    VitkitError                    exit 1   HTTP 500   anything of ours
    ├── UserError                  exit 2   HTTP 400   the input, data or settings are wrong
    │   ├── SpecError                                  a model that cannot exist
    │   ├── ShapeError                      HTTP 422   a tensor of the wrong shape
    │   ├── SettingError                               a flag, key or value that means nothing
    │   ├── DataError                                  a data set that cannot be used
    │   ├── LoaderError                                a loader process was killed, or hangs
    │   ├── ImageError                      HTTP 422   an image that cannot be used; has `.reason`
    │   ├── CheckpointError                            a file that is not the checkpoint expected
    │   ├── OutputError                                a place that cannot be written
    │   ├── DeviceError                                a device that is not there
    │   └── MissingExtraError                          a feature whose extra is not installed
    ├── NonFiniteError             exit 3              training diverged
    └── Interrupted                exit 128 + signal   stopped by a signal, after saving

A message is one line: the file, key or number that is wrong, what was expected, how to mend it.
"""

from __future__ import annotations

import difflib
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

LONGEST = 2000
"""Characters of a message; a file may hold names of megabytes."""


class VitkitError(Exception):
    """Base of every error raised on purpose. `str(error)` is one line, fit for a terminal.

    >>> str(VitkitError("no such name: a\\nb\\x1b[2J"))
    'no such name: a b\\\\x1b[2J'
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str = "") -> None:
        super().__init__(_one_line(message))


def _one_line(text: str) -> str:
    """What a terminal shows as it stands: names in files may hold commands for it."""
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 500]} ... {text[-400:]}"
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else " " if c.isspace() else c.encode("unicode_escape").decode()
        for c in text
    )


@dataclass(frozen=True)
class WrongValue:
    """A value that a field cannot have, for messages that name the flag or the line.

    Attributes:
        field: its name, as a keyword.
        value: as it was given.
        expected: such as `must be 1 or more`.
    """

    field: str
    value: Any
    expected: str


class UserError(VitkitError):
    """The user's input, data or settings are wrong; the message says how to mend them.

    Attributes:
        wrong: the one value that is wrong, where it is about the value of a field.
    """

    exit_code = 2
    http_status = 400
    wrong: WrongValue | None = None

    @classmethod
    def about(cls, field: str, value: Any, expected: str, more: str = "") -> UserError:
        """Make an error about the value of a field: `depth = 0: must be 1 or more`."""
        made = cls(f"{field} = {value!r}: {expected}{more}")
        made.wrong = WrongValue(field, value, expected)
        return made


class SpecError(UserError):
    """A `ViTSpec` or `Preprocess` that no model or image could satisfy."""


class ShapeError(UserError):
    """A tensor whose shape does not fit what it is given to."""

    http_status = 422


class SettingError(UserError):
    """A setting that is unknown, out of range, or contradicts another."""


class DataError(UserError):
    """A data set that cannot be read or trained on."""


class LoaderError(UserError):
    """A process that reads the images was killed, or hangs."""


ImageReason = Literal[
    "empty", "missing", "not a file", "not an image", "format", "truncated", "damaged",
    "too large", "too long", "mode",
]  # fmt: skip


class ImageError(UserError):
    """One image that cannot be used.

    Attributes:
        name: the file or the index of the image.
        reason: one of a fixed list of words, for counting and for tests.
    """

    http_status = 422

    def __init__(self, name: str, reason: ImageReason, detail: str) -> None:
        super().__init__(f"{name}: {reason}: {detail}")
        self.name = name
        self.reason: ImageReason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, ImageReason, str]]:
        """Let the error cross from one process to another."""
        return (type(self), (self.name, self.reason, self.detail))


class CheckpointError(UserError):
    """A file that is not the checkpoint it should be."""


class OutputError(UserError):
    """A place that cannot be written; what stood there before is untouched."""


class DeviceError(UserError):
    """A device that was asked for and is not there."""


class MissingExtraError(UserError):
    """A feature whose optional dependencies are not installed."""


class NonFiniteError(VitkitError):
    """Training diverged: it met a NaN or an infinity, or its loss is far above a guess's."""

    exit_code = 3


class Interrupted(VitkitError):
    """A signal stopped the work after the state was saved.

    Attributes:
        signum: the signal's number; the exit code is 128 + signum.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum

    @property
    def name(self) -> str:
        """The signal's name, such as `SIGINT`."""
        return signal.Signals(self.signum).name


def exit_code(error: VitkitError) -> int:
    """The process exit code that stands for `error`."""
    return 128 + error.signum if isinstance(error, Interrupted) else error.exit_code


def did_you_mean(word: str, choices: Iterable[str], count: int = 1) -> str:
    """`"; did you mean 'width'?"`, or an empty string where nothing is near.

    Upper and lower case do not matter.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(word.lower(), list(by_lower), n=count, cutoff=0.5)
    near = [by_lower[name] for name in found]
    return f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else ""


def plural(number: int, what: str) -> str:
    """`1 epoch`, `1,000 epochs`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def nearest_parent(path: Path) -> str:
    """`"the nearest folder that exists is /a/b, with: c, d"`, for messages about a missing path."""
    parent = next((p for p in path.absolute().parents if _is_folder(p)), Path("/"))
    try:
        entries = sorted(p.name + ("/" if p.is_dir() else "") for p in parent.iterdir())
    except PermissionError:
        return f"the nearest folder that exists is {parent}, which cannot be listed"
    shown = ", ".join(entries[:8]) + (f" and {len(entries) - 8} more" if len(entries) > 8 else "")
    return f"the nearest folder that exists is {parent}, with: {shown or 'nothing in it'}"


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except PermissionError:
        return False
