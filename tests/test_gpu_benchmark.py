"""The benchmark of a GPU, with tiny models and without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak
SCRIPT = Path(__file__).parents[1] / "benchmarks/gpu.py"
COMMAND = [sys.executable, str(SCRIPT), "--models", "Ti", "--blocks", "1"]


def ended(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environment,
    )  # fmt: skip


def test_the_libraries_are_compared_and_written(tmp_path: Path):
    output = tmp_path / "gpu.json"
    parts = ("inference", "training", "latency", "checkpointing")
    process = ended("--smoke", "--output", str(output), "--only", *parts)
    assert process.returncode == 0, process.stderr
    made = json.loads(output.read_text(encoding="utf-8"))
    assert set(made) == {"about", *parts}
    tiny = made["inference"]["Ti"]
    assert tiny["logits"]["float32_difference"] <= 1e-4
    for rows in (tiny["rows"], made["training"]["Ti"]["rows"]):
        for name in ("timm eager", "vitkit eager", "timm compiled", "vitkit compiled"):
            low, high = rows[name]["faster"][1:]
            assert 0 < low <= rows[name]["faster"][0] <= high
            assert rows[name]["images_per_second"] > 0
    assert "timm eager" in made["latency"]["Ti"]


def test_without_a_gpu_it_says_so():
    process = ended()
    assert process.returncode != 0
    assert "there is no GPU here; --smoke works without one" in process.stderr
