"""Exit codes of the command line, with their meanings.

  0  DONE        the command did what it was asked to do; `--help` and `--version`, too
  1  FAULT       an error in vitkit itself: the message asks to report it
  2  USER_ERROR  something in the command, the settings or the data is wrong, or some images
                 could not be used; the message says how to mend it
  3  NOT_FINITE  the loss or the gradient of a training is not finite, or it diverged
130  Ctrl-C (SIGINT), 143 SIGTERM: 128 + the number of the signal that stopped the command; a
     training has saved its state before
"""

from __future__ import annotations

from vitkit.errors import Interrupted, NonFiniteError, UserError, VitkitError

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
