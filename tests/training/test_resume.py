"""A run that is stopped anywhere, by anything, resumes and ends with the same bits."""

import gc
import hashlib
import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest
import safetensors.torch
import torch
from processes import Forked, forked, wait_until
from training.faulty import at, on
from training.tiny_runs import command, counters, edit_manifest, end_of, last_state, run

import vitkit
from vitkit import Callback, CheckpointError, Interrupted, OutputError, SettingError, Trainer
from vitkit.training import initial_weights
from vitkit.training.state.state_folder import newest_state


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The run that nothing happens to."""
    output = tmp_path_factory.mktemp("straight") / "run"
    run(output)
    return output


def sigterm(of_what: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def within_accumulation(trainer: Trainer) -> None:
    """A SIGTERM between the two micro-batches of a step."""
    model, seen = trainer.training_step.model, []

    def hook(module, inputs, output):
        seen.append(1)
        if len(seen) == 2:
            handle.remove()
            os.kill(os.getpid(), signal.SIGTERM)

    handle = model.register_forward_hook(hook)


PLACES = {
    "step 1": at(0, sigterm), "in accumulation": at(4, within_accumulation),
    "mid-epoch": at(13, sigterm), "last batch": at(19, sigterm),
    "evaluation": on(after_evaluation_batch=sigterm),
    "epoch boundary": at(10, sigterm), "last step": at(29, sigterm),
}  # fmt: skip


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"workers": 2, "amp": "bfloat16"}, marks=SOAK)], ids=str
)
@pytest.mark.parametrize(
    "place",
    ["in accumulation", "evaluation", "last batch", pytest.param("step 1", marks=SOAK),
     pytest.param("epoch boundary", marks=SOAK), pytest.param("last step", marks=SOAK)],
)  # fmt: skip
def test_stopped_anywhere_it_ends_with_the_same_bits(straight, tmp_path, place, settings):
    """Model, optimizer, average and counters, by one hash over all of the state."""
    output = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(output, PLACES[place], **settings)
    run(output, resume=str(output), **settings)
    if settings:
        run(tmp_path / "straight", **settings)
        straight = tmp_path / "straight"
    assert end_of(output) == end_of(straight)


def killed_until_it_ends(output: Path, kills: int, chance: random.Random) -> int:
    """SIGKILL the run's group at random moments, restart the same command each time.

    Returns:
        How often it was killed.
    """
    done = 0
    while True:
        with forked(command(output, resume="auto"), output.parent) as child:
            if done < kills:
                _wait_for_a_new_state(output, child)
                time.sleep(chance.uniform(0.0, 0.3))
            else:
                child.wait()
            done += child.poll() is None
        if child.returncode == 0:
            return done
        assert child.returncode == -signal.SIGKILL, child.stderr
        states = sorted(output.glob("state/step-*"))
        # no torn state has its final name
        assert states == [] or last_state(output) == states[-1]
        for half in (".tmp-*", ".trash-*"):
            assert len(list(output.glob(f"state/{half}"))) <= 1


def _wait_for_a_new_state(output: Path, child: Forked) -> None:
    before = sorted(output.glob("state/step-*"))
    wait_until(
        lambda: sorted(output.glob("state/step-*")) != before or child.poll() is not None, 0.005
    )


def test_killed_at_random_moments_it_ends_with_the_same_bits(straight, tmp_path):
    """T1, twice here and fifty times in the long tests."""
    kills = killed_until_it_ends(tmp_path / "run", 2, random.Random(1))
    assert kills >= 1
    assert end_of(tmp_path / "run") == end_of(straight)


@pytest.mark.soak
def test_fifty_kills(straight, tmp_path):
    total, number = 0, 0
    while total < 50:
        output, number = tmp_path / f"run-{number}", number + 1
        kills = killed_until_it_ends(output, 10, random.Random(number))
        assert end_of(output) == end_of(straight)
        total += kills


def test_a_state_that_lacks_a_part_is_refused_by_its_name(straight, tmp_path):
    """Every entry of the registry, and every counter, removed in turn."""
    parts = ["model", "optimizer", "ema", "progress"]
    for gone in [*parts, *counters(last_state(straight))]:
        output = tmp_path / gone
        shutil.copytree(straight, output)

        def remove(manifest, gone=gone):
            values = manifest["values"]
            del (values if gone in parts else values["progress"])[gone]

        edit_manifest(last_state(output), remove)
        with pytest.raises(CheckpointError, match=rf"belongs to another run: .*{gone} missing"):
            run(output, resume=str(output))


@pytest.mark.parametrize("part", ["optimizer", pytest.param("ema", marks=pytest.mark.soak)])
def test_a_part_that_is_zeroed_is_noticed_by_the_hash(straight, tmp_path, part):
    """The control: the same resume with a part forgotten ends elsewhere."""
    output = tmp_path / "run"
    with pytest.raises(Interrupted):
        run(output, PLACES["mid-epoch"])
    state = last_state(output)
    file = state / f"{part}.safetensors"
    tensors = safetensors.torch.load_file(file)
    largest = max(tensors, key=lambda name: tensors[name].numel())
    safetensors.torch.save_file(tensors | {largest: torch.zeros_like(tensors[largest])}, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    edit_manifest(state, lambda manifest: manifest["files"][file.name].update(sha256=digest))
    run(output, resume=str(output))
    assert end_of(output) != end_of(straight)


def test_a_stateful_thing_that_is_not_registered_is_refused(tmp_path):
    class Careless(Callback):
        def __init__(self):
            self.teacher = torch.nn.Linear(2, 2)

    words = r"Careless\.teacher has a state that would not be saved, .*; create it in on_start"
    with pytest.raises(SettingError, match=words):
        run(tmp_path / "run", Careless)


def test_every_kind_of_damage_is_seen_and_the_state_before_is_used(straight, tmp_path):
    """T8: 40 flipped bits, 10 truncations, two files swapped, a page of zeros."""
    output = tmp_path / "run"
    shutil.copytree(straight, output)
    before, newest = sorted((output / "state").glob("step-*"))
    chance = random.Random(0)
    files = sorted(file for file in newest.iterdir())
    for trial in range(50):
        file = files[trial % len(files)]
        whole = file.read_bytes()
        if trial < 40:
            place = chance.randrange(len(whole))
            flipped = bytes([whole[place] ^ (1 << chance.randrange(8))])
            file.write_bytes(whole[:place] + flipped + whole[place + 1 :])
        else:
            file.write_bytes(whole[: chance.randrange(len(whole))])
        found, passed_over = newest_state(output / "state")
        assert found == before, (trial, file.name)
        assert len(passed_over) == 1
        assert str(newest) in passed_over[0]
        file.write_bytes(whole)
    assert newest_state(output / "state") == (newest, [])
    model, ema = newest / "model.safetensors", newest / "ema.safetensors"
    one, two = model.read_bytes(), ema.read_bytes()
    model.write_bytes(two)
    ema.write_bytes(one)
    assert newest_state(output / "state")[0] == before
    ema.write_bytes(two)
    model.write_bytes(one[:4096] + bytes(4096) + one[8192:])
    assert "ema.safetensors" not in newest_state(output / "state")[1][0]
    run(output, resume=str(output))
    assert end_of(output) == end_of(straight)
    assert "model.safetensors has sha256" in (output / "train.log").read_text()
    for state in (before, newest):
        (state / "MANIFEST.json").unlink()
    with pytest.raises(CheckpointError, match="no intact state"):
        run(output, resume=str(output))


def test_a_run_that_is_about_to_end_there_is_not_overtaken(tmp_path, monkeypatch):
    """Two processes resume one run: the second finds it in use before it looks for a state.

    Otherwise it could begin with a state that the first one has deleted by the time it is read.
    """
    output, make_model = tmp_path / "run", initial_weights.make_model
    run(output, max_steps=5)

    def by_the_first(*args):
        monkeypatch.undo()
        for asked in ({"resume": str(output)}, {"overwrite": True}):
            with pytest.raises(OutputError, match="in use by another process"):
                run(output, **asked, max_steps=15)
        return make_model(*args)

    monkeypatch.setattr(initial_weights, "make_model", by_the_first)
    run(output, resume=str(output), max_steps=10)
    assert last_state(output).name == "step-00000010"
    assert not output.with_name("run.old-1").exists()


def test_the_last_weights_are_those_of_the_last_state_wherever_it_is_killed(tmp_path, monkeypatch):
    """A power failure between the last weights and the last state."""
    output = tmp_path / "run"

    def fail(save):
        raise AssertionError("power failure")

    monkeypatch.setattr("vitkit.training.saving.Save.save_state", fail)
    with pytest.raises(AssertionError, match="power failure"):
        run(output, max_steps=12)
    monkeypatch.undo()
    ended = run(tmp_path / "run", max_steps=12, resume="auto")
    assert vitkit.load(ended.last).metadata["epoch"] == 1.2


def test_the_run_ends_after_max_steps_and_goes_on_from_there(straight, tmp_path):
    ended = run(tmp_path / "run", max_steps=17)
    assert ended.stopped == "17 steps"
    assert last_state(tmp_path / "run").name == "step-00000017"
    run(tmp_path / "run", resume=str(tmp_path / "run"), max_steps=None)
    assert end_of(tmp_path / "run") == end_of(straight)


def test_a_disk_that_is_full_or_read_only_leaves_the_states_before(tmp_path):
    """A real file system of two megabytes, with little room, with none, and read-only."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True,
        check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("no right to mount a small file system")
    try:
        run(place / "run", max_steps=5)
        before = end_of(place / "run")
        filler = place / "filler"
        free = shutil.disk_usage(place).free
        filler.write_bytes(bytes(max(free - 8192, 0)))
        with pytest.raises(OutputError, match=r"cannot write .*disk is full .*MB needed, .*free"):
            run(place / "run", resume=str(place / "run"), max_steps=10)
        with filler.open("ab", buffering=0) as file, suppress(OSError):
            while file.write(bytes(1024)):
                pass
        with pytest.raises(OutputError, match=r"cannot write .*disk is full.*; free some space"):
            run(place / "run", resume=str(place / "run"), max_steps=10)
        gc.collect()  # the errors above keep frames that have files open
        subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
        with pytest.raises(OutputError, match=r"file system is read-only.*; choose another place"):
            run(place / "run", resume=str(place / "run"), max_steps=10)
        subprocess.run(["mount", "-o", "remount,rw", str(place)], check=True)
        assert end_of(place / "run") == before
        filler.unlink()
        run(place / "run", resume=str(place / "run"), max_steps=10)
        assert last_state(place / "run").name == "step-00000010"
    finally:
        gc.collect()
        subprocess.run(["umount", "--lazy", str(place)], check=True)
