"""The examples run as a user runs them, each in a process of its own and from an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.timeout(600)
def test_a_transformer_learns_to_write_backwards(tmp_path):
    """The example in full, 15 to 20 seconds of one core."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "reverse.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "backward -> drawkcab" in done.stdout
    right, words = re.findall(r"held out  (\d+) of (\d+) words correct", done.stdout)[0]
    # 1000 where this was written; another CPU's rounding may cost a word
    assert int(words) == 1000
    assert int(right) >= 998, done.stdout
    assert not done.stderr
