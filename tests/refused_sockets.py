"""Kill this process as soon as it asks the kernel for an internet socket (Linux, seccomp).

`connect` takes a pointer, which a filter cannot follow; `socket` takes the family of addresses as a
number. Sockets of the local machine stay allowed. Source: seccomp(2) and <linux/filter.h>.
"""

import ctypes
import platform
import socket
import struct

SOCKET_CALLS = {"x86_64": 41, "aarch64": 198}
"""Number of the system call `socket`."""
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
KILL_PROCESS, ALLOW = 0x80000000, 0x7FFF0000
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
"""Codes of BPF: load a 32-bit word, jump if equal, return."""
NUMBER, FIRST_ARGUMENT = 0, 16
"""Offsets in `seccomp_data`."""


def instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def refuse_sockets() -> None:
    """From now on, a socket of IPv4 or IPv6 ends the process by SIGSYS; children inherit that."""
    program = b"".join([
        instruction(LOAD, NUMBER),
        instruction(EQUAL, SOCKET_CALLS[platform.machine()], 0, 4),  # another call: allow
        instruction(LOAD, FIRST_ARGUMENT),
        instruction(EQUAL, socket.AF_INET, 1, 0),
        instruction(EQUAL, socket.AF_INET6, 0, 1),
        instruction(RETURN, KILL_PROCESS),
        instruction(RETURN, ALLOW),
    ])  # fmt: skip
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))

    bpf = Program(len(program) // 8, ctypes.addressof(buffer))
    arguments = [ctypes.c_ulong(value) for value in (1, 0, 0, 0)]
    assert libc.prctl(PR_SET_NO_NEW_PRIVS, *arguments) == 0, "no_new_privs"
    assert libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(bpf), 0, 0) == 0, "seccomp"
