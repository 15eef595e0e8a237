"""`--devices N`: launch N local processes of a run by torch's launcher, and what each of them does.

Each process is `python -m vitkit.training FOLDER` with the environment of torchrun. The folder has
the settings and, when a process has ended, its result or its error. If one of them ends abnormally,
torch ends the others, and the message names its rank.
"""

import json
import logging
import os
import pickle
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from torch import multiprocessing
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's stub
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, record

from vitkit import distributed, process
from vitkit.errors import DONE, Interrupted, SettingError, VitkitError, exit_code
from vitkit.training.config.passed_objects import refuse_passed
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.run_folder import RunFolder

REQUEST = "request.json"
"""File of the launcher's folder with the task of the processes."""
POLL_INTERVAL = 0.05
"""Seconds between two checks of the processes."""


def launch(config: TrainConfig, callbacks: Sequence[Callable[[], object]] = ()) -> Any:
    """Start `config.devices` processes, wait for all, and return the result of the first one.

    Args:
        config: every setting.
        callbacks: classes or functions that the processes import by name, with the module path of
            this process.

    Raises:
        SettingError: a callback that cannot be imported by name.
        VitkitError: the error of a process; or a process was lost, with its rank and the signal.
    """
    refuse_passed(config)
    process.check_processes("devices", config.devices)
    names = [_import_name(callback) for callback in callbacks]
    request = {"config": config.to_json(), "callbacks": names, "path": [*map(str, sys.path)]}
    # the errors are reported in one line here, and `stop_on_signal` handles the signals
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    size = config.devices
    with tempfile.TemporaryDirectory(prefix="vitkit-") as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(request))
        # Port 0: the system chooses a free one.
        store = TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        with process.stop_on_signal(lambda: _resume_hint(folder)) as stop:
            context = start_processes(
                "vitkit",
                sys.executable,
                args=dict.fromkeys(range(size), ("-m", "vitkit.training", name)),
                envs={rank: _environment(rank, size, store.port, name) for rank in range(size)},
                logs_specs=DefaultLogsSpecs(log_dir=name),
            )
            try:
                ended, forwarded = None, False
                while ended is None:
                    if stop.signum and not forwarded:
                        forwarded = True
                        for pid in context.pids().values():
                            with suppress(ProcessLookupError):
                                os.kill(pid, stop.signum)
                    ended = context.wait(POLL_INTERVAL, POLL_INTERVAL)
            finally:  # whatever happened, no process is left behind
                context.close(signal.SIGKILL)
        return _result(folder, size, ended.failures, stop.signum)


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
    environment = {
        # Otherwise every process would use all cores.
        "OMP_NUM_THREADS": str(max(1, process.available_cores() // size)),
        # All processes are local; otherwise gloo looks up the host name, which may fail.
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is in this process, not in rank 0
        distributed.EXCHANGE: exchange,
    }
    process.shorten_spinning(environment)
    return environment


def _result(
    folder: Path, size: int, failures: Mapping[int, ProcessFailure], signum: int | None
) -> Any:
    """Return the result of the first process if all succeeded; else raise the main error.

    An error that a process reported comes first, then a process that was killed or crashed, then
    the signal to this process. Lost contact is only a consequence.
    """
    answers = [_answer(folder, rank) for rank in range(size)]
    errors = [answer for answer in answers if isinstance(answer, VitkitError)]
    # torch sends a signal to the others where one has failed
    consequences = (distributed.LostContact, Interrupted) if failures else distributed.LostContact
    error = next((error for error in errors if not isinstance(error, consequences)), None)
    lost = [failure for rank, failure in failures.items() if answers[rank] is None]
    if error is None and signum is not None and failures:
        error = Interrupted(signum, f"stopped by signal {signum}; {_resume_hint(folder)}")
    elif error is None and lost:
        first = min(
            lost, key=lambda failure: (failure.exitcode == -signal.SIGTERM, failure.timestamp)
        )
        how = f"ended with exit code {first.exitcode}"
        if isinstance(first.message, dict):  # written by `record`
            how = f"met {first.message['message']}"
        elif first.exitcode < 0:
            how = f"was killed by {first.signal_name()}"
            how += ", perhaps because memory ran out" if first.exitcode == -9 else ""
        error = VitkitError(
            f"rank {first.local_rank} on {socket.gethostname()} (process {first.pid}) {how}; "
            f"all {size} processes are stopped; {_resume_hint(folder)}"
        )
    for found in (error, *errors):
        if found is not None:
            raise found
    return answers[0]


def _answer(folder: Path, rank: int) -> Any:
    """Return the result or the error of a process; `None` if it has written neither."""
    with suppress(OSError, EOFError, pickle.UnpicklingError):
        return pickle.loads((folder / f"rank-{rank}").read_bytes())
    return None


def _resume_hint(folder: Path) -> str:
    """Return a line on what can be resumed."""
    try:
        return RunFolder(Path((folder / distributed.RUN_FILE).read_text())).resume_hint()
    except OSError:  # there is no run folder yet
        return "no state is saved yet"


@record
def serve(folder: Path, train: Callable[[TrainConfig, Any], Any]) -> int:
    """Run one of the processes that `launch` starts; return its exit code.

    Args:
        folder: folder of the launcher.
        train: trains with the settings and the callbacks; its result goes to the launcher.
    """
    # Linux sends this signal when the launcher ends, however it ends
    multiprocessing._prctl_pr_set_pdeathsig(signal.SIGTERM)  # type: ignore[attr-defined]
    request = json.loads((folder / REQUEST).read_bytes())
    # the launcher's sys.path, as callbacks may be in a folder that only the launcher knows
    sys.path[:] = request["path"]
    callbacks = [resolve_name(name) for name in request["callbacks"]]
    code = DONE
    try:
        answer = train(TrainConfig(**request["config"]), callbacks)
    except VitkitError as error:
        error.add_note(traceback.format_exc())
        # torch ends the other processes where one fails; after a signal they end by themselves
        code = DONE if isinstance(error, Interrupted) else exit_code(error)
        answer = error
    (folder / f"rank-{os.environ['RANK']}").write_bytes(pickle.dumps(answer))
    return code
