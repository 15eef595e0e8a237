"""Saving, disturbed at every call to the file system: there is always an intact state."""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import vitkit
from vitkit.training.state.registry import ModelPart, OptimizerPart, Progress
from vitkit.training.state.state_folder import (
    load_state,
    newest_state,
    read_state,
    remove_unfinished,
    run_hash,
    save_state,
)

WATCHED = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def registry(step: int) -> dict:
    """Make the parts of a small run after some steps."""
    torch.manual_seed(0)
    model = vitkit.create_model(
        "vit_tiny_patch16_224", width=32, num_heads=2, depth=1, image_size=32
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(step):
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        optimizer.step()
    return {
        "model": ModelPart(model),
        "optimizer": OptimizerPart(optimizer),
        "progress": Progress(step=step),
    }


def in_child(folder: Path, state: dict, step: int, at: int, do: Callable[[], None]) -> int:
    """Save in a fork in which call number `at` to `folder` is disturbed.

    Returns:
        The wait status; 0 if the save was completed.
    """
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    seen = 0

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event not in WATCHED or str(folder) not in str(arguments[0]):
            return
        seen += 1
        if seen == at:
            do()

    sys.addaudithook(watch)
    code = 5
    try:
        save_state(folder, state, step)
        code = 0 if seen < at else 3
    except vitkit.OutputError as error:
        text = str(error)
        code = 2 if str(folder) in text and "\n" not in text else 4
    finally:
        os._exit(code)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def saved(tmp_path) -> tuple[Path, str]:
    """Make a folder with two states."""
    folder = tmp_path / "state"
    for step in (2, 4):
        save_state(folder, registry(step), step)
    return folder, run_hash(newest_state(folder)[0])


def test_killed_at_every_call_there_is_the_state_before_or_the_new_one(saved):
    folder, before = saved
    state, at = registry(6), 0
    while True:
        at += 1
        status = in_child(folder, state, 6, at, kill)
        newest, passed_over = newest_state(folder)
        assert passed_over == [], at
        assert newest.name in ("step-00000004", "step-00000006"), at
        if newest.name == "step-00000004":
            assert run_hash(newest) == before
        fresh = registry(0)
        load_state(newest, fresh)
        remove_unfinished(folder)
        assert not [file for file in folder.iterdir() if file.name.startswith(".")]
        if status == 0:
            break
        assert status == -signal.SIGKILL, (at, status)
        for later in folder.glob("step-00000006"):
            later.rename(folder.parent / f"gone-{at}")
            save_state(folder, registry(4), 4)
    assert at > 10


def test_killed_while_its_values_are_replaced_a_state_has_the_old_or_the_new_ones(saved):
    """Replacing the values after a validation is one rename; the state is intact all the time."""
    folder, _ = saved
    state, status, at = registry(4), -signal.SIGKILL, 0
    state["progress"].stale = 3
    while status == -signal.SIGKILL:
        at += 1
        status = in_child(folder, state, 4, at, kill)
        newest, passed_over = newest_state(folder)
        assert (newest.name, passed_over) == ("step-00000004", [])
        assert read_state(newest)[0]["progress"]["stale"] in ((3,) if status == 0 else (0, 3))
    assert (status, at > 2) == (0, True)


@pytest.mark.parametrize("number", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.soak)])
def test_a_disk_fault_at_any_call_is_one_line_and_costs_nothing(saved, number):
    """The earlier state is unchanged, and no unfinished file is left; the next save is complete."""
    folder, before = saved
    state, at, faults = registry(6), 0, 0

    def fail() -> None:
        raise OSError(number, os.strerror(number), str(folder))

    while at < 40:
        at += 1
        status = in_child(folder, state, 6, at, fail)
        newest, passed_over = newest_state(folder)
        assert passed_over == []
        if status == 0:
            break
        faults += 1
        assert status in (2, 3), (at, status)
        assert run_hash(newest) == before or newest.name == "step-00000006"
        assert not [file for file in folder.iterdir() if file.name.startswith(".tmp")]
        for later in folder.glob("step-00000006"):
            later.rename(folder.parent / f"gone-{number}-{at}")
            save_state(folder, registry(4), 4)
    assert faults > 5
    save_state(folder, registry(8), 8)
    assert newest_state(folder)[0].name == "step-00000008"


def test_the_shards_of_an_earlier_version_are_put_together(saved):
    """Each process wrote its rows of a sharded tensor, with their offset in the header."""
    folder, before = saved
    newest = newest_state(folder)[0]
    whole = load_file(newest / "model.safetensors")
    (newest / "model.safetensors").unlink()
    (newest / "model.shards").mkdir()
    for part in (0, 1):
        shards, offsets = {}, {}
        for name, tensor in whole.items():
            middle = tensor.shape[0] // 2
            shards[name] = (tensor[:middle] if part == 0 else tensor[middle:]).contiguous()
            offsets[name] = {"saved_offsets": [part * middle, *[0] * (tensor.ndim - 1)]}
        header = {"DCP_SHARDING_INFO": json.dumps(offsets)}
        save_file(shards, newest / f"model.shards/shard-{part}.safetensors", header)
    assert run_hash(newest) == before
