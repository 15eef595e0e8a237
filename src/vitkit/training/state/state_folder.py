"""Save and load the state that a run resumes from: whole folders, written aside and then renamed.

    state/step-00000120/{model.safetensors, optimizer.safetensors, MANIFEST.json}

A state is tensors and JSON only. Where tensors are sharded over processes, each process writes its
own parts into `model.shards/`; reading puts them together, so any number of processes can resume
from either layout. The manifest has the size and SHA-256 of every file, all values that are not
tensors, the settings of the run and the versions that wrote it, and is sealed by a SHA-256 of its
own. It is written last: a folder whose files do not match its manifest is reported and skipped.
`delete_old_states` deletes all states but the newest two.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from vitkit.distributed import ProcessGroup, is_sharded
from vitkit.errors import CheckpointError
from vitkit.io.atomic import output_error, remove_temporaries, sync, sync_folder
from vitkit.io.caches import file_sha256
from vitkit.training.state.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    find_damage,
    is_of_another_format,
    read_manifest,
    sealed_document,
    step_of,
    stored_metadata,
    write_manifest,
)
from vitkit.training.state.registry import Registry, Stateful, Tensors, read_shards, write_shards
from vitkit.weights.files import safetensors_writer

STEP = re.compile(r"step-(\d{8,})")
"""Names of states; any other name in the folder is left alone."""
UNFINISHED, DAMAGED = ".tmp-", "damaged-"
"""First letters of the names of states that are being written, and of damaged ones, which stay."""
SHARDS = ".shards"
"""Suffix of the folder with the shards of a part."""
TEMPORARY_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINTR, errno.EAGAIN)
"""Errors of a write after which a retry may succeed."""
_version = cache(version)  # each call parses a file of metadata
PAUSES = (0.2, 1.0)
"""Seconds to wait before the second and the third attempt."""


def save_state(
    folder: Path,
    registry: Registry,
    step: int,
    world: ProcessGroup | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write one complete state, then delete all but the newest two.

    If there is already an intact state of this step, only its values are replaced.

    Args:
        folder: folder of all states.
        registry: the parts.
        step: step of the run.
        world: the processes, all of which must call. The first one writes, or all of them if
            tensors are sharded.
        settings: settings of the run, as JSON values; stored with the state.

    Raises:
        OutputError: three attempts to write failed; the earlier states are unchanged.
    """
    world = world or ProcessGroup()
    if any(_tensors(part, sharded=True) for part in registry.values()):
        return _save_sharded(folder, registry, step, world, settings or {})
    return Path(
        world.broadcast_from_main(lambda: str(_save(folder, registry, step, settings or {})))
    )


def save_values(folder: Path, registry: Registry, step: int, world: ProcessGroup) -> bool:
    """Replace the values of the state of `step`, in one rename; its tensors must be unchanged.

    Returns:
        True if there was such a state.

    Raises:
        OutputError: it cannot be written; the state is unchanged.
    """
    return world.broadcast_from_main(lambda: _write_values(_state_folder(folder, step), registry))


def _state_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def _save(folder: Path, registry: Registry, step: int, settings: Mapping[str, Any]) -> Path:
    final = _state_folder(folder, step)
    if _rewrite_values(final, registry):
        return final
    for pause in (*PAUSES, None):
        try:
            _write(final, registry, settings)
            _delete_older_states(list_states(folder), step)
            break
        except OSError as error:
            if pause is None or error.errno not in TEMPORARY_ERRORS:
                raise output_error(final, error, _size(registry)) from error
            time.sleep(pause)
    return final


def _save_sharded(
    folder: Path, registry: Registry, step: int, world: ProcessGroup, settings: Mapping[str, Any]
) -> Path:
    """Let every process write its shards aside; the first one completes the state.

    There is one attempt only: the processes would have to agree on another one.
    """
    final = _state_folder(folder, step)
    aside = folder / f"{UNFINISHED}shards-{final.name}"
    if world.broadcast_from_main(lambda: _rewrite_values(final, registry)):
        return final

    def begin() -> None:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    def finish() -> None:
        try:
            _write(final, registry, settings, aside)
            _delete_older_states(list_states(folder), step)
        except OSError as error:
            raise output_error(final, error, _size(registry)) from error
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    world.broadcast_from_main(begin)
    for name, part in registry.items():
        tensors = _tensors(part, sharded=True)
        if tensors:
            write_shards(aside / f"{name}{SHARDS}", tensors)
    world.broadcast_from_main(finish)
    return final


def _rewrite_values(final: Path, registry: Registry) -> bool:
    """Replace the values of a state if it exists and is intact; return whether it was."""
    if not final.is_dir() or find_damage(final) is not None:
        return False
    return _write_values(final, registry)


def _write_values(final: Path, registry: Registry) -> bool:
    """Write the registry's values into an existing state; return False if there is none."""
    try:
        manifest = read_manifest(final)
    except (OSError, ValueError, LookupError):
        return False
    if manifest["format_version"] != FORMAT_VERSION:
        return False
    values = _values(registry)
    if manifest["values"] != values:  # an unchanged manifest is not written again
        write_manifest(final, manifest | {"values": values})
    return True


def _write(
    final: Path, registry: Registry, settings: Mapping[str, Any], shards: Path | None = None
) -> None:
    """Write a state into a temporary folder, wait for the disk, and rename the folder."""
    folder = final.parent
    temporary = folder / f"{UNFINISHED}{final.name}-{os.getpid()}"
    try:
        # It may be there from a process with the same number that was killed.
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        manifest = {
            "format_version": FORMAT_VERSION,
            "versions": {name: _version(name) for name in ("vitkit", "torch")},
            "settings": dict(settings),
            "values": _values(registry),
            "files": _write_files(temporary, registry, shards),
        }
        (temporary / MANIFEST).write_bytes(sealed_document(manifest))
        # All content must be on the disk before the folder gets its final name.
        sync(temporary / MANIFEST)
        sync_folder(temporary)
        if final.exists():  # a damaged state of the same step
            _delete_state(final)
        temporary.rename(final)
        sync_folder(folder)  # the rename itself
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_files(
    folder: Path, registry: Registry, shards: Path | None
) -> dict[str, dict[str, int | str]]:
    """Write all tensors; return the size and SHA-256 of every file, by its path in the folder."""
    # Hashing and syncing release the interpreter lock: both run while the next file is written.
    with ThreadPoolExecutor(2) as threads:
        written = []
        for file in _files(folder, registry, shards):
            written.append((file, threads.submit(sync, file), threads.submit(file_sha256, file)))
    files: dict[str, dict[str, int | str]] = {}
    for file, synced, digest in written:
        synced.result()  # raises what the thread raised
        name = file.relative_to(folder).as_posix()
        files[name] = {"size": file.stat().st_size, "sha256": digest.result()}
    return files


def _files(folder: Path, registry: Registry, shards: Path | None) -> Iterator[Path]:
    """Write the files of a state one after another, and yield each when it is complete."""
    for name, part in registry.items():
        tensors = _tensors(part, sharded=False)
        if tensors:
            file = folder / f"{name}.safetensors"
            safetensors_writer(tensors, {}).write(file)
            yield file
    if shards is not None:
        for shard_folder in sorted(shards.iterdir()):
            yield from sorted(shard_folder.rename(folder / shard_folder.name).iterdir())


def _values(registry: Registry) -> dict[str, Any]:
    """Return the values of every part as JSON gives them back: lists instead of tuples."""
    values: dict[str, Any] = {}
    for name, part in registry.items():
        values[name] = json.loads(json.dumps(part.metadata()))
    return values


def remove_unfinished(folder: Path) -> None:
    """Remove half-written and half-deleted states of a killed process."""
    for pattern in (f"{UNFINISHED}*", f"{DELETED}*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def remove_unfinished_files(folders: Iterable[Path]) -> None:
    """Remove the files that a killed process left half written beside its states."""
    for folder in folders:
        remove_temporaries(folder)


def list_states(folder: Path) -> list[Path]:
    """List all states in a folder, the oldest first."""
    paths = list[Path]()
    for path in folder.glob("step-*"):
        if STEP.fullmatch(path.name) and path.is_dir():
            paths.append(path)
    # By number: from step 100,000,000 on, names are longer and would sort wrongly.
    return sorted(paths, key=step_of)


def withdraw_state(folder: Path, step: int) -> None:
    """Delete the state of a step after which the run turned out to be unusable."""
    for state in list_states(folder):
        if step_of(state) == step:
            _delete_state(state)


def set_aside_damaged(folder: Path, newest: Path) -> None:
    """Rename every damaged state that is later than `newest`, so that it is not checked again."""
    for state in list_states(folder):
        # A state of a newer vitkit is not damaged: that version can resume from it.
        if step_of(state) > step_of(newest) and not is_of_another_format(state):
            target = state.with_name(f"{DAMAGED}{state.name}")
            shutil.rmtree(target, ignore_errors=True)
            state.rename(target)


def newest_state(folder: Path) -> tuple[Path, list[str]]:
    """Return the newest intact state, and one line for every newer one that is damaged.

    Raises:
        CheckpointError: no state is intact.
    """
    passed_over: list[str] = []
    for state in reversed(list_states(folder)):
        problem = find_damage(state)
        if problem is None:
            return state, passed_over
        passed_over.append(f"{state}: {problem}; skipped")
    raise CheckpointError(
        f"{folder}: no intact state: {'; '.join(passed_over) or 'none'}; start afresh with "
        "another --output"
    )


def load_state(state: Path, registry: Registry) -> None:
    """Restore every registered part from an intact state.

    Raises:
        CheckpointError: the state belongs to another run: a part, a tensor or a value is missing,
            unknown, or of another shape.
    """
    metadata, tensors = read_state(state)
    try:
        registry.check_names(metadata)
        for name, part in registry.items():
            part.load(tensors.get(name, {}), metadata[name])
    except CheckpointError as error:
        raise CheckpointError(f"{state}: belongs to another run: {error}") from None


def read_state(state: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Tensors]]:
    """Read the values and the tensors of every part. Raises `CheckpointError`."""
    try:
        metadata = stored_metadata(state, read_manifest(state))
        tensors = {name: _read_tensors(state, name) for name in metadata}
    except (OSError, ValueError, LookupError, TypeError, SafetensorError) as error:
        raise CheckpointError(f"{state}: cannot be read: {error}") from None
    return metadata, tensors


def _read_tensors(state: Path, name: str) -> Tensors:
    """Read the tensors of a part: those in one file, and those in shards."""
    file = state / f"{name}.safetensors"
    tensors = safetensors.torch.load_file(file) if file.exists() else {}
    return tensors | read_shards(state / f"{name}{SHARDS}")


def run_hash(state: Path) -> str:
    """Return the SHA-256 (hex) of all that decides the next step: tensors and values.

    The time that the run took is left out: it differs between runs that are otherwise equal.
    """
    metadata, tensors = read_state(state)
    total = hashlib.sha256()
    for name in sorted(metadata):
        values = {key: value for key, value in metadata[name].items() if key != "seconds"}
        total.update(json.dumps([name, values], sort_keys=True).encode())
        for key, tensor in sorted(tensors.get(name, {}).items()):
            total.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _tensors(part: Stateful, *, sharded: bool) -> Tensors:
    """Return the tensors of a part that are sharded, or those that are not."""
    return {name: t for name, t in part.tensors().items() if is_sharded(t) == sharded}


def _size(registry: Registry) -> int:
    """Return the bytes of all tensors, for messages."""
    size = 0
    for part in registry.values():
        size += sum(tensor.nbytes for tensor in part.tensors().values())
    return size


# Delete old states: all but the newest two.
#
# A folder is renamed before it is deleted, so that a folder that looks complete never lacks a file.

KEPT = 2
"""Newest states that are kept: if one is damaged, the run resumes from the other."""
DELETED = ".trash-"
"""First letters of the names of folders that are being deleted."""


def _delete_older_states(states: Sequence[Path], step: int) -> None:
    """Delete all states older than that of `step`, which was just written, and the one before."""
    earlier = [state for state in states if step_of(state) <= step]
    for state in earlier[:-KEPT]:
        _delete_state(state)


def _delete_state(state: Path) -> None:
    """Rename a state out of the way, and delete it while the run continues."""
    renamed = state.with_name(f"{DELETED}{state.name}-{os.getpid()}")
    # It may be there from a process with the same number that was killed.
    shutil.rmtree(renamed, ignore_errors=True)
    state.rename(renamed)
    # Freeing a gigabyte can take the file system seconds.
    threading.Thread(target=shutil.rmtree, args=(renamed, True)).start()
