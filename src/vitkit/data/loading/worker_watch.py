"""Loader processes, watched while a batch is waited for: are they there, and do they still work?"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from vitkit.data.sources.remote_shards import LONGEST_WAIT
from vitkit.errors import LoaderError

T = TypeVar("T")
LOOK_EVERY = 1.0
"""Seconds between two looks at the processes, while a batch is waited for."""
LOOKS = 8
"""Looks in a row without a sign of life, after which a process hangs."""
LOOKS_LONG = int(LONGEST_WAIT) + 30
"""The same of a process that is inside of a read from a disk, or that reads from a server, which
may ask it to wait. Under load a disk may need half a minute for one read, a network's more."""
IN_DISK = re.compile(r"^State:\tD", re.MULTILINE)
RUNNING = re.compile(r"^State:\tR", re.MULTILINE)
SWITCHES = re.compile(r"^(?:non)?voluntary_ctxt_switches:.*", re.MULTILINE)
"""Of /proc/PID/task/TID/status: how often a thread has stopped running."""


def watched(
    arriving: Iterator[T],
    *,
    contents: Callable[[int], str],
    remote: bool = False,
    stopped: Callable[[], bool] = lambda: False,
) -> Iterator[T]:
    """Hand on what loader processes make, and raise where one of them is gone or hangs.

    A process hangs when it has not run at all for 8 s while a batch is waited for; for 150 s where
    it is inside of a read from a disk, or the images come over the network. A process that reads
    slowly runs for a moment for every piece that arrives, one that waits for a processor counts as
    running, and an idle one wakes every 5 s. Looks are counted, not seconds, so that a run that is
    suspended as a whole may go on. Only Linux tells how often a process has run; elsewhere only a
    process that is gone is noticed.

    Args:
        arriving: the iterator of a `DataLoader` with processes and `timeout=LOOK_EVERY`.
        contents: what the batch of a number, counted from 0, holds; for messages.
        remote: whether the images come over the network.
        stopped: asked at every look; where it is true, nobody wants the batch any more.

    Raises:
        LoaderError: a process is gone or hangs, or `stopped`; all of them are ended.
    """
    processes = _taken_over(arriving)
    watch = _Watch(processes, LOOKS_LONG if remote else LOOKS, stopped)
    watch.start()
    number = 0
    try:
        while True:
            watch.awaited = number
            try:
                made = next(arriving)
            except StopIteration:
                return
            except (RuntimeError, OSError, EOFError) as error:
                late = str(error).startswith("DataLoader timed out")
                said = watch.found or _death(processes, within=0.0 if late else 1.0)
                if said is not None:
                    said = f"{said}; the run waited for {contents(number)}"
                    raise LoaderError(said) from None
                if late:
                    continue
                raise
            watch.awaited = None
            number += 1
            yield made
    except LoaderError:
        _kill(processes)
        for one in processes:
            one.join(1.0)
        raise
    finally:
        watch.end()
        del arriving  # a traceback would keep it with this frame


class _Watch(threading.Thread):
    """Looks at processes while a batch is waited for, and kills them where one of them hangs.

    Whoever waits may be inside a read from a process that is stopped, and comes out of it only when
    that process is gone.

    Attributes:
        awaited: the number of the batch that is waited for, or `None`.
        found: why the processes were killed; `None` where they were not.
    """

    def __init__(
        self, processes: Sequence[BaseProcess], most: int, stopped: Callable[[], bool]
    ) -> None:
        super().__init__(name="loader watch", daemon=True)
        self._processes, self._most, self._stopped = processes, most, stopped
        self._over = threading.Event()
        self.awaited: int | None = None
        self.found: str | None = None

    def run(self) -> None:
        """Look until the end."""
        awaited: int | None = None
        last: dict[BaseProcess, tuple[list[str], int]] = {}
        while not self._over.wait(LOOK_EVERY):
            if self.awaited is None or self.awaited != awaited:
                awaited, last = self.awaited, {}
                continue
            for one in self._processes:
                (now, in_disk), (before, silent) = _life(one.pid), last.get(one, ([], 0))
                silent = silent + 1 if now and now == before else 0
                last[one] = now, silent
                if silent >= (LOOKS_LONG if in_disk else self._most):
                    self.found = (
                        f"loader process {one.pid} has not run for {silent * LOOK_EVERY:g} s: "
                        f"is the disk or the network drive still there?"
                    )
            if self._stopped():
                self.found = self.found or "stopped"
            if self.found is not None:
                _kill(self._processes)
                return

    def end(self) -> None:
        """Look no more."""
        self._over.set()
        self.join()


def _life(pid: int | None) -> tuple[list[str], bool]:
    """What changes when any thread of a process runs, and whether one waits for a disk.

    There is nothing where a thread runs just now, waits for a processor, or where nobody tells.
    """
    found, in_disk = [], False
    for thread in sorted(Path(f"/proc/{pid}/task").glob("*/status")):
        try:
            status = thread.read_text()
        except OSError:  # the thread has ended in between: so it has run
            return [], False
        if RUNNING.search(status):
            return [], False
        in_disk |= IN_DISK.search(status) is not None
        found += SWITCHES.findall(status)
    return found, in_disk


def _death(processes: Sequence[BaseProcess], within: float) -> str | None:
    """Say which process is gone, waiting `within` seconds for one to go; `None` for none."""
    ended = wait([one.sentinel for one in processes], within)
    for one in processes:
        if one.sentinel in ended:
            one.join()  # its files are closed a moment before its exit code is known
            code = one.exitcode or 0
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return f"loader process {one.pid} {how}: where memory has run out, pass fewer --workers"
    return None


def _taken_over(arriving: Any) -> Sequence[BaseProcess]:
    """The processes of torch's iterator, which now nobody but us watches.

    torch raises from a signal handler when one of its processes ends: that could be in the middle
    of an optimizer step, with half of the weights changed.
    """
    torch._C._remove_worker_pids(id(arriving))
    arriving._worker_pids_set = False
    processes: Sequence[BaseProcess] = arriving._workers
    return processes


def _kill(processes: Sequence[BaseProcess]) -> None:
    """End them: a stopped process hears nothing else, and would be waited for at exit."""
    for one in processes:
        one.kill()
