"""The state a run goes on from: whole folders, written aside and then renamed.

    state/step-00000120/{model.safetensors, optimizer.safetensors, state.json, MANIFEST.json}

Tensors and JSON only. Where every process has a part of each tensor, each writes its own, into
`model.shards/`; what is read is whole, so any number of processes goes on from either. The
manifest has size and sha256 of every file and is written last; a folder whose files do not match
it is named and passed over. Folders are renamed before they are deleted, so that none that looks
whole ever misses a file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from vitkit.errors import CheckpointError
from vitkit.training.distributed import World
from vitkit.training.sharding import is_sharded
from vitkit.training.shards import read_shards, write_shards
from vitkit.training.state import Registry, Tensors
from vitkit.weights.files import output_error, sync, sync_folder
from vitkit.weights.own import safetensors_content

KEPT = 2
MANIFEST, DOCUMENT = "MANIFEST.json", "state.json"
FORMAT_VERSION = 2
UNFINISHED, DELETED = ".tmp-", ".trash-"
SHARDS = ".shards"
"""Ends the name of a folder with the parts of a sharded part of the state."""
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINTR, errno.EAGAIN)
"""Troubles with writing that may be over in a moment."""
PAUSES = (0.2, 1.0)
"""Seconds to wait before writing again."""


def save_state(folder: Path, registry: Registry, step: int, world: World | None = None) -> Path:
    """Write one complete state, then drop all but the newest two.

    Args:
        folder: of all states.
        registry: the parts.
        step: of the run.
        world: the processes, all of which must call; the first one writes, or all do where tensors
            are sharded.

    Raises:
        OutputError: it cannot be written, after three attempts; the states before it are untouched.
    """
    world = world or World()
    if any(is_sharded(t) for part in registry.values() for t in part.tensors().values()):
        return _save_sharded(folder, registry, step, world)
    return Path(world.decided(lambda: str(_save(folder, registry, step))))


def _save(folder: Path, registry: Registry, step: int) -> Path:
    final = folder / f"step-{step:08d}"
    if final.is_dir() and damage(final) is None:
        return final
    for pause in (*PAUSES, None):
        try:
            _write(final, registry)
            break
        except OSError as error:
            if pause is None or error.errno not in PASSING:
                raise output_error(final, error, _size(registry)) from error
            time.sleep(pause)
    _retire(folder, final)
    return final


def _save_sharded(folder: Path, registry: Registry, step: int, world: World) -> Path:
    """Every process writes its parts aside; the first one does the rest, in one attempt."""
    final = folder / f"step-{step:08d}"
    aside = folder / f"{UNFINISHED}shards-{final.name}"
    if world.decided(lambda: final.is_dir() and damage(final) is None):
        return final

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def finish() -> None:
        try:
            _write(final, registry, aside)
        except OSError as error:
            raise output_error(final, error, _size(registry)) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        _retire(folder, final)

    world.decided(begin)
    for name, part in registry.items():
        if tensors := {key: t for key, t in part.tensors().items() if is_sharded(t)}:
            write_shards(aside / f"{name}{SHARDS}", tensors)
    world.decided(finish)
    return final


def _retire(folder: Path, newest: Path) -> None:
    """Drop all states but the newest two."""
    for old in sorted(folder.glob("step-*"))[:-KEPT]:  # the newest was just written, and is whole
        if old != newest:
            _delete(old)


def _write(final: Path, registry: Registry, shards: Path | None = None) -> None:
    folder = final.parent
    temporary = folder / f"{UNFINISHED}{final.name}-{os.getpid()}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        # Hashing and waiting for the disk leave the interpreter free: both go on while the next
        # file is written.
        with ThreadPoolExecutor(2) as threads:
            written = [
                (file, threads.submit(sync, file), threads.submit(_digest, file))
                for file in _files(temporary, registry, shards)
            ]
        files = {}
        for file, synced, digest in written:
            synced.result()
            said = {"size": file.stat().st_size, "sha256": digest.result()}
            files[file.relative_to(temporary).as_posix()] = said
        versions = {name: version(name) for name in ("vitkit", "torch")}
        manifest = {"format_version": FORMAT_VERSION, "versions": versions, "files": files}
        write_manifest(temporary, manifest)
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
            safetensors_content(tensors, {}).write(file)
            yield file
    for parts in sorted(shards.iterdir()) if shards else ():
        yield from sorted(parts.rename(folder / parts.name).iterdir())
    values = {name: part.values() for name, part in registry.items()}
    document = folder / DOCUMENT
    document.write_text(json.dumps({"format_version": FORMAT_VERSION, "parts": values}))
    yield document


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


def step_of(state: Path) -> int:
    """The step a state's folder is named after."""
    return int(state.name.removeprefix("step-"))


def newest_state(folder: Path) -> tuple[Path, list[str]]:
    """The newest state that is whole, and one line for every newer one that is damaged.

    Raises:
        CheckpointError: none is whole.
    """
    passed_over: list[str] = []
    for state in sorted(folder.glob("step-*"), reverse=True):
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
        document = json.loads((state / DOCUMENT).read_bytes())
        parts = document["parts"]
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
        if _seal(manifest) != document["sha256"]:
            return f"{MANIFEST} is not what it was sealed as"
        if manifest["format_version"] != FORMAT_VERSION:
            return f"of format {manifest['format_version']}, this vitkit has {FORMAT_VERSION}"
        for name, said in manifest["files"].items():
            file = state / name
            if (size := file.stat().st_size) != said["size"]:
                return f"{name} has {size} bytes, the manifest says {said['size']}"
            if (actual := _digest(file)) != said["sha256"]:
                return f"{name} has sha256 {actual}, the manifest says {said['sha256']}"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"not whole ({error})"
    return None


def write_manifest(state: Path, manifest: dict[str, Any]) -> None:
    """Write down what the files of a state are, sealed by a sha256 of its own."""
    document = {"manifest": manifest, "sha256": _seal(manifest)}
    (state / MANIFEST).write_text(json.dumps(document))


def _seal(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(registry: Registry) -> int:
    return sum(t.nbytes for part in registry.values() for t in part.tensors().values())
