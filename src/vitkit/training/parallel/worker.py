"""One of the processes that `--devices N` launches: it trains, and reports how it ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from vitkit.distributed import error_to_json
from vitkit.errors import VitkitError
from vitkit.exit_codes import DONE, FAULT, exit_code, of_signal
from vitkit.io.atomic import replacing_in_cache
from vitkit.training.config.train_config import TrainConfig

REQUEST = "request.json"
"""File of the launcher's folder with the task of the processes."""
ORPHAN_GRACE = 30.0
"""Seconds in which a process whose launcher has ended must save its state."""


def report_file(folder: Path, rank: int) -> Path:
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
    report = report_file(folder, rank)
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
    with replacing_in_cache(path) as file:
        file.write(json.dumps(document).encode())


def _end_with_launcher() -> None:
    """Wait until the launcher has ended; then let this process save its state, and end it.

    The pipe from the launcher closes with it, however it ends.
    """
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE)
    os._exit(of_signal(signal.SIGTERM))
