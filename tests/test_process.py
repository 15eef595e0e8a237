"""What the command line sets for its own process before torch is imported."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vitkit import cli, process
from vitkit.process import shorten_spinning, uncollected_imports

PROGRAM = """
import os, sys
from vitkit.cli import main
sys.argv = ["vitkit", "--version"]
try:
    main()
finally:
    print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules)
"""

IMPORTS = """
import gc
from vitkit.process import uncollected_imports
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
with uncollected_imports():
    import torch
print(len(collections), gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


def test_imports_are_not_collected_and_what_follows_is():
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True,
                          check=True)  # fmt: skip
    assert done.stdout.split() == ["0", "True", "True"]


def test_garbage_is_collected_as_before_where_torch_is_imported():
    frozen = gc.get_freeze_count()
    with uncollected_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen  # freed ones leave the count


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


def test_a_ctrl_c_that_a_library_drops_is_no_internal_error(monkeypatch, capsys):
    """numpy, imported by torch, turns it into an `ImportError`."""

    def run(arguments: list[str]) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            raise ImportError("cannot load module more than once per process") from None

    module = SimpleNamespace(run=run, describe=None)
    monkeypatch.setattr(cli, "import_module", lambda name: module)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    monkeypatch.setattr(process, "INTERRUPTS", cli.INTERRUPTS)
    try:
        assert cli.run(["train", "photos"]) == 1  # a real failure of an import
        assert "internal error" in capsys.readouterr().err
        process.remember_interrupts()
        assert cli.run(["train", "photos"]) == 130
        message = "vitkit: stopped by SIGINT before training began; no run was changed\n"
        assert capsys.readouterr().err == message
    finally:
        signal.signal(signal.SIGINT, before)
        cli.INTERRUPTS.clear()
