"""A process without network, for running an exported model alone."""

from __future__ import annotations

import ctypes
import os
import sys

NEW_USERS = 0x10000000
NEW_NETWORK = 0x40000000
"""Flags of unshare(2): CLONE_NEWUSER and CLONE_NEWNET."""
EVENTS = (
    "socket.connect",
    "socket.sendto",
    "socket.sendmsg",
    "socket.getaddrinfo",
    "socket.gethostbyname",
    "socket.gethostbyaddr",
)
"""Audit events of Python's sockets for connections to other machines or processes."""


def cut_off_network() -> str:
    """Cut this process off from the network; it must be single-threaded.

    Linux gives it a network of its own with nothing in it, where that is allowed; in any case an
    audit hook refuses Python's sockets, but not those of native code.

    Returns:
        How it was done: `namespace` or `audit hook`.
    """
    sys.addaudithook(_refuse_sockets)
    return "namespace" if _own_network() else "audit hook"


def _refuse_sockets(event: str, arguments: tuple[object, ...]) -> None:
    if event in EVENTS:
        raise PermissionError(f"no network here: {event}")


def _own_network() -> bool:
    """Return True where Linux has moved the process into an empty network."""
    if not sys.platform.startswith("linux"):
        return False
    flags = NEW_NETWORK
    # other users need a user namespace for it, in which root would lose rights on files
    if os.geteuid() != 0:
        flags |= NEW_USERS
    try:
        return bool(ctypes.CDLL(None).unshare(flags) == 0)
    except (AttributeError, OSError):  # a C library without `unshare`
        return False
