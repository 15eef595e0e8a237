"""Supervision of loader processes: notice those that are gone or hang while a batch is awaited."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from vitkit.data.datasets.split import LONGEST_PAUSE
from vitkit.errors import LoaderError

Item = TypeVar("Item")
LOOK_EVERY = 1.0
"""Seconds between two looks at the processes, while a batch is awaited."""
LOOKS = 8
"""Checks in a row without a sign of life after which a process counts as hanging."""
LOOKS_LONG = int(LONGEST_PAUSE) + 30
"""The same for a process inside a read from a disk, or that reads from a server.

Under load a disk may need half a minute for one read, a network drive more; a server may ask to
wait.
"""
EXIT_GRACE = 1.0
"""Seconds that a failing process gets to exit, so that its exit code is known."""
IN_DISK = re.compile(r"^State:\tD", re.MULTILINE)
RUNNING = re.compile(r"^State:\tR", re.MULTILINE)
SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:.*", re.MULTILINE)
"""In /proc/PID/task/TID/status: how often a thread has stopped running."""


def watched(
    arriving: Iterator[Item],
    *,
    contents: Callable[[int], str],
    remote: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[Item]:
    """Hand on what loader processes make, and raise where one of them is gone or hangs.

    A process hangs when it has not run at all for 8 s while a batch is awaited; for 150 s where
    it is inside a read from a disk, or the images come over the network. A process that reads
    slowly runs for a moment for every piece that arrives, one that waits for a processor counts as
    running, and an idle one wakes every 5 s. Looks are counted, not seconds, so that a run that is
    suspended as a whole may go on. Only Linux reports how often a process has run; elsewhere only
    a process that is gone is noticed.

    Args:
        arriving: the iterator of a `DataLoader` with processes and `timeout=LOOK_EVERY`.
        contents: called with the number of a batch, counted from 0; its name, for messages.
        remote: True if the images come over the network.
        stopped: called at every look; True ends the wait.

    Raises:
        LoaderError: a process is gone or hangs, or `stopped`; all of them are ended.
    """
    processes = _take_over_supervision(arriving)
    # A thread, since the main thread blocks inside torch while a process hangs.
    watch = _Watch(processes, LOOKS_LONG if remote else LOOKS, stopped)
    watch.start()
    number = 0
    try:
        while True:
            watch.awaited = number
            try:
                item = next(arriving)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                timed_out = str(error).startswith("DataLoader timed out")
                within = 0.0 if timed_out else EXIT_GRACE
                reason = watch.reason or _describe_death(processes, within)
                if reason is not None:
                    message = f"{reason}; the run waited for {contents(number)}"
                    raise LoaderError(message) from None
                if timed_out:  # the batch is only late: keep waiting
                    continue
                raise
            watch.awaited = None
            number += 1
            yield item
    except LoaderError:
        _kill(processes)
        for process in processes:
            process.join(EXIT_GRACE)
        raise
    finally:
        watch.end()
        del arriving  # a traceback would keep the batch alive with this frame


class _Watch(threading.Thread):
    """A thread that looks at processes while a batch is awaited, and kills them when one hangs.

    The main thread may be inside a read from a process that is stopped, and comes out of it only
    when that process is gone.

    Attributes:
        awaited: the number of the batch that is awaited, or `None`.
        reason: why the processes were killed; `None` where they were not.
    """

    def __init__(
        self, processes: Sequence[BaseProcess], most: int, stopped: Callable[[], bool]
    ) -> None:
        super().__init__(name="loader watch", daemon=True)
        self._processes = processes
        self._most = most
        self._stopped = stopped
        self._over = threading.Event()
        self.awaited: int | None = None
        self.reason: str | None = None

    def run(self) -> None:
        """Look until `end` is called."""
        awaited: int | None = None
        last: dict[BaseProcess, tuple[list[str], int]] = {}
        while not self._over.wait(LOOK_EVERY):
            if self.awaited is None or self.awaited != awaited:
                # Another batch than at the last look: everything works, count anew.
                awaited = self.awaited
                last = {}
                continue
            for process in self._processes:
                self._look_at(process, last)
            # The main thread cannot check this itself while it waits.
            if self._stopped():
                self.reason = self.reason or "stopped"
            if self.reason is not None:
                _kill(self._processes)
                return

    def _look_at(
        self, process: BaseProcess, last: dict[BaseProcess, tuple[list[str], int]]
    ) -> None:
        switches, in_disk = _activity(process.pid)
        switches_before, silent = last.get(process, ([], 0))
        silent += 1
        # Without any lines the state of the process is unknown, which counts as running.
        if not switches or switches != switches_before:
            silent = 0
        last[process] = (switches, silent)
        if silent >= (LOOKS_LONG if in_disk else self._most):
            self.reason = (
                f"loader process {process.pid} has not run for {silent * LOOK_EVERY:g} s; check "
                "that the disk or network drive still responds"
            )

    def end(self) -> None:
        """Stop looking."""
        self._over.set()
        self.join()


def _activity(pid: int | None) -> tuple[list[str], bool]:
    """Return lines that change when any thread of a process runs, and if one waits for a disk.

    No lines where a thread runs just now, waits for a processor, or on a system without /proc.
    """
    switches: list[str] = []
    in_disk = False
    # The main thread of a worker may sleep while another one, such as a reader's, still works.
    for thread in sorted(Path(f"/proc/{pid}/task").glob("*/status")):
        try:
            status = thread.read_text()
        except OSError:  # the thread has ended in between: so it has run
            return [], False
        if RUNNING.search(status):  # it runs, or waits for a processor: it is alive
            return [], False
        in_disk |= IN_DISK.search(status) is not None
        switches += SWITCHES.findall(status)
    return switches, in_disk


def _describe_death(processes: Sequence[BaseProcess], within: float) -> str | None:
    """Describe a process that is gone, waiting `within` seconds for one to go; `None` for none."""
    ended = wait([process.sentinel for process in processes], within)
    for process in processes:
        if process.sentinel in ended:
            process.join()  # its files are closed a moment before its exit code is known
            code = process.exitcode or 0
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return f"loader process {process.pid} {how}; if memory ran out, pass fewer --workers"
    return None


def _take_over_supervision(arriving: Any) -> Sequence[BaseProcess]:
    """Return the processes of torch's iterator, and keep torch from watching them.

    torch raises from a signal handler when one of its processes ends: that could be in the middle
    of an optimizer step, with half of the weights changed.
    """
    # Both lines undo what torch's constructor did; its shutdown checks the second one.
    torch._C._remove_worker_pids(id(arriving))
    arriving._worker_pids_set = False
    processes: Sequence[BaseProcess] = arriving._workers
    return processes


def _kill(processes: Sequence[BaseProcess]) -> None:
    """Kill processes: a stopped one ignores any other signal, and would be awaited at exit."""
    for process in processes:
        process.kill()
