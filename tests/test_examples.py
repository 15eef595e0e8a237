"""The examples run as a user runs them, each in a process of its own and from an empty folder."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from peers import peer

EXAMPLES = Path(__file__).parent.parent / "examples"
RESEARCH = sorted((EXAMPLES / "research").glob("[0-9]*.py"))
PRINTED = {
    "01_own_loop": "better than chance: True",
    "02_features": "the last layer is the same: True",
    "03_attention": "the rows sum to 1: True",
    "04_own_head": "loaded as saved: True",
    "05_own_dataset": "pairs of path and label: ('bright', 'dark')",
    "06_own_loss": "trained: 10 steps",
    "07_compile": "same logits with a record: True",
    "08_ddp": "step 2: loss",
    "09_lora": "loaded as saved: True",
    "10_export": "ONNX: True",
}
"""Script -> a line that it prints only if all went well."""
APART = {
    "05_own_dataset": (),
    "07_compile": (),  # the checks of shapes in these tests break compiled graphs
    "08_ddp": ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"),
    "10_export": (),
}
"""Script that takes long, or needs processes of its own -> what starts them."""


def ended(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_transformer_learns_to_write_backwards(tmp_path):
    """The example in full, 15 to 20 seconds of one core."""
    done = ended(tmp_path, EXAMPLES / "reverse.py")
    assert done.returncode == 0, done.stderr
    assert "backward -> drawkcab" in done.stdout
    right, words = re.findall(r"held out  (\d+) of (\d+) words correct", done.stdout)[0]
    # 1000 where this was written; another CPU's rounding may cost a word
    assert int(words) == 1000
    assert int(right) >= 998, done.stdout
    assert not done.stderr


@pytest.mark.parametrize("script", RESEARCH, ids=lambda path: path.stem)
def test_a_script_is_short_and_imports_the_public_face_alone(script):
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 40
    assert not re.search(r"^\s*(from|import) vitkit\.", text, flags=re.MULTILINE)
    assert script.stem in PRINTED


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(PRINTED.keys() - APART.keys()))
def test_a_researcher_s_script_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if name == "09_lora":
        peer("peft")
    runpy.run_path(str(EXAMPLES / "research" / f"{name}.py"), run_name="__main__")
    assert PRINTED[name] in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", APART)
def test_a_researcher_s_script_runs_in_processes_of_its_own(name, tmp_path):
    done = ended(tmp_path, *APART[name], EXAMPLES / "research" / f"{name}.py")
    assert done.returncode == 0, done.stderr
    assert PRINTED[name] in done.stdout
