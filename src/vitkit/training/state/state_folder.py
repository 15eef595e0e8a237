"""The saved states of a run: written, read, deleted.

A state is a folder `step-00000042` with a file of tensors for each part, and a manifest that is
written last: a folder whose files do not match its manifest is reported and skipped. All states but
the newest two are deleted.
"""

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from vitkit import distributed, errors
from vitkit.io import atomic, caches
from vitkit.training.state.registry import Registry, Tensors, check_same_names, read_shards
from vitkit.weights.files import safetensors_writer

MANIFEST = "MANIFEST.json"
"""The files, the values and the settings of a state, sealed by a SHA-256."""
FORMAT_VERSION = 3
STEP = re.compile(r"step-(\d{8,})")
"""Names of states; any other name in the folder is left alone."""
UNFINISHED, DELETED, DAMAGED = ".tmp-", ".trash-", "damaged-"
"""First letters of the names of states that are being written or deleted, and of damaged ones."""
KEPT = 2
"""Newest states that are kept: if one is damaged, the run resumes from the other."""
_version = cache(version)  # each call parses a file of metadata


def step_of(state: Path) -> int:
    """Return the step that a state's folder is named after."""
    return int(state.name.removeprefix("step-"))


def read_manifest(state: Path) -> dict[str, Any]:
    """Read a manifest, with its `values` and `settings`; `find_damage` checks its seal."""
    manifest: dict[str, Any] = json.loads((state / MANIFEST).read_bytes())["manifest"]
    return manifest


def write_manifest(state: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest of a state; an older one is replaced in one rename."""
    document = {"manifest": manifest, "sha256": _manifest_digest(manifest)}
    atomic.write_bytes(state / MANIFEST, json.dumps(document).encode())


def _manifest_digest(manifest: dict[str, Any]) -> str:
    """Hash a manifest (SHA-256, hex)."""
    # Sorted keys: the hash must not depend on the order of a dictionary.
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def find_damage(state: Path) -> str | None:
    """Check a state's files against its manifest; return one line on the first problem, if any."""
    try:
        document = json.loads((state / MANIFEST).read_bytes())
        manifest = document["manifest"]
        if _manifest_digest(manifest) != document["sha256"]:
            return f"{MANIFEST} does not match its own checksum"
        version = manifest["format_version"]
        if version != FORMAT_VERSION:
            return f"format {version}, and this vitkit reads {FORMAT_VERSION}"
        for name, expected in manifest["files"].items():
            found = caches.file_sha256(state / name)
            if found != expected["sha256"]:
                return f"{name} has sha256 {found}, expected {expected['sha256']}"
        step = manifest["values"].get("progress", {}).get("step", step_of(state))
        if step != step_of(state):  # the folder was renamed by hand
            return f"it holds the state of step {step}, not of the step in its name"
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return f"incomplete ({error})"
    return None


def save_state(
    folder: Path,
    registry: Registry,
    step: int,
    world: distributed.ProcessGroup | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write one complete state, then delete all but the newest two.

    If there is already a state of this step, its tensors are the same: only its values are
    replaced, in one rename.

    Args:
        folder: folder of all states.
        registry: the parts.
        step: step of the run.
        world: the processes, all of which must call. The first one writes; sharded tensors are
            gathered there.
        settings: settings of the run, as JSON values; stored with the state.

    Raises:
        OutputError: it cannot be written; the earlier states are unchanged.
    """
    world = world or distributed.ProcessGroup()
    final = folder / f"step-{step:08d}"
    if world.broadcast_from_main(lambda: _replace_values(final, registry)):
        return final
    tensors = {name: _gathered(part.tensors(), world) for name, part in registry.items()}

    def write() -> None:
        try:
            _write(final, tensors, _values(registry), settings or {})
            earlier = [state for state in list_states(folder) if step_of(state) <= step]
            for state in earlier[:-KEPT]:
                _delete_state(state)
        except OSError as error:
            size = sum(tensor.nbytes for part in tensors.values() for tensor in part.values())
            raise atomic.output_error(final, error, size) from error

    world.broadcast_from_main(write)
    return final


def _gathered(tensors: Tensors, world: distributed.ProcessGroup) -> Tensors:
    """Return whole tensors in the first process; every process must call."""
    whole = {}
    for name, tensor in tensors.items():
        if distributed.is_sharded(tensor):
            # moved at once: the device may not hold all of them
            gathered = distributed.full_tensor(tensor)
            tensor = gathered.cpu() if world.is_main else tensor
        whole[name] = tensor
    return whole


def _replace_values(final: Path, registry: Registry) -> bool:
    """Write the registry's values into an existing state; return False if there is none."""
    if not (final / MANIFEST).is_file():
        return False
    manifest = read_manifest(final)
    values = _values(registry)
    if manifest["values"] != values:  # an unchanged manifest is not written again
        write_manifest(final, manifest | {"values": values})
    return True


def _values(registry: Registry) -> dict[str, Any]:
    """Return the values of every part as JSON gives them back: lists instead of tuples."""
    values: dict[str, Any] = {}
    for name, part in registry.items():
        values[name] = json.loads(json.dumps(part.metadata()))
    return values


def _write(
    final: Path, parts: Mapping[str, Tensors], values: dict[str, Any], settings: Mapping[str, Any]
) -> None:
    """Write a state into a temporary folder, wait for the disk, and rename the folder."""
    temporary = final.parent / f"{UNFINISHED}{final.name}-{os.getpid()}"
    try:
        temporary.mkdir(parents=True)
        files: dict[str, dict[str, int | str]] = {}
        # Hashing and syncing release the interpreter lock: both run while the next file is written.
        with ThreadPoolExecutor(2) as threads:
            written = []
            for name, tensors in parts.items():
                file = temporary / f"{name}.safetensors"
                if tensors:
                    safetensors_writer(tensors, {}).write(file)
                    digest = threads.submit(caches.file_sha256, file)
                    written.append((file, threads.submit(atomic.sync, file), digest))
            for file, synced, digest in written:
                synced.result()  # raises what the thread raised
                files[file.name] = {"size": file.stat().st_size, "sha256": digest.result()}
        manifest = {
            "format_version": FORMAT_VERSION,
            "versions": {name: _version(name) for name in ("vitkit", "torch")},
            "settings": dict(settings),
            "values": values,
            "files": files,
        }
        # All content must be on the disk before the folder gets its final name.
        write_manifest(temporary, manifest)
        temporary.rename(final)
        atomic.sync_folder(final.parent)  # the rename itself
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _delete_state(state: Path) -> None:
    """Rename a state, so that none looks complete and lacks a file; delete it in a thread."""
    renamed = state.with_name(f"{DELETED}{state.name}-{os.getpid()}")
    state.rename(renamed)
    # Freeing a gigabyte can take the file system seconds.
    threading.Thread(target=shutil.rmtree, args=(renamed, True)).start()


def remove_unfinished(*folders: Path) -> None:
    """Remove half-written and half-deleted states and files of a killed process."""
    for folder in folders:
        for pattern in (f"{UNFINISHED}*", f"{DELETED}*"):
            for path in folder.glob(pattern):
                shutil.rmtree(path, ignore_errors=True)
        atomic.remove_temporaries(folder)


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
    """Rename every state that is later than `newest`, which is damaged: its step comes again."""
    for state in list_states(folder):
        if step_of(state) > step_of(newest):
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
    raise errors.CheckpointError(
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
        check_same_names("state", registry, metadata)
        for name, part in registry.items():
            part.load(tensors[name], metadata[name])
    # what torch raises for tensors of other names or shapes
    except (errors.CheckpointError, RuntimeError, ValueError, LookupError, TypeError) as error:
        raise errors.CheckpointError(f"{state}: belongs to another run: {error}") from None


def read_state(state: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Tensors]]:
    """Read the values and the tensors of every part of an intact state."""
    metadata = dict(read_manifest(state)["values"])
    tensors = {}
    for name in metadata:
        file = state / f"{name}.safetensors"
        tensors[name] = safetensors.torch.load_file(file) if file.exists() else {}
        # as earlier versions stored what was sharded
        tensors[name] |= read_shards(state / f"{name}.shards")
    return metadata, tensors


def run_hash(state: Path) -> str:
    """Return the SHA-256 (hex) of all that decides the next step: tensors and values.

    The time that the run took is left out: it differs between runs that are otherwise equal.
    """
    metadata, tensors = read_state(state)
    total = hashlib.sha256()
    for name in sorted(metadata):
        values = {key: value for key, value in metadata[name].items() if key != "seconds"}
        total.update(json.dumps([name, values], sort_keys=True).encode())
        for key, tensor in sorted(tensors[name].items()):
            total.update(f"{key} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return total.hexdigest()
