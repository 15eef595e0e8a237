"""The same command, seed and machine give the same bits, beside a busy core too."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from training.tiny_runs import end_of, run, settings_of

from vitkit import TrainConfig
from vitkit.training.resume_check import prove_resume

SMALL = {"image_size": 16, "patch_size": 4, "width": 32, "depth": 2, "num_heads": 2,
         "mlp_width": 64}  # fmt: skip


@pytest.fixture
def busy_core() -> Iterator[None]:
    """One other process that takes a core."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield
    process.kill()
    process.wait()


def ends(folder: Path, times: int) -> set[str]:
    """The hashes of some runs of one command, with everything that `auto` decides."""
    settings = {"amp": "auto", "threads": None, "device": "auto", "epochs": 1, "max_steps": 4,
                "warmup_epochs": 0.0}  # fmt: skip
    return {end_of(run(folder / str(n), **settings).run) for n in range(times)}


def keep_settings_alone(run_folder: Path) -> None:
    """Leave what a run leaves that ends before its first state."""
    settings = (run_folder / "config.yaml").read_bytes()
    shutil.rmtree(run_folder)
    run_folder.mkdir()
    (run_folder / "config.yaml").write_bytes(settings)


def test_two_runs_of_one_command_end_with_the_same_bits(tmp_path):
    assert len(ends(tmp_path, 2)) == 1


def test_a_run_that_ended_before_its_first_state_starts_again_as_it_had_decided(tmp_path):
    """On another processor, say: here `auto` would take float32 for so small a model."""
    asked = {"output": tmp_path / "run", "max_steps": 2}
    run(**asked, amp="bfloat16", attention_kernel="fused", threads=1)
    keep_settings_alone(tmp_path / "run")
    left_open = {"amp": "auto", "attention_kernel": "auto", "threads": None, "resume": "auto"}
    run(**asked, **left_open)
    again = settings_of(tmp_path / "run")
    assert (again["amp"], again["attention_kernel"], again["threads"]) == ("bfloat16", "fused", 1)
    keep_settings_alone(tmp_path / "run")
    run(**asked, **left_open, batch_size=32)
    assert settings_of(tmp_path / "run")["amp"] == "off"


@pytest.mark.soak
def test_ten_runs_end_with_the_same_bits_beside_a_busy_core(tmp_path, busy_core):
    assert len(ends(tmp_path, 10)) == 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_proof_of_resuming_holds_twenty_times_beside_a_busy_core(busy_core):
    config = TrainConfig(data="digits", spec=SMALL, epochs=3, batch_size=64)
    assert [prove_resume(config).is_exact for _ in range(20)] == [True] * 20
