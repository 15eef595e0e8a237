"""Bad images of every kind are all found, by name and reason, and no good one is."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from bad_images import CONTENTS, TRAPS, make_bad_folder

from vitkit import ImageError, check, open_dataset

KINDS = len(CONTENTS) + len(TRAPS)
CHECK = [sys.executable, "-m", "vitkit", "check"]
MEASURE = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
print(os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""
"""Runs a command and prints its exit code and its peak of memory.

The peak of a new process begins at the memory of the process that started it, and this one holds
all that the tests before have loaded; an interpreter that has imported nothing holds a few MB.
"""


def found_in(root: Path) -> dict[str, str]:
    report = check(root)
    return {problem.name: problem.reason for part in report.problems.values() for problem in part}


def test_thirty_kinds_and_more_among_good_ones(tmp_path: Path) -> None:
    assert KINDS >= 30
    expected = make_bad_folder(tmp_path, bad=2, good=60)
    reasons = found_in(tmp_path)
    assert reasons.keys() == expected.keys()
    wrong = {name: reason for name, reason in reasons.items() if reason not in expected[name]}
    assert wrong == {}


@pytest.mark.soak
def test_each_kind_takes_little_time(tmp_path: Path) -> None:
    make_bad_folder(tmp_path, bad=2, good=0)
    for split in open_dataset(tmp_path).splits.values():
        for index in range(len(split)):
            start = time.process_time()  # a busy machine only makes it wait
            with pytest.raises(ImageError):
                split.read(index)
            assert time.process_time() - start <= 5, split.name(index)


@pytest.mark.soak
def test_fifty_of_each_kind_among_1000(tmp_path: Path) -> None:
    expected = make_bad_folder(tmp_path / "data", bad=50, good=1000)
    assert len(expected) == 50 * KINDS >= 1500
    out = tmp_path / "report.json"
    environment = os.environ | {"VITKIT_CACHE": str(tmp_path / "cache")}
    command = [*CHECK, str(tmp_path / "data"), "--output", str(out)]
    measured = subprocess.run(
        [sys.executable, "-c", MEASURE, *command],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    code, peak = map(int, measured.stdout.splitlines()[-1].split())
    assert code == 2, measured.stderr
    report = json.loads(out.read_text())
    reasons = {problem["name"]: problem["reason"] for problem in report["problems"]}
    assert reasons.keys() == expected.keys()
    assert all(reason in expected[name] for name, reason in reasons.items())
    assert all(problem["detail"] for problem in report["problems"])
    megabytes = peak / (1e6 if sys.platform == "darwin" else 1e3)  # macOS counts bytes
    assert megabytes <= 600


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    make_bad_folder(tmp_path, bad=0, good=40)
    secret = sorted((tmp_path / "train" / "cat").iterdir())[2]
    secret.chmod(0)
    assert found_in(tmp_path) == {f"train/cat/{secret.name}": "missing"}
