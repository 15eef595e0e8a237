"""The errors vitkit raises on purpose, each with an exit code and an HTTP status.

    VitkitError                    exit 1   HTTP 500   anything of ours
    ├── UserError                  exit 2   HTTP 400   the input, data or settings are wrong
    │   ├── SpecError                                  a model that cannot exist
    │   ├── ShapeError                      HTTP 422   a tensor of the wrong shape
    │   ├── SettingError                               an unknown or impossible setting
    │   ├── DataError                                  a dataset that cannot be used
    │   ├── LoaderError                                a loader process was killed, or hangs
    │   ├── ImageError                      HTTP 422   an image that cannot be used; has `.reason`
    │   ├── CheckpointError                            a file that is not the checkpoint expected
    │   ├── OutputError                                a path that cannot be written
    │   ├── DeviceError                                a device that does not exist here
    │   ├── MissingExtraError                          a feature whose extra is not installed
    │   └── UserCodeError                              a function of the user that raised
    ├── NonFiniteError             exit 3              training diverged
    └── Interrupted                exit 128 + signal   stopped by a signal, after saving

A message is one line: the file, key or number that is wrong, what was expected, how to mend it.
`errors.py` says what each code means.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

LONGEST_MESSAGE = 2000
"""Characters of a message; a file may hold names of megabytes."""


class VitkitError(Exception):
    """The base of every error raised on purpose. `str(error)` is one line, safe for a terminal.

    >>> str(VitkitError("no such name: a\\nb\\x1b[2J"))
    'no such name: a b\\\\x1b[2J'
    """

    exit_code: ClassVar[int] = 1
    http_status: ClassVar[int] = 500

    def __init__(self, message: str = "") -> None:
        super().__init__(_one_line(message))


def _one_line(text: str) -> str:
    """Shorten a message and escape control characters: names in files may hold any text."""
    if len(text) > LONGEST_MESSAGE:
        # the end is kept, as it names the remedy
        text = f"{text[: LONGEST_MESSAGE - 500]} ... {text[-400:]}"
    if text.isprintable():
        return text
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    if character.isspace():
        return " "
    return character.encode("unicode_escape").decode()


@dataclass(frozen=True)
class WrongValue:
    """A value that a field cannot have, for messages that name the flag or the line.

    Attributes:
        field: the field's name, as a keyword.
        value: the wrong value.
        expected: the expectation, such as `must be 1 or more`.
    """

    field: str
    value: Any
    expected: str


class UserError(VitkitError):
    """The user's input, data or settings are wrong; the message says how to mend them.

    Attributes:
        wrong: the field and its wrong value, if the error is about one.
    """

    exit_code = 2
    http_status = 400
    wrong: WrongValue | None = None

    @classmethod
    def about(cls, field: str, value: Any, expected: str, more: str = "") -> UserError:
        """Return an error about the value of a field: `depth = 0: must be 1 or more`.

        Args:
            field: its name, as a keyword.
            value: the wrong value.
            expected: follows the value, such as `must be 1 or more`.
            more: end of the message; left out where the message names a flag.
        """
        error = cls(f"{field} = {value!r}: {expected}{more}")
        # Beside the text, as the command line names the flag in place of the field.
        error.wrong = WrongValue(field, value, expected)
        return error


class SpecError(UserError):
    """A `ViTSpec` or `Preprocess` that no model or image could satisfy."""


class ShapeError(UserError):
    """A tensor of the wrong shape."""

    http_status = 422


class SettingError(UserError):
    """A setting that is unknown, out of range, or contradicts another."""


def check_type(value: object, kind: type | tuple[type, ...], function: str, expected: str) -> None:
    """Raise `SettingError` for an argument of another type than a function takes.

    Args:
        value: the argument.
        kind: the type that is expected.
        function: its name.
        expected: what it takes, in words.
    """
    if not isinstance(value, kind):
        raise SettingError(f"{function} takes {expected}, not a {type(value).__name__}")


MODEL = "a model, such as vitkit.load(path).model"
"""The expected argument of functions of models, for messages."""


class DataError(UserError):
    """A dataset that cannot be read or trained on."""


class LoaderError(UserError):
    """A loader process that was killed, or hangs."""


ImageReason = Literal[
    "empty",
    "missing",
    "not a file",
    "not an image",
    "format",
    "truncated",
    "damaged",
    "too large",
    "too long",
    "mode",
]


class ImageError(UserError):
    """One image that cannot be used.

    Attributes:
        name: the file or the index of the image.
        reason: one of `ImageReason`, for counting and for tests.
        detail: what was expected and what was found.
    """

    http_status = 422

    def __init__(self, name: str, reason: ImageReason, detail: str) -> None:
        super().__init__(f"{name}: {reason}: {detail}")
        self.name = name
        self.reason: ImageReason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[ImageError], tuple[str, ImageReason, str]]:
        """Support pickling: the error is raised in a loader process and sent to its parent."""
        return (type(self), (self.name, self.reason, self.detail))


class CheckpointError(UserError):
    """A checkpoint that cannot be read, or has unexpected contents."""


class OutputError(UserError):
    """A path that cannot be written; an existing file is untouched."""


class DeviceError(UserError):
    """A device that does not exist on this machine."""


class MissingExtraError(UserError):
    """A feature whose optional dependencies are not installed."""


class UserCodeError(UserError):
    """User code that raised an error, or returned an unexpected value.

    The message has its name; `__cause__` is the error itself, with its traceback.
    """

    @classmethod
    def raised_by(cls, what: str, error: Exception, where: str) -> UserCodeError:
        """Return the error on what raised: `the callback Mine raised KeyError in after_step: ...`.

        Args:
            what: the function or the object.
            error: what it raised.
            where: at what, such as `in after_step`.

        Raises:
            Interrupted: a signal came while the user's code ran; it is not that code's error.
        """
        if isinstance(error, Interrupted):
            raise error
        # In one line: the traceback is that of `__cause__`, which `--debug` shows.
        return cls(f"{what} raised {type(error).__name__} {where}: {error}")


class NonFiniteError(VitkitError):
    """Training that diverged: NaN, infinity, or a loss far above that of random guessing."""

    exit_code = 3


class Interrupted(VitkitError):
    """Work that a signal stopped, after the state was saved.

    Attributes:
        signum: the signal's number; the exit code is 128 + signum.
    """

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.signum = signum

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int, str]]:
        """Support pickling: exceptions are rebuilt from `args`, which has the message alone."""
        return (type(self), (self.signum, str(self)))

    @property
    def name(self) -> str:
        """The signal's name, such as `SIGINT`."""
        return signal.Signals(self.signum).name


# Exit codes of the command line, with their meanings.
#
#   0  DONE        the command did what it was asked to do; `--help` and `--version`, too
#   1  FAULT       an error in vitkit itself: the message asks to report it
#   2  USER_ERROR  something in the command, the settings or the data is wrong, or some images
#                  could not be used; the message says how to mend it
#   3  NOT_FINITE  the loss or the gradient of a training is not finite, or it diverged
# 130  Ctrl-C (SIGINT), 143 SIGTERM: 128 + the number of the signal that stopped the command; a
#      training has saved its state before

DONE = 0
FAULT = VitkitError.exit_code
USER_ERROR = UserError.exit_code
NOT_FINITE = NonFiniteError.exit_code


def of_signal(signum: int) -> int:
    """Return the code of a process that a signal ended, as a shell reports it.

    >>> of_signal(2), of_signal(15)
    (130, 143)
    """
    return 128 + signum


def exit_code(error: VitkitError) -> int:
    """Return the exit code of a process that ends by `error`."""
    if isinstance(error, Interrupted):
        return of_signal(error.signum)
    return error.exit_code
