"""Process-wide settings, the signals that stop a run, and functions in a child process.

The settings are cores, memory, threads and fast imports. The command line applies them to itself
and to the processes that it starts, and torch's engines keep freed memory. A script that imports
vitkit decides for itself; `docs/benchmarks.md` lists the settings.
"""

import functools
import gc
import math
import os
import signal
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from vitkit.errors import Interrupted, SettingError, VitkitError

Result = TypeVar("Result")

PROCESSES_PER_CORE = 16
"""The most processes for each core: each has 200 MB or more of its own, also while it waits."""
SPINCOUNT = "1000"
"""Iterations that a thread of GNU OpenMP (libgomp) spins before it sleeps.

The default is 300,000 or more. Beside another busy program the threads of one step then wait for
each other while they occupy the cores that they wait for. Fewer iterations help a busy machine and
cost a free one time, in small models most: docs/benchmarks.md has the figures of
`benchmarks/busy.py`.
"""
WAIT_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Environment variables with which a user sets how threads wait."""
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Numbers of `mallopt`'s parameters, from glibc's malloc.h."""
KEPT_BYTES = 2**30
"""Free memory at the end of the heap that is kept, and the size from which a block is returned."""
OLD_KEPT_BYTES = 2**25
"""The largest such block for older versions of glibc."""


def shorten_spinning(environment: MutableMapping[str, str]) -> None:
    """Let waiting OpenMP threads sleep early; call it before torch is imported.

    Args:
        environment: changed in place, unless it has one of `WAIT_VARIABLES`: the user's choice.
    """
    if not any(name in environment for name in WAIT_VARIABLES):
        environment["GOMP_SPINCOUNT"] = SPINCOUNT


def child_environment() -> dict[str, str]:
    """Return the variables of a child process of Python, which finds this same vitkit.

    Its waiting threads leave the cores to others, unless the user has chosen otherwise.
    """
    variables = dict(os.environ)
    shorten_spinning(variables)
    root = str(Path(__file__).parents[1])
    if root != sysconfig.get_path("purelib"):  # an installed vitkit is found anyway
        known = variables.get("PYTHONPATH")
        variables["PYTHONPATH"] = root if not known else f"{root}{os.pathsep}{known}"
    return variables


def available_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use, 1 or more.

    A container or a job of a cluster often has fewer than the machine: as it may run on some cores
    alone (affinity), or gets a share of the time of all (the CPU quota of a control group; sources:
    "Control Group v2" and, for v1, "CFS Bandwidth Control", documentation of Linux).

    Args:
        root: root of the file system with /proc and /sys.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    lines = list[str]()
    with suppress(OSError):  # not Linux, or /proc is hidden
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    for line in lines:  # 0::/job (v2), or 4:cpu,cpuacct:/job (v1)
        _, controllers, name = line.split(":", 2)
        top, files = root / "sys/fs/cgroup", ["cpu.max"]
        if "cpu" in controllers.split(","):
            top, files = top / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        group = top / name.strip("/")
        # a limit of a group applies to all groups in it
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # no limit is the word `max`, or -1
                quota, period = " ".join((folder / file).read_text() for file in files).split()
                if int(quota) > 0:
                    cores = min(cores, math.ceil(int(quota) / int(period)))
    return cores


def check_processes(field: str, number: int) -> None:
    """Raise SettingError for more processes than `PROCESSES_PER_CORE` for each core."""
    most = PROCESSES_PER_CORE * available_cores()
    if number > most:
        raise SettingError.about(field, number, f"must be {most} or fewer on these cores")


@functools.cache
def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next call, instead of returning it to the system.

    A returned page is filled with zeros by the system when it is used again: 50,000 of 4 kB in each
    forward pass of 8 images by a ViT-B/16. The process may need more memory for it, above all while
    models are converted, so it is called for torch alone. Do nothing with another C library, or if
    the user has set one of glibc's `MALLOC_` variables. Source: mallopt(3).
    """
    # imported here: no other command waits for them
    import ctypes
    import platform

    if platform.libc_ver()[0] != "glibc":
        return
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = ctypes.CDLL(None).mallopt
    # a freed block below this size stays in the heap, and the heap keeps its end
    if not mallopt(M_MMAP_THRESHOLD, KEPT_BYTES):
        mallopt(M_MMAP_THRESHOLD, OLD_KEPT_BYTES)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


@contextmanager
def uncollected_imports() -> Iterator[None]:
    """Import torch without garbage collections, which take a tenth of the time of a short command.

    They go through all new objects again and again, and modules are never garbage. What is there at
    the end is left out of later collections, too. Do nothing if torch is imported already.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


# Signals that stop a run, as a flag or as an exception. Phases without intermediate state are
# interrupted immediately, by `Interrupted`.

SIGNAL_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1")
"""Signals that stop a run, where the system has them.

SIGINT: Ctrl-C; SIGTERM: the end of a job; SIGHUP: the terminal or the connection is closed;
SIGUSR1: the warning of Slurm before a time limit.
"""


@dataclass
class StopFlag:
    """A request to stop.

    Attributes:
        signum: the signal that arrived, or `None`.
    """

    signum: int | None = None


@contextmanager
def _signals_handled_by(handle: Callable[[int], None]) -> Iterator[dict[int, Any]]:
    """Call a function on a signal while the block runs; yields the handlers of before.

    Outside the main thread nothing is caught, because Python does not allow it there.
    """
    before = dict[int, Any]()
    if threading.current_thread() is threading.main_thread():
        for name in SIGNAL_NAMES:
            signum = getattr(signal, name, None)
            # a hang-up that is ignored already, as by `nohup`, stays ignored
            if signum is not None and (
                name != "SIGHUP" or signal.getsignal(signum) is not signal.SIG_IGN
            ):
                before[signum] = signal.signal(signum, lambda signum, frame: handle(signum))
    try:
        yield before
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _raise_interrupted(signum: int, how: str, hint: Callable[[], str] | None) -> NoReturn:
    end = "" if hint is None else f"; {hint()}"
    raise Interrupted(signum, f"stopped {how}{signal.Signals(signum).name}{end}")


@contextmanager
def stop_on_signal(hint: Callable[[], str] | None = None) -> Iterator[StopFlag]:
    """Catch signals while the block runs; a second one raises `Interrupted` at once.

    A signal that the block did not handle is passed to the handler that was installed before.

    Args:
        hint: returns a line on what can be resumed, for the error.
    """
    flag = StopFlag()

    def handle(signum: int) -> None:
        if flag.signum is not None:
            _raise_interrupted(signum, "at once by a second signal, ", hint)
        flag.signum = signum

    with _signals_handled_by(handle) as before:
        yield flag
    # The block ended without an error: the signal came too late, or there are no steps.
    if flag.signum is not None:
        outer = before.get(flag.signum)
        if callable(outer) and outer is not signal.default_int_handler:
            outer(flag.signum, None)


@contextmanager
def raise_on_signal(hint: Callable[[], str] | None = None) -> Iterator[None]:
    """Raise `Interrupted` on a signal in the block, except inside a `stop_on_signal`.

    Args:
        hint: returns a line on what can be resumed, for the error.
    """
    with _signals_handled_by(lambda signum: _raise_interrupted(signum, "by ", hint)):
        yield


# A function in a child process, whose crash or hang does no harm here.

LONGEST_REASON = 200
"""Characters of a reason; errors of runtimes can fill pages."""
CAUSES = {
    "SIGKILL": ", perhaps as the memory was full",
    "SIGILL": ": this CPU lacks instructions that it needs",
}
"""Signal -> what usually sends it."""


class ChildError(Exception):
    """A child process has returned nothing; the message is the reason, on one line."""


class NotSentError(ChildError):
    """Arguments that cannot be pickled."""


def run_in_child(function: Callable[..., Result], *arguments: Any, seconds: float) -> Result:
    """Call a function in a fresh Python process and return what it returned.

    It may print, crash by a signal or hang: then it is killed, with all that it has started.

    Args:
        function: one of a module, which the child imports.
        *arguments: values that can be pickled, as the result must be, too.
        seconds: time that it may take.

    Raises:
        ChildError: it raised an error, ended, or took longer; `NotSentError` where an argument
            cannot be pickled.
    """
    # imported here: no other command waits for them
    import pickle
    import subprocess

    # -P: without the working folder, where a file onnx.py of the user's would be imported
    command = [sys.executable, "-P", "-c", "from vitkit.process import answer; answer()"]
    pipe = subprocess.PIPE
    try:
        request = pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise NotSentError(f"it cannot be sent to another process: {error}") from None
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=child_environment(),
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise ChildError(f"no process can be started: {error.strerror}") from None
    try:
        with raise_on_signal():  # which ends the child, and what the caller opened
            output, messages = process.communicate(request, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise ChildError(f"no answer in {seconds:.3g} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        raise ChildError(f"ended by {name}{CAUSES.get(name, '')}")
    if process.returncode > 0 or not output:
        last = (messages.decode(errors="replace").strip() or "no message").splitlines()[-1]
        raise ChildError(f"ended with code {process.returncode}: {last[:LONGEST_REASON]}")
    result, reason = pickle.loads(output)
    if reason:
        raise ChildError(reason)
    return result


def answer() -> None:
    """Call the function that `run_in_child` has written to stdin, and write its result to stdout.

    This is the child's part.
    """
    import pickle

    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # runtimes print where only the answer may stand
        result, reason = None, ""
        try:
            function, arguments = pickle.load(sys.stdin.buffer)
            result = function(*arguments)
        except VitkitError as error:
            reason = str(error)
        except Exception as error:  # noqa: BLE001 - a runtime raises anything
            first = str(error).strip().partition("\n")[0]
            reason = f"{type(error).__name__}: {first[:LONGEST_REASON]}"
        pickle.dump((result, reason), answers)
