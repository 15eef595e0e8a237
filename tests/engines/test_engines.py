"""Every engine against the model itself, in a process that may not open an internet socket."""

import json
import os
import platform
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from refused_sockets import SOCKET_CALLS

TESTS = Path(__file__).parents[1]
NO_FILTER = pytest.mark.skipif(
    platform.machine() not in SOCKET_CALLS, reason="the filter is for Linux on x86-64 and ARM"
)


def ended(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "JAXTYPING_DISABLE": "1",  # its checks break graphs
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(TESTS),
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else a program is compiled to try each instruction set
    }
    return subprocess.run(
        [sys.executable, str(TESTS / "engines_in_child.py"), *arguments],
        capture_output=True, text=True, timeout=300, check=False, env=environment,
    )  # fmt: skip


def compared(cache: Path, cases: str) -> list[dict[str, object]]:
    process = ended(cache, cases)
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]


def test_logits_are_those_of_the_model(tmp_path):
    *rows, files = compared(tmp_path, "fast")
    assert [row["engine"] for row in rows] == ["openvino", "onnxruntime"]
    assert max(row["difference"] for row in rows) <= 1e-5
    kept = ["model.onnx", "openvino-float32.bin", "openvino-float32.xml"]
    assert files["files"] == kept, "converted models are kept"


@pytest.mark.soak
def test_every_engine_runs_every_kind_of_model(tmp_path):
    *rows, _ = compared(tmp_path, "all")
    assert len(rows) == 9
    assert max(row["difference"] for row in rows) <= 1e-5


@NO_FILTER
def test_a_socket_would_have_been_noticed(tmp_path):
    assert ended(tmp_path, "--open-a-socket").returncode == -signal.SIGSYS


@pytest.mark.soak
@NO_FILTER
def test_quantisation_opens_no_internet_socket(tmp_path):
    process = ended(tmp_path, "--quantise")
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-1] == "True", "NNCF is imported"


@pytest.mark.soak
@NO_FILTER
@pytest.mark.parametrize("off", [True, False])
def test_onnxruntime_would_report_after_a_while(tmp_path, off):
    """Without vitkit's switch, ONNX Runtime 1.29 and later report within a minute."""
    process = ended(tmp_path, "--wait", "quietly" if off else "loudly")
    assert process.returncode == (0 if off else -signal.SIGSYS), process.stderr
