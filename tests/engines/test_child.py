"""Functions in child processes that return a value, crash, hang or fail."""

import os
import signal
import threading
from pathlib import Path

import child_functions
import pytest
from processes import wait_until

import vitkit
from vitkit.process import ChildError, run_in_child


@pytest.fixture(autouse=True)
def _findable(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_value_comes_back():
    assert run_in_child(child_functions.add, 2, 40, seconds=60.0) == 42


def test_what_cannot_be_sent_is_one_line():
    with pytest.raises(ChildError, match=r"it cannot be sent to another process: .*lambda"):
        run_in_child(child_functions.add, 2, lambda: 40, seconds=60.0)


@pytest.mark.parametrize(
    ("function", "arguments", "reason"),
    [
        (child_functions.refuse, (), "precision int3 does not exist"),
        (child_functions.fail, (), "RuntimeError: no such operator"),
        (child_functions.leave, (), "ended with code 7: last words"),
        (child_functions.hang, (), "no answer in 1.5 s"),
        (os.kill, (0, signal.SIGFPE), "ended by SIGFPE"),
        (os.kill, (0, signal.SIGKILL), "ended by SIGKILL, perhaps as the memory was full"),
    ],
)
def test_an_end_without_a_value_is_one_line(function, arguments, reason):
    seconds = 1.5 if function is child_functions.hang else 60.0
    with pytest.raises(ChildError) as raised:
        run_in_child(function, *arguments, seconds=seconds)
    assert str(raised.value) == reason


def test_a_signal_to_this_process_ends_the_child_too(tmp_path):
    place = tmp_path / "pid"

    def interrupt() -> None:
        wait_until(lambda: place.exists() and place.read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=interrupt).start()
    with pytest.raises(vitkit.Interrupted):
        run_in_child(child_functions.hang, str(place), seconds=60.0)
    with pytest.raises(ProcessLookupError):
        os.kill(int(place.read_text()), 0)
