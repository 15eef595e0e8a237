"""`--devices N` and torchrun: a process that is lost or signalled ends all processes."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from processes import forked, wait_until
from training.faulty import Faulty
from training.tiny_runs import last_state, trained
from training.worlds import PLAIN, order, run

import vitkit


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Train in one process."""
    return run(1, tmp_path_factory.mktemp("alone") / "run", max_steps=20)


def failing(output: Path, kind: str, rank: int, size: int = 2, **settings) -> str:
    """Launch a run with a fault in one process at step 12, and return its output.

    Its callback is in a module that only the path of these tests has.
    """
    os.environ["VITKIT_TEST_FAULT"] = f"{kind} {rank} 12"  # which the processes inherit
    asked = {"data": "digits", "output": str(output), "devices": size, "save_every": 5}
    with pytest.raises(vitkit.VitkitError) as error:
        trained(PLAIN | asked | settings, Faulty)
    # the user's own exception keeps its name, in whichever process it was raised
    assert type(error.value) is (
        vitkit.UserCodeError if kind == "exception" else vitkit.VitkitError
    )
    assert still_running(str(output)) == []
    return str(error.value)


def still_running(words: str) -> list[int]:
    """Find processes with some words in their environment or command line, except zombies."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            text = (place / "environ").read_bytes() + (place / "cmdline").read_bytes()
        except OSError:
            continue
        if words.encode() in text and int(place.name) != os.getpid():
            found.append(int(place.name))
    return found


HOW = {
    "SIGKILL": "was killed by SIGKILL, perhaps because memory ran out",
    "SIGSTOP": "was killed by SIGKILL",  # by the launcher, as it did not answer
    "exception": "the callback Faulty raised ValueError in before_step: something unforeseen",
}  # fmt: skip


LONGEST_WAIT = 100.0
"""Seconds that processes wait for a lost one if nothing else ends them."""


def check_failing(output: Path, kind: str, rank: int, size: int = 2, **settings) -> float:
    """Check a failing run; return the seconds from the last state to the end of all processes."""
    os.environ["VITKIT_TEST_RUN"] = str(output)
    patience = 5.0 if kind == "SIGSTOP" else LONGEST_WAIT  # it ends the wait for a stopped one
    message = failing(output, kind, rank, size, timeout=patience, **settings)
    steps = Path(output / "state").glob("step-*")
    age = time.time() - max(path.stat().st_mtime for path in steps)
    host = socket.gethostname()
    if kind == "exception":
        assert f"{HOW[kind]}; the run stopped at step 12" in message
    else:
        assert f"rank {rank} on {host} (process " in message
        assert HOW[kind] in message
        assert f"; all {size} processes are stopped; " in message
    assert f"vitkit train --resume {output}" in message
    assert last_state(output).name == "step-00000010"
    return age


SOAK = pytest.mark.soak


@pytest.mark.parametrize(
    ("kind", "rank", "size", "workers"),
    [("SIGKILL", 1, 2, 0), pytest.param("SIGKILL", 0, 4, 1, marks=SOAK),
     pytest.param("SIGSTOP", 3, 4, 0, marks=SOAK), pytest.param("exception", 0, 2, 1, marks=SOAK)],
)  # fmt: skip
def test_a_lost_process_takes_all_with_it_and_any_number_goes_on(
    alone, tmp_path, kind, rank, size, workers
):
    """T13, with and without loader processes."""
    age = check_failing(tmp_path / "run", kind, rank, size, workers=workers)
    assert age < LONGEST_WAIT  # noticed, and not given up after the longest wait
    resumed = run(1, tmp_path / "run", resume=str(tmp_path / "run"), max_steps=20)
    assert order(resumed) == {step: order(alone)[step] for step in range(10, 20)}


COMMAND = [
    sys.executable, "-m", "vitkit", "train", "digits", "--recipe=digits", "--devices=2",
    "--batch-size=64", "--epochs=200", "--amp=off", "--device=cpu", "--save-every=5",
    "--spec.depth=1", "--spec.width=32", "--no-plots", "--no-report",
]  # fmt: skip


ALONE = [word for word in COMMAND if word != "--devices=2"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]


def started(place: Path, command: Sequence[str] = COMMAND) -> tuple[subprocess.Popen[str], Path]:
    """Start the command, and wait until its run has a state to resume from."""
    output = place / "run"
    process = subprocess.Popen(
        [*command, f"--output={output}"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "VITKIT_TEST_RUN": str(output)},
    )  # fmt: skip
    wait_until(lambda: process.poll() is not None or list(output.glob("state/step-*")))
    assert process.poll() is None
    return process, output


def variables(pid: int) -> dict[str, str]:
    """Read a process's environment; loader processes inherit it."""
    environment = (Path("/proc") / str(pid) / "environ").read_bytes().decode().split("\0")
    return dict(pair.partition("=")[::2] for pair in environment)


def rank_of(pid: int) -> str | None:
    """Read the rank in a process's environment."""
    return variables(pid).get("RANK")


def test_devices_starts_processes_and_a_signal_stops_them(tmp_path, monkeypatch):
    """Run the command itself, with SIGTERM to the launcher only."""
    output = tmp_path / "run"
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)))  # of the launcher
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("VITKIT_TEST_RUN", str(output))
    with forked([*COMMAND[3:], f"--output={output}"], tmp_path) as child:
        wait_until(lambda: child.poll() is not None or list(output.glob("state/step-*")))
        found = [variables(pid) for pid in still_running(str(output))]
        child.send_signal(signal.SIGTERM)
        assert child.wait() == 143, child.stderr
    # of 6 cores that the job has, not of all that the machine has
    assert {each["OMP_NUM_THREADS"] for each in found if "RANK" in each} == {"3"}
    assert child.stdout.count("processes: 2 (ddp), 32 images each make a batch of 64") == 1
    assert child.stderr.count("stopped at step") == 1
    assert still_running(str(output)) == []


def test_a_callback_that_the_processes_could_not_import_is_refused(tmp_path):
    class Local(vitkit.Callback):
        pass

    script = type("Script", (vitkit.Callback,), {"__module__": "__main__"})
    gone = type("Gone", (vitkit.Callback,), {"__module__": "no.such.module"})
    for callback in (Local, script, gone):
        mend = f"cannot be imported; define {callback.__name__} at the top level of a module, or"
        with pytest.raises(vitkit.SettingError, match=mend):
            trained({"data": "digits", "output": str(tmp_path / "run"), "devices": 2}, callback)
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("target", ["launcher", "rank 1"])
@pytest.mark.parametrize("trial", range(5))
def test_a_signal_at_any_moment_saves_and_stops_all(tmp_path, signum, target, trial):
    """T12 with several processes: 20 trials; killing the launcher acts like a signal to all."""
    process, output = started(tmp_path)
    time.sleep(random.Random(trial).uniform(0.0, 2.0))
    pids = [process.pid]
    if target == "rank 1":
        pids = [pid for pid in still_running(str(output)) if rank_of(pid) == "1"]
    os.kill(pids[0], signum)
    _, complaint = process.communicate(timeout=60)  # it hangs if that is not enough
    assert process.returncode == 128 + signum
    assert complaint.count("stopped at step") == 1
    assert still_running(str(output)) == []


@pytest.mark.soak
def test_a_killed_launcher_leaves_no_process_behind(tmp_path):
    process, output = started(tmp_path)
    process.kill()
    process.communicate(timeout=60)
    wait_until(lambda: not still_running(str(output)))
    assert "stopped at step" not in (output / "train.log").read_text()
    assert last_state(output).is_dir()


@pytest.mark.soak
def test_torchrun_starts_the_same_run(tmp_path):
    output = tmp_path / "run"
    words = [*TORCHRUN, "-m", "vitkit", *ALONE[3:], "--max-steps=10", f"--output={output}"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.count("processes: 2 (ddp), 32 images each make a batch of 64") == 1
    assert last_state(output).name == "step-00000010"


def test_processes_that_fail_before_there_is_a_run_name_no_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(vitkit.VitkitError) as error:
        vitkit.train("digits", output=tmp_path / "run", devices=2, device="cpu")
    assert re.search(
        r"^rank 0 on .* \(process \d+\) ended with exit code 1; "
        r"all 2 processes are stopped; no state is saved yet$",
        str(error.value),
    )
