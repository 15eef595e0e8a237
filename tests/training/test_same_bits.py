"""The same command, seed and machine give the same bits, beside a busy core too."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from training.tiny_runs import end_of, run

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


def test_two_runs_of_one_command_end_with_the_same_bits(tmp_path):
    assert len(ends(tmp_path, 2)) == 1


@pytest.mark.soak
def test_ten_runs_end_with_the_same_bits_beside_a_busy_core(tmp_path, busy_core):
    assert len(ends(tmp_path, 10)) == 1


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_the_proof_of_resuming_holds_twenty_times_beside_a_busy_core(busy_core):
    config = TrainConfig(data="digits", spec=SMALL, epochs=3, batch_size=64)
    assert [prove_resume(config).is_exact for _ in range(20)] == [True] * 20
