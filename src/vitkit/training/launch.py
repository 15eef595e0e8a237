"""`--devices N`: launch N local processes of a run, and what each of them does.

Each process is `python -m vitkit.training FOLDER` with the environment of torchrun. The folder has
the settings, the last step of each process and, when a process has ended, its result or its error.
If one of them ends abnormally, the others are stopped and the message names its rank.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stub

from vitkit.distributed import (
    EXCHANGE,
    RUN_FILE,
    STEP_RECORD,
    STEPS_FILE,
    LostContact,
    error_from_json,
    error_to_json,
)
from vitkit.errors import DONE, FAULT, Interrupted, SettingError, VitkitError, exit_code, of_signal
from vitkit.io.atomic import write_bytes
from vitkit.process import available_cores, shorten_spinning
from vitkit.training.config.passed_objects import refuse_passed
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.interrupts import StopFlag, stop_on_signal
from vitkit.training.run_folder import RunFolder

GRACE = 5.0
"""Seconds that the other processes have to end by themselves after one has failed."""
POLL_INTERVAL = 0.05
"""Seconds between two checks of the processes."""


@dataclass
class Rank:
    """One launched process.

    Attributes:
        number: its rank.
        process: the process; it leads a process group of its own.
        report: file to which it writes its result or its error.
        stopped: time when it was last seen stopped, and the signal; `None` while it runs.
    """

    number: int
    process: subprocess.Popen[bytes]
    report: Path
    stopped: tuple[float, int] | None = None

    @property
    def document(self) -> dict[str, Any]:
        """Its result or its error; empty if it wrote neither."""
        try:
            document: dict[str, Any] = json.loads(self.report.read_bytes())
        except (OSError, ValueError):
            return {}
        return document

    def update_stopped(self) -> None:
        """Check whether a signal has stopped it or let it continue."""
        if self.process.poll() is not None or not hasattr(os, "waitid"):
            return
        options = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        while True:
            change = os.waitid(os.P_PID, self.process.pid, options)
            if change is None:
                return
            if change.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED):
                self.stopped = (time.monotonic(), change.si_status)
            else:
                self.stopped = None

    def kill(self) -> None:
        """Kill it and the processes of its loader; the group may outlive its leader."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def launch(config: TrainConfig, callbacks: Sequence[Callable[[], object]] = ()) -> dict[str, Any]:
    """Start `config.devices` processes, wait for all, and return the result of the first one.

    Args:
        config: every setting.
        callbacks: classes or functions that the processes import by name, with the module path of
            this process.

    Raises:
        SettingError: a callback that cannot be imported by name.
        VitkitError: the error of a process; or a process was lost, with its rank, the signal and
            its last step.
    """
    refuse_passed(config)
    names = [_import_name(callback) for callback in callbacks]
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="vitkit-"))
        folder = Path(name)
        stop = stack.enter_context(stop_on_signal(lambda: _resume_hint(folder)))
        request = {
            "config": config.to_json(),
            "callbacks": names,
            "path": list(map(str, sys.path)),
        }
        (folder / REQUEST).write_text(json.dumps(request))
        # Port 0: the system chooses a free one.
        store = TCPStore("127.0.0.1", 0, config.devices, is_master=True, wait_for_workers=False)
        ranks: list[Rank] = []
        try:
            for number in range(config.devices):
                process = subprocess.Popen(
                    [sys.executable, "-m", "vitkit.training", name],
                    env=_environment(number, config.devices, store.port, name),
                    stdin=subprocess.PIPE,  # closes with this process, however it ends
                    process_group=0,  # Ctrl-C reaches this process only, and is forwarded once
                )
                ranks.append(Rank(number, process, _report_file(folder, number)))
            _supervise(ranks, stop, config.timeout)
            return _result(ranks, stop, folder)
        finally:  # whatever happened, no process is left behind
            for rank in ranks:
                rank.kill()
                assert rank.process.stdin is not None
                rank.process.stdin.close()


def _import_name(callback: Callable[[], object]) -> str:
    """Return `module:qualname`, by which another process imports it. Raises `SettingError`."""
    name = f"{callback.__module__}:{callback.__qualname__}"
    imported = None
    if callback.__module__ != "__main__":  # in another process, `__main__` is another module
        with suppress(ImportError, AttributeError, ValueError):
            imported = resolve_name(name)
    if imported is not callback:
        raise SettingError(
            f"--devices starts processes that import the callbacks, and {name} cannot be "
            f"imported; define {callback.__name__} at the top level of a module, or start with "
            "torchrun"
        )
    return name


def _environment(rank: int, size: int, port: int, exchange: str) -> dict[str, str]:
    """Return the environment variables of one process, as torchrun sets them."""
    environment = dict(os.environ)
    shorten_spinning(environment)
    # Otherwise every process would use all cores.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // size)))
    if sys.platform == "linux":
        # All processes are local; otherwise gloo looks up the host name, which may fail.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is in this process, not in rank 0
        EXCHANGE: exchange,
    }
    return environment


def _supervise(ranks: list[Rank], stop: StopFlag, timeout: float) -> None:
    """Wait until all processes have ended, or until `GRACE` seconds after one has failed."""
    deadline: float | None = None
    forwarded = False
    while any(rank.process.poll() is None for rank in ranks):
        now = time.monotonic()
        if deadline is not None and now > deadline:
            return  # the caller kills the remaining ones
        if stop.signum is not None and not forwarded:
            forwarded = True
            for rank in ranks:
                if rank.process.poll() is None:
                    rank.process.send_signal(stop.signum)
        for rank in ranks:
            rank.update_stopped()
        if deadline is None and any(_has_failed(rank, timeout, now) for rank in ranks):
            deadline = now + GRACE
        time.sleep(POLL_INTERVAL)


def _has_failed(rank: Rank, timeout: float, now: float) -> bool:
    if rank.stopped is not None:
        # A job scheduler or a debugger may pause a process for a while.
        return now - rank.stopped[0] > timeout
    # A result is written just before the end.
    return rank.process.poll() is not None and "result" not in rank.document


def _result(ranks: list[Rank], stop: StopFlag, folder: Path) -> dict[str, Any]:
    """Return the result of the first process if all succeeded; else raise the main error.

    A process that was killed or crashed is the cause of all other errors. Next comes an error that
    a process reported, then the signal to this process. Lost contact is only a consequence.
    """
    documents = [rank.document for rank in ranks]
    if all("result" in document for document in documents):
        result: dict[str, Any] = documents[0]["result"]
        return result
    culprit = next((rank for rank in ranks if _is_culprit(rank, stop.signum)), None)
    if culprit is not None:
        raise VitkitError(
            f"rank {culprit.number} on {socket.gethostname()} (process {culprit.process.pid}) "
            f"{_how_it_ended(culprit)} {_after_step(folder, culprit.number)}; all {len(ranks)} "
            f"processes are stopped; {_resume_hint(folder)}"
        )
    lost_contact: VitkitError | None = None
    for document in documents:
        if "error" not in document:
            continue
        report = document["error"]
        error = error_from_json(report)
        if report["kind"] != LostContact.__name__:
            error.add_note(report["trace"])
            raise error
        lost_contact = lost_contact or error
    if stop.signum is not None:
        raise Interrupted(stop.signum, "stopped before anything was saved")
    raise lost_contact or VitkitError("the processes ended without a result; please report it")


def _is_culprit(rank: Rank, signum: int | None) -> bool:
    """Return whether a process crashed, hangs, or was ended by a signal from outside."""
    if rank.stopped is not None or "fault" in rank.document.get("error", {}):
        return True
    code = rank.process.poll()
    forwarded = signum is not None and code in (-signum, 128 + signum)
    return code is not None and not rank.document and not forwarded


def _how_it_ended(rank: Rank) -> str:
    if rank.stopped is not None:
        return f"was paused by {signal.Signals(rank.stopped[1]).name} and did not continue"
    if rank.document:
        return f"met {rank.document['error']['fault']}"
    code = rank.process.returncode
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL, perhaps because memory ran out,"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited early with code {code}"


def _after_step(folder: Path, rank: int) -> str:
    """Return in words after which step a process ended."""
    steps = folder / STEPS_FILE
    content = steps.read_bytes() if steps.exists() else b""
    offset = STEP_RECORD.size * rank
    if len(content) < offset + STEP_RECORD.size:
        return "before its first step"
    (step,) = STEP_RECORD.unpack_from(content, offset)
    return f"after step {step}" if step else "before its first step"


def _resume_hint(folder: Path) -> str:
    """Return a line on what can be resumed."""
    try:
        return RunFolder(Path((folder / RUN_FILE).read_text())).resume_hint()
    except OSError:  # there is no run folder yet
        return "no state is saved yet"


# One of the processes that `--devices N` launches: it trains, and reports how it ended.

REQUEST = "request.json"
"""File of the launcher's folder with the task of the processes."""
ORPHAN_GRACE = 30.0
"""Seconds in which a process whose launcher has ended must save its state."""


def _report_file(folder: Path, rank: int) -> Path:
    """Return the file to which a process writes its result or its error."""
    return folder / f"rank-{rank}.json"


def serve(folder: Path, train: Callable[[TrainConfig, Any], Any]) -> int:
    """Run one of the processes that `launch` starts; return its exit code.

    Args:
        folder: folder of the launcher.
        train: trains with the settings and the callbacks, and returns a value with `to_json()`.
    """
    rank = int(os.environ["RANK"])
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    report = _report_file(folder, rank)
    try:
        request = json.loads((folder / REQUEST).read_bytes())
        # the launcher's sys.path, as callbacks may be in a folder that only the launcher knows
        sys.path[:] = request["path"]
        callbacks = [resolve_name(name) for name in request["callbacks"]]
        result = train(TrainConfig(**request["config"]), callbacks)
    except VitkitError as error:
        _write(report, {"error": error_to_json(error) | {"trace": traceback.format_exc()}})
        return exit_code(error)
    except KeyboardInterrupt:
        return of_signal(signal.SIGINT)
    except Exception as error:  # noqa: BLE001 - the launcher reports it with the rank
        fault = {"kind": "", "fault": f"{type(error).__name__}: {error}"}
        _write(report, {"error": fault | {"trace": traceback.format_exc()}})
        return FAULT
    _write(report, {"result": result.to_json()})
    return DONE


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write a JSON document by a rename, so that the launcher never reads half of it."""
    write_bytes(path, json.dumps(document).encode())


def _end_with_launcher() -> None:
    """Wait until the launcher has ended; then let this process save its state, and end it.

    The pipe from the launcher closes with it, however it ends.
    """
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE)
    os._exit(of_signal(signal.SIGTERM))
