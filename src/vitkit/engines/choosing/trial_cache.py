"""The user's cache of trials and of converted models, by model, machine and versions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from vitkit.engines.choosing.trial import Trial
from vitkit.engines.engine import EngineRequest
from vitkit.engines.registry import ENGINES, QUANTISERS
from vitkit.io.atomic import replacing_in_cache
from vitkit.io.cache_folder import cache_folder
from vitkit.io.digests import weights_fingerprint

CACHE_VERSION = 1
"""Changes when trials or converted models of an earlier vitkit must not be used."""
MOST_BYTES = 5 * 2**30
"""Size of all converted models that are kept; the ones used longest ago go first."""
DIGITS = 32
LASTING = ("ended by SIGFPE", "ended by SIGILL", "ended by SIGSEGV", "its logits")
"""Prefixes of failures that would happen again, so that they are not retried."""
FORGOTTEN_SECONDS = 86_400.0
"""Seconds after which other failures are retried: a busy machine, full memory."""


def _digest(*facts: object) -> str:
    text = json.dumps([CACHE_VERSION, *facts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def versions() -> dict[str, str]:
    """Return the versions of torch and of the runtimes that are installed; none is imported."""
    found = {"torch": str(torch.__version__)}
    packages = set(QUANTISERS).union(*(kind.packages for kind in ENGINES.values()))
    for package in sorted(packages):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def processor() -> str:
    """Return the name and the instructions of the processor, as far as the system tells them."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        keys = ("model name", "flags", "Features")
        return "\n".join(sorted({line for line in lines if line.startswith(keys)}))
    return f"{platform.machine()} {platform.processor()}"


def machine_key(threads: int) -> str:
    """Return a digest of what the speed depends on: processor, cores, threads and versions.

    Args:
        threads: threads that an engine may use.
    """
    cores: Iterable[int] = range(os.cpu_count() or 1)
    if hasattr(os, "sched_getaffinity"):
        cores = os.sched_getaffinity(0)
    return _digest(processor(), sorted(cores), threads, versions())


def model_folder(request: EngineRequest) -> Path:
    """Return the folder of a model's trials and converted files, which may not exist yet.

    Its name is a digest of the weights, the spec, the image size, the images that int8 is
    calibrated with, and the versions.
    """
    model = request.model
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    images = "" if request.calibration is None else weights_fingerprint({"": request.calibration})
    facts = (
        weights_fingerprint(weights),
        model.spec.to_json(),
        request.image_size,
        images,
    )
    return cache_folder() / "engines" / _digest(*facts, versions())


@contextlib.contextmanager
def one_at_a_time(folder: Path, report: Callable[[str], object]) -> Iterator[None]:
    """Let only one process at a time try a model: concurrent trials would slow each other down.

    The operating system releases the lock when the process ends, however it ends.

    Args:
        folder: folder of the model; made if missing.
        report: receives a line if another process is waited for.

    Raises:
        OSError: the folder cannot be written.
    """
    from filelock import FileLock, Timeout  # here: most processes make no trials

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        report("another process tries the engines on this model; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def read_trials(folder: Path, threads: int) -> list[Trial]:
    """Return the trials of this machine in a model's folder; none if they cannot be read.

    A failure that may have been one of the moment is left out after a day.
    """
    try:
        document = json.loads(_path(folder, threads).read_text(encoding="utf-8"))
        trials = [Trial.from_json(values) for values in document]
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return []
    with contextlib.suppress(OSError):
        os.utime(folder)  # used now
    return [trial for trial in trials if _holds(trial)]


def _holds(trial: Trial) -> bool:
    """Return False for a failure that should be retried."""
    if trial.usable or trial.reason.startswith(LASTING):
        return True
    return 0 <= time.time() - trial.made < FORGOTTEN_SECONDS


def write_trials(folder: Path, threads: int, trials: Iterable[Trial]) -> None:
    """Keep trials; a cache that cannot be written only costs time."""
    content = json.dumps([trial.to_json() for trial in trials], indent=1)
    with contextlib.suppress(OSError), replacing_in_cache(_path(folder, threads)) as file:
        file.write(content.encode())
    prune(folder.parent)


def _path(folder: Path, threads: int) -> Path:
    return folder / f"trials-{machine_key(threads)}.json"


def prune(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Delete the least recently used models of `folder`, until the rest is small enough.

    The newest always stays.

    Args:
        folder: one folder a model.
        most_bytes: size of the rest.
    """
    with contextlib.suppress(OSError):
        models = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        total = 0
        for rank, path in enumerate(models):
            total += sum(file.stat().st_size for file in path.rglob("*"))
            if rank > 0 and total > most_bytes:
                shutil.rmtree(path, ignore_errors=True)
