"""Child processes that return a value, crash, hang or fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from vitkit.engines.child import run_child

FUNCTIONS = {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}


def test_a_value_comes_back():
    result = run_child("child_functions:add", "2", "40", seconds=60.0, environment=FUNCTIONS)
    assert (result.value, result.reason) == (42, "")


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("refuse", "precision int3 does not exist"),
        ("fail", "RuntimeError: no such operator"),
        ("leave", "ended with code 7: last words"),
        ("absent", "AttributeError: module 'child_functions' has no attribute 'absent'"),
    ],
)
def test_errors_are_reasons(function, reason):
    result = run_child(f"child_functions:{function}", seconds=60.0, environment=FUNCTIONS)
    assert (result.value, result.reason) == (None, reason)


@pytest.mark.parametrize("name", ["SIGFPE", "SIGILL", "SIGSEGV"])
def test_a_crash_is_a_reason(name):
    result = run_child("child_functions:crash", name, seconds=60.0, environment=FUNCTIONS)
    assert (result.value, result.reason) == (None, f"ended by {name}")


def test_a_hang_is_ended():
    result = run_child("child_functions:hang", seconds=1.5, environment=FUNCTIONS)
    assert result.reason == "no answer in 1.5 s"
