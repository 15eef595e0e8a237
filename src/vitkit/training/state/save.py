"""The state a run goes on from: whole folders, written aside and then renamed.

    state/step-00000120/{model.safetensors, optimizer.safetensors, MANIFEST.json}

Tensors and JSON only. Where every process has a part of each tensor, each writes its own, into
`model.shards/`; what is read is whole, so any number of processes goes on from either. The
manifest has size and sha256 of every file, all values that are no tensors, the settings of the run
and the versions that wrote it, and is sealed by a sha256 of its own. It is written last; a folder
whose files do not match it is named and passed over. Folders are renamed before they are deleted,
so that none that looks whole ever misses a file.

States of format 2, which had their values in `state.json` and no settings, are still read.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from vitkit.distributed import World
from vitkit.errors import CheckpointError
from vitkit.io.atomic import output_error, sync, sync_folder
from vitkit.training.parallel.fsdp import is_sharded
from vitkit.training.state.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    READABLE,
    digest_of,
    read_manifest,
    seal,
    sealed,
    stored_values,
    write_manifest,
)
from vitkit.training.state.registry import Registry, Tensors
from vitkit.training.state.sharded import read_shards, write_shards
from vitkit.weights.formats.vitkit import safetensors_writer

KEPT = 2
STEP = re.compile(r"step-(\d{8,})")
"""Names of states; any other name in the folder is none of ours."""
UNFINISHED, DELETED, DAMAGED = ".tmp-", ".trash-", "damaged-"
SHARDS = ".shards"
"""Ends the name of a folder with the parts of a sharded part of the state."""
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINTR, errno.EAGAIN)
"""Troubles with writing that may be over in a moment."""
PAUSES = (0.2, 1.0)
"""Seconds to wait before writing again."""


def save_state(
    folder: Path,
    registry: Registry,
    step: int,
    world: World | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write one complete state, then drop all that are older than the newest two.

    A whole state of this step that is there already is left as it is, but for its values.

    Args:
        folder: of all states.
        registry: the parts.
        step: of the run.
        world: the processes, all of which must call; the first one writes, or all do where tensors
            are sharded.
        settings: of the run, as JSON values; kept with the state.

    Raises:
        OutputError: it cannot be written, after three attempts; the states before it are untouched.
    """
    world = world or World()
    if any(is_sharded(t) for part in registry.values() for t in part.tensors().values()):
        return _save_sharded(folder, registry, step, world, settings or {})
    return Path(world.decided(lambda: str(_save(folder, registry, step, settings or {}))))


def save_values(folder: Path, registry: Registry, step: int, world: World) -> bool:
    """Replace the values of the state of `step`, in one rename; its tensors are the registry's.

    Returns:
        Whether there was such a state.

    Raises:
        OutputError: it cannot be written; the state is as it was.
    """
    return world.decided(lambda: _write_values(folder / f"step-{step:08d}", registry))


def _save(folder: Path, registry: Registry, step: int, settings: Mapping[str, Any]) -> Path:
    final = folder / f"step-{step:08d}"
    if _written_again(final, registry):
        return final
    for pause in (*PAUSES, None):
        try:
            _write(final, registry, settings)
            _retire(folder, step)
            break
        except OSError as error:
            if pause is None or error.errno not in PASSING:
                raise output_error(final, error, _size(registry)) from error
            time.sleep(pause)
    return final


def _save_sharded(
    folder: Path, registry: Registry, step: int, world: World, settings: Mapping[str, Any]
) -> Path:
    """Every process writes its parts aside; the first one does the rest, in one attempt."""
    final = folder / f"step-{step:08d}"
    aside = folder / f"{UNFINISHED}shards-{final.name}"
    if world.decided(lambda: _written_again(final, registry)):
        return final

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def finish() -> None:
        try:
            _write(final, registry, settings, aside)
            _retire(folder, step)
        except OSError as error:
            raise output_error(final, error, _size(registry)) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    world.decided(begin)
    for name, part in registry.items():
        if tensors := {key: t for key, t in part.tensors().items() if is_sharded(t)}:
            write_shards(aside / f"{name}{SHARDS}", tensors)
    world.decided(finish)
    return final


def _written_again(final: Path, registry: Registry) -> bool:
    """Write the values of a state again, where it is there and whole; whether it was."""
    if not final.is_dir() or damage(final) is not None:
        return False
    return _write_values(final, registry)


def _write_values(final: Path, registry: Registry) -> bool:
    """Put the registry's values into a state that has its tensors already; whether it could."""
    try:
        manifest = read_manifest(final)
    except (OSError, ValueError, LookupError):
        return False
    if manifest["format_version"] != FORMAT_VERSION:
        return False
    if manifest["values"] != (values := _values(registry)):
        write_manifest(final, manifest | {"values": values})
    return True


def _retire(folder: Path, step: int) -> None:
    """Drop all states older than the one of `step`, which was just written, and the one before.

    Later ones do not count: the run would have gone on from them if they were whole.
    """
    for old in [state for state in states(folder) if step_of(state) <= step][:-KEPT]:
        _delete(old)


def _write(
    final: Path, registry: Registry, settings: Mapping[str, Any], shards: Path | None = None
) -> None:
    folder = final.parent
    temporary = folder / f"{UNFINISHED}{final.name}-{os.getpid()}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        # Hashing and waiting for the disk leave the interpreter free: both go on while the next
        # file is written.
        with ThreadPoolExecutor(2) as threads:
            written = [
                (file, threads.submit(sync, file), threads.submit(digest_of, file))
                for file in _files(temporary, registry, shards)
            ]
        files = {}
        for file, synced, digest in written:
            synced.result()
            said = {"size": file.stat().st_size, "sha256": digest.result()}
            files[file.relative_to(temporary).as_posix()] = said
        versions = {name: version(name) for name in ("vitkit", "torch")}
        manifest = {
            "format_version": FORMAT_VERSION, "versions": versions, "settings": dict(settings),
            "values": _values(registry), "files": files,
        }  # fmt: skip
        (temporary / MANIFEST).write_bytes(sealed(manifest))
        sync(temporary / MANIFEST)
        sync_folder(temporary)
        if final.exists():  # a damaged state of the same step
            _delete(final)
        temporary.rename(final)
        sync_folder(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _files(folder: Path, registry: Registry, shards: Path | None) -> Iterator[Path]:
    """Write the files of a state, one after another."""
    for name, part in registry.items():
        if tensors := {key: t for key, t in part.tensors().items() if not is_sharded(t)}:
            file = folder / f"{name}.safetensors"
            safetensors_writer(tensors, {}).write(file)
            yield file
    for parts in sorted(shards.iterdir()) if shards else ():
        yield from sorted(parts.rename(folder / parts.name).iterdir())


def _values(registry: Registry) -> dict[str, Any]:
    """The values of every part, as JSON gives them back."""
    values: dict[str, Any] = json.loads(
        json.dumps({name: part.values() for name, part in registry.items()})
    )
    return values


def _delete(state: Path) -> None:
    """Out of sight at once; the file system frees a gigabyte while the run goes on."""
    gone = state.with_name(f"{DELETED}{state.name}-{os.getpid()}")
    shutil.rmtree(gone, ignore_errors=True)
    state.rename(gone)
    threading.Thread(target=shutil.rmtree, args=(gone, True)).start()


def clean(folder: Path) -> None:
    """Remove what a killed process left half written or half deleted."""
    for pattern in (f"{UNFINISHED}*", f"{DELETED}*"):
        for left in folder.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def states(folder: Path) -> list[Path]:
    """All states in a folder, the oldest first; anything with another name is left alone."""
    found = [path for path in folder.glob("step-*") if STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(state: Path) -> int:
    """The step a state's folder is named after."""
    return int(state.name.removeprefix("step-"))


def withdraw_state(folder: Path, step: int) -> None:
    """Delete the state of a step after which the run turned out not to be sound."""
    for state in states(folder):
        if step_of(state) == step:
            _delete(state)


def set_aside_damaged(folder: Path, newest: Path) -> None:
    """Rename every state that was passed over for `newest`, so that it is not looked at again."""
    for state in states(folder):
        if step_of(state) > step_of(newest) and not _is_of_another_format(state):
            target = state.with_name(f"{DAMAGED}{state.name}")
            shutil.rmtree(target, ignore_errors=True)
            state.rename(target)


def newest_state(folder: Path) -> tuple[Path, list[str]]:
    """The newest state that is whole, and one line for every newer one that is damaged.

    Raises:
        CheckpointError: none is whole.
    """
    passed_over: list[str] = []
    for state in reversed(states(folder)):
        problem = damage(state)
        if problem is None:
            return state, passed_over
        passed_over.append(f"{state}: {problem}; passed over")
    raise CheckpointError(f"{folder}: no state that is whole: {'; '.join(passed_over) or 'none'}")


def load_state(state: Path, registry: Registry) -> None:
    """Fill every registered part from a whole state.

    Raises:
        CheckpointError: the state is of another run: a part, a tensor or a value is missing,
            unknown, or of another shape.
    """
    stored, tensors = read_state(state)
    try:
        registry.check_names(stored)
        for name, part in registry.items():
            part.restore(tensors.get(name, {}), stored[name])
    except CheckpointError as error:
        raise CheckpointError(f"{state}: of another run: {error}") from None


def read_state(state: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Tensors]]:
    """Every part's values and tensors, as stored. Raises `CheckpointError`."""
    try:
        parts = stored_values(state, read_manifest(state))
        tensors = {name: _read_tensors(state, name) for name in parts}
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{state}: cannot be read: {error}") from None
    return parts, tensors


def _read_tensors(state: Path, name: str) -> Tensors:
    file, shards = state / f"{name}.safetensors", state / f"{name}{SHARDS}"
    together = safetensors.torch.load_file(file) if file.exists() else {}
    return together | read_shards(shards)


def run_hash(state: Path) -> str:
    """SHA-256 (hex) of all that decides the next step: tensors and values, not the time it took."""
    parts, tensors = read_state(state)
    total = hashlib.sha256()
    for name in sorted(parts):
        values = {key: value for key, value in parts[name].items() if key != "seconds"}
        total.update(json.dumps([name, values], sort_keys=True).encode())
        for key, tensor in sorted(tensors.get(name, {}).items()):
            total.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def damage(state: Path) -> str | None:
    """What is wrong with a state's files, in a line; `None` where all are as its manifest says."""
    try:
        document = json.loads((state / MANIFEST).read_bytes())
        manifest = document["manifest"]
        if seal(manifest) != document["sha256"]:
            return f"{MANIFEST} is not what it was sealed as"
        if manifest["format_version"] not in READABLE:
            return f"of format {manifest['format_version']}, this vitkit has {FORMAT_VERSION}"
        for name, said in manifest["files"].items():
            file = state / name
            if (size := file.stat().st_size) != said["size"]:
                return f"{name} has {size} bytes, the manifest says {said['size']}"
            if (actual := digest_of(file)) != said["sha256"]:
                return f"{name} has sha256 {actual}, the manifest says {said['sha256']}"
        progress = stored_values(state, manifest).get("progress", {})
        if (step := progress.get("step", step_of(state))) != step_of(state):
            return f"it is the state of step {step}, not of the one that it is named after"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"not whole ({error})"
    return None


def _is_of_another_format(state: Path) -> bool:
    try:
        return read_manifest(state)["format_version"] not in READABLE
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _size(registry: Registry) -> int:
    return sum(t.nbytes for part in registry.values() for t in part.tensors().values())
