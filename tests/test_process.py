"""What the command line sets for its own process before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vitkit.process import shorten_spinning

PROGRAM = """
import os, sys
from vitkit.cli import main
sys.argv = ["vitkit", "--version"]
try:
    main()
finally:
    print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
"""


def test_the_command_line_shortens_spinning_before_torch_is_imported():
    unset = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=unset, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.stdout.splitlines()[-1] == "1000 False"


@pytest.mark.parametrize("own", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_a_user_s_own_setting_wins(own: dict[str, str]):
    environment = dict(own)
    shorten_spinning(environment)
    assert environment == own
