"""`--prove-resume`: the proof on the user's own data."""

from __future__ import annotations

import sys

import pytest
from training.tiny_runs import command

from vitkit import cli


@pytest.mark.timeout(600)
def test_the_proof_on_the_user_s_data(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = command(tmp_path / "unused", epochs=1, warmup_epochs=0.5, batch_size=128)
    # the runs of the proof have no trackers, so none need be installed
    monkeypatch.setitem(sys.modules, "wandb", None)
    words += ["--logger", "wandb"]
    assert cli.run([*words, "--prove-resume"]) == 0
    first, second, verdict = capsys.readouterr().out.splitlines()
    assert first.split()[0] == second.split()[0]
    assert "10 steps without a stop" in first
    assert "killed (SIGKILL) in step 5 and resumed" in second
    assert verdict == "the same bits"
    assert list(tmp_path.iterdir()) == []
