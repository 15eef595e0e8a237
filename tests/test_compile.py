"""torch.compile without graph breaks, torch.export and torch.jit.trace, against eager."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from compiling import CASES, QUICK, SPEC, STEMS, VARIATIONS
from peers import TOLERANCE

pytestmark = pytest.mark.timeout(600)
Results = dict[str, dict[str, object]]


@pytest.fixture(scope="module")
def results(request, tmp_path_factory) -> Results:
    """The selected cases, run in one child process: starting up takes most of the time."""
    params = [getattr(item, "callspec", None) for item in request.session.items
              if item.path == request.path]  # fmt: skip
    here = Path(__file__).parent
    environment = os.environ | {
        "JAXTYPING_DISABLE": "1",  # its checks break graphs
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(here),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path_factory.mktemp("inductor")),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # else processes start for its one kernel
        "TORCHINDUCTOR_VEC_ISA_OK": "1",  # else a program is compiled to try each instruction set
    }
    child = subprocess.run(
        [sys.executable, "-W", "error", str(here / "compiling.py"),
         *(found.params["case"] for found in params if found)],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    lines = [json.loads(line) for line in child.stdout.splitlines()]
    return {line.pop("case"): line for line in lines}


LATER = {f"{how} {name} {backend}".strip() for name in (VARIATIONS | STEMS).keys() - QUICK
         for how, backend in (("compile", "aot_eager"), ("export", ""))}  # fmt: skip
LATER.add("compile plain inductor")  # a C++ compiler takes as long as all others


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.soak] * (case in LATER)) for case in CASES]
)
def test_it_equals_the_eager_model(results, case):
    assert "error" not in results[case], results[case]["error"]
    assert results[case]["difference"] <= TOLERANCE


def test_the_variations_are_those_that_trace_differently():
    specs = [SPEC.replace(**changes) for changes in VARIATIONS.values()]
    assert {spec.positions for spec in specs} == {"learned", "rope", "sincos_2d"}
    assert {spec.pooling for spec in specs} == {"cls", "mean", "map"}
