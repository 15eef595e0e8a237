"""The state a run goes on from: whole folders, written aside and then renamed.

    state/step-00000120/{model.safetensors, optimizer.safetensors, progress.json, MANIFEST.json}

Tensors and JSON only. The manifest has the sha256 of every file and is written last; a folder whose
files do not match it is named and passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn, optim

from vitkit.errors import CheckpointError
from vitkit.weights.files import output_error, sync_folder, write_bytes

KEPT = 2
MANIFEST = "MANIFEST.json"


@dataclass
class Progress:
    """Where a run stands, besides its tensors. Everything the loop counts is here.

    Attributes:
        step: optimizer steps done.
        loss_sum: sum of the training losses of this epoch's steps so far.
        best_top1: best validation top-1 so far; -1 before the first.
        best_loss: its validation loss.
        best_epoch: its epoch, counted from 1.
        stale: epochs since then.
        seconds: time spent training, over all sessions.
        data: fingerprint of the data set the run is about.
    """

    step: int = 0
    loss_sum: float = 0.0
    best_top1: float = -1.0
    best_loss: float = 0.0
    best_epoch: int = 0
    stale: int = 0
    seconds: float = 0.0
    data: str = ""


def save_state(
    folder: Path, model: nn.Module, optimizer: optim.Optimizer, progress: Progress
) -> Path:
    """Write one complete state, then drop all but the newest two.

    Raises:
        OutputError: it cannot be written; the states before it are untouched.
    """
    final = folder / f"step-{progress.step:08d}"
    if final.is_dir() and _damage(final) is None:
        return final
    temporary = folder / f".tmp-{final.name}-{os.getpid()}"
    tensors, settings = _flatten(optimizer)
    contents = {
        "model.safetensors": safetensors.torch.save(dict(model.state_dict())),
        "optimizer.safetensors": safetensors.torch.save(tensors),
        "progress.json": json.dumps({"progress": asdict(progress), "groups": settings}).encode(),
    }
    manifest = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, content in contents.items():
            write_bytes(temporary / name, content)
        write_bytes(temporary / MANIFEST, json.dumps(manifest).encode())
        shutil.rmtree(final, ignore_errors=True)  # a damaged state of the same step
        temporary.rename(final)
        sync_folder(folder)
    except OSError as error:
        raise output_error(final, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in sorted(folder.glob("step-*"))[:-KEPT]:
        shutil.rmtree(old)
    return final


def step_of(state: Path) -> int:
    """The step a state's folder is named after."""
    return int(state.name.removeprefix("step-"))


def clean(folder: Path) -> None:
    """Remove what a killed process left half written."""
    for left in folder.glob(".tmp-*"):
        shutil.rmtree(left, ignore_errors=True)


def newest_state(folder: Path) -> tuple[Path, list[str]]:
    """The newest state that is whole, and one line for every newer one that is damaged.

    Raises:
        CheckpointError: none is whole.
    """
    passed_over: list[str] = []
    for state in sorted(folder.glob("step-*"), reverse=True):
        problem = _damage(state)
        if problem is None:
            return state, passed_over
        passed_over.append(f"{state}: {problem}; passed over")
    raise CheckpointError(f"{folder}: no state that is whole: {'; '.join(passed_over) or 'none'}")


def load_state(state: Path, model: nn.Module, optimizer: optim.Optimizer) -> Progress:
    """Fill the model and the optimizer in place from a whole state.

    Raises:
        CheckpointError: the state is of another model.
    """
    document = json.loads((state / "progress.json").read_bytes())
    try:
        model.load_state_dict(safetensors.torch.load_file(state / "model.safetensors"))
    except RuntimeError as error:
        raise CheckpointError(f"{state}: of another model: {str(error).splitlines()[-1]}") from None
    _restore(optimizer, safetensors.torch.load_file(state / "optimizer.safetensors"), document)
    return Progress(**document["progress"])


def _damage(state: Path) -> str | None:
    try:
        manifest: dict[str, str] = json.loads((state / MANIFEST).read_bytes())
        for name, expected in manifest.items():
            actual = hashlib.sha256((state / name).read_bytes()).hexdigest()
            if actual != expected:
                return f"{name} has sha256 {actual[:12]}..., the manifest says {expected[:12]}..."
    except (OSError, ValueError, AttributeError) as error:
        return f"not whole ({error})"
    return None


def _flatten(optimizer: optim.Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """An optimizer's state as named tensors (`17.exp_avg`) and its groups' settings as JSON."""
    state = optimizer.state_dict()
    tensors = {
        f"{number}.{name}": value.contiguous()
        for number, values in state["state"].items()
        for name, value in values.items()
    }
    return tensors, state["param_groups"]


def _restore(
    optimizer: optim.Optimizer, tensors: Mapping[str, Tensor], document: Mapping[str, Any]
) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": document["groups"]})
