"""`--devices N`: N processes of this run on this machine, and what becomes of them.

Each is `python -m vitkit.training FOLDER` with torchrun's environment. In the folder are the
settings, the last step of each, and, when it has ended, its result or its error. Who ends in any
other way takes the others with it, and is named.
"""

from __future__ import annotations

import json
import os
import shlex
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

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from vitkit.distributed import EXCHANGE, RUN, STEP, STEPS, LostContact, described, revived
from vitkit.errors import Interrupted, VitkitError, exit_code
from vitkit.process import shorten_spinning
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.interrupts import StopFlag, stop_on_signal
from vitkit.training.run_folder import RunFolder, what_is_left

GRACE = 5.0
"""Seconds that the others have to end by themselves after one has failed."""
LOOK = 0.05
"""Seconds between two looks at the processes."""
LAST_WILL = 30.0
"""Seconds in which a process whose launcher is gone must have saved."""
ASKED = "asked.json"
"""What the processes are to do."""


@dataclass
class Rank:
    """One launched process.

    Attributes:
        number: its rank.
        process: the process; it leads a process group of its own.
        end: where it writes how it ended.
        stopped: when it was last seen stopped, and by which signal; `None` while it runs.
    """

    number: int
    process: subprocess.Popen[bytes]
    end: Path
    stopped: tuple[float, int] | None = None

    @property
    def document(self) -> dict[str, Any]:
        """What it wrote when it ended; empty where it could not."""
        try:
            document: dict[str, Any] = json.loads(self.end.read_bytes())
        except (OSError, ValueError):
            return {}
        return document

    def look_whether_stopped(self) -> None:
        """See whether a signal has stopped it, or let it go on."""
        if self.process.poll() is not None or not hasattr(os, "waitid"):
            return
        how = os.WSTOPPED | os.WCONTINUED | os.WNOHANG
        while (seen := os.waitid(os.P_PID, self.process.pid, how)) is not None:
            stopped = seen.si_code in (os.CLD_STOPPED, os.CLD_TRAPPED)
            self.stopped = (time.monotonic(), seen.si_status) if stopped else None

    def kill(self) -> None:
        """End it with its loader's processes, at once; the group may outlive its leader."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def launch(config: TrainConfig, callbacks: Sequence[str]) -> dict[str, Any]:
    """Start `config.devices` processes, wait for all, and return what the first one found.

    Args:
        config: every setting.
        callbacks: `module:qualname` of each; the processes import them as this one would.

    Raises:
        VitkitError: what the processes raised; or that one was lost, with its rank, the signal and
            its last step.
    """
    with ExitStack() as stack:
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="vitkit-"))
        folder = Path(name)
        stop = stack.enter_context(stop_on_signal(lambda: _left(folder)))
        asked = {
            "config": config.to_json(),
            "callbacks": list(callbacks),
            "path": [*map(str, sys.path)],
        }
        (folder / ASKED).write_text(json.dumps(asked))
        store = TCPStore("127.0.0.1", 0, config.devices, is_master=True, wait_for_workers=False)
        ranks: list[Rank] = []
        try:
            for number in range(config.devices):
                process = subprocess.Popen(
                    [sys.executable, "-m", "vitkit.training", name],
                    env=_environment(number, config.devices, store.port, name),
                    stdin=subprocess.PIPE,  # closes with this process, however it ends
                    process_group=0,  # Ctrl-C comes here alone, and is passed on once
                )
                ranks.append(Rank(number, process, folder / f"rank-{number}.json"))
            _watch(ranks, stop, config.timeout)
            return _result(ranks, stop, folder)
        finally:
            for rank in ranks:
                rank.kill()
                assert rank.process.stdin is not None
                rank.process.stdin.close()


def _environment(rank: int, size: int, port: int, exchange: str) -> dict[str, str]:
    env = dict(os.environ)
    shorten_spinning(env)
    env.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    if sys.platform == "linux":
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env | {
        "RANK": str(rank), "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is here, not in rank 0
        EXCHANGE: exchange,
    }  # fmt: skip


def _watch(ranks: list[Rank], stop: StopFlag, timeout: float) -> None:
    """Until all have ended; once one has failed, the others have `GRACE` seconds."""
    deadline: float | None = None
    passed_on = False
    while any(rank.process.poll() is None for rank in ranks):
        now = time.monotonic()
        if deadline is not None and now > deadline:
            return
        if stop.signum is not None and not passed_on:
            passed_on = True
            for rank in ranks:
                if rank.process.poll() is None:
                    rank.process.send_signal(stop.signum)
        for rank in ranks:
            rank.look_whether_stopped()
        if deadline is None and any(_has_failed(rank, timeout, now) for rank in ranks):
            deadline = now + GRACE
        time.sleep(LOOK)


def _has_failed(rank: Rank, timeout: float, now: float) -> bool:
    if rank.stopped is not None:
        return now - rank.stopped[0] > timeout
    return rank.process.poll() is not None and "result" not in rank.document


def _result(ranks: list[Rank], stop: StopFlag, folder: Path) -> dict[str, Any]:
    """What the first process found, if all ended well; else raise what matters most."""
    documents = [rank.document for rank in ranks]
    if all("result" in document for document in documents):
        result: dict[str, Any] = documents[0]["result"]
        return result
    said = [document["error"] for document in documents if "error" in document]
    lost = [error for error in said if error["kind"] == LostContact.__name__]
    plain = [error for error in said if error not in lost and "fault" not in error]
    culprit = next((rank for rank in ranks if _is_culprit(rank, stop.signum)), None)
    if culprit is None and plain:
        error = revived(plain[0])
        error.add_note(plain[0]["trace"])
        raise error
    if stop.signum is not None and culprit is None:
        raise Interrupted(stop.signum, "stopped before there was anything to save")
    if culprit is None:
        raise revived(lost[0]) if lost else VitkitError("the processes ended without a result")
    raise VitkitError(
        f"rank {culprit.number} on {socket.gethostname()} (process {culprit.process.pid}) "
        f"{_how_it_ended(culprit)} {_after_step(folder, culprit.number)}; all {len(ranks)} "
        f"processes are stopped; go on with: {_resume(folder)}"
    )


def _is_culprit(rank: Rank, signum: int | None) -> bool:
    """Whether a process ended, or hangs, by something that nobody here did to it."""
    if rank.stopped is not None or "fault" in rank.document.get("error", {}):
        return True
    code = rank.process.poll()
    asked = signum is not None and code in (-signum, 128 + signum)
    return code is not None and not rank.document and not asked


def _how_it_ended(rank: Rank) -> str:
    if rank.stopped is not None:
        return f"was stopped by {signal.Signals(rank.stopped[1]).name} and did not go on"
    if rank.document:
        return f"met {rank.document['error']['fault']}"
    code = rank.process.returncode
    if code == -signal.SIGKILL:
        return "was ended by SIGKILL, perhaps by the system for want of memory,"
    if code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"left early with exit code {code}"


def _after_step(folder: Path, rank: int) -> str:
    steps = folder / STEPS
    content = steps.read_bytes() if steps.exists() else b""
    place = STEP.size * rank
    (step,) = STEP.unpack_from(content, place) if len(content) >= place + STEP.size else (0,)
    return f"after step {step}" if step else "before its first step"


def _left(folder: Path) -> str:
    """What there is to go on from, where this process leaves at once, and so do the others."""
    try:
        return what_is_left(RunFolder(Path((folder / RUN).read_text())))
    except OSError:
        return "no state is saved yet"


def _resume(folder: Path) -> str:
    try:
        root = (folder / RUN).read_text()
    except OSError:
        return "--resume"
    return f"vitkit train --resume {shlex.quote(root)}"


def serve(folder: Path, train: Callable[[TrainConfig, Any], Any]) -> int:
    """Be one of the processes that `launch` starts; the exit code.

    Args:
        folder: the one that `launch` made.
        train: does the work, by the settings and the loop, and returns a value with `to_json()`.
    """
    rank = int(os.environ["RANK"])
    threading.Thread(target=_leave_with_the_launcher, daemon=True).start()
    end = folder / f"rank-{rank}.json"
    try:
        asked = json.loads((folder / ASKED).read_bytes())
        sys.path[:] = asked["path"]
        callbacks = [resolve_name(name) for name in asked["callbacks"]]
        result = train(TrainConfig(**asked["config"]), callbacks)
    except VitkitError as error:
        _write(end, {"error": described(error) | {"trace": traceback.format_exc()}})
        return exit_code(error)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:  # noqa: BLE001 - the launcher says whose it is
        fault = {"kind": "", "fault": f"{type(error).__name__}: {error}"}
        _write(end, {"error": fault | {"trace": traceback.format_exc()}})
        return 1
    _write(end, {"result": result.to_json()})
    return 0


def _write(path: Path, document: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(document))
    temporary.rename(path)


def _leave_with_the_launcher() -> None:
    """The pipe to whoever started us ends with it, however it ended; then save and go."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(LAST_WILL)
    os._exit(128 + signal.SIGTERM)
