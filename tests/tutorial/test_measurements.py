"""The tutorial's long trainings, made tiny: they run, and leave the committed numbers alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial"
SHORT = ("mnist-mended", "ingredients", "masked", "bugs", "photograph")
"""Experiments of each kind, for every commit."""
ALL = (
    "mnist-notebook", "mnist-mended", "ingredients", "data-size", "positions", "masked", "bugs",
    "bugs-positions", "bugs-fashion", "fashion-rates", "mnist-rates", "mnist-norms", "one-page",
    "photograph",
)  # fmt: skip


def contents() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (TUTORIAL / "results").glob("*")}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("names", [SHORT, pytest.param(ALL, marks=pytest.mark.soak)], ids=len)
def test_experiments_run(names):
    before = contents()
    words = [sys.executable, TUTORIAL / "measure.py", *names, "--quick"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for name in names:
        assert f"\n{name}: " in f"\n{ended.stdout}"
    assert ended.stdout.count("nothing is written") == len(names)
    assert contents() == before


def test_committed_numbers_say_where_they_come_from():
    assert contents()
    for name, text in contents().items():
        found = json.loads(text)
        assert found["processor"], name
        assert found["command"].startswith("python "), name
