"""What the command line sets for its own process before torch is imported."""

import gc
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from vitkit.process import SPINCOUNT, available_cores, shorten_spinning, uncollected_imports

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


FAULTS = """
import resource, torch
from statistics import median
from vitkit.process import keep_freed_memory
keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for size in (2**20, 2**24):  # 4 and 64 MB
    calls = []
    for call in range(21):
        before = faults()
        torch.zeros(size) + 1
        calls.append(faults() - before)
    print(int(median(calls)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("own", [{}, {"MALLOC_MMAP_THRESHOLD_": "131072"}])
def test_freed_memory_is_used_again_unless_the_user_decides(own: dict[str, str]):
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", FAULTS], env=plain | own, capture_output=True,
                          text=True, check=True)  # fmt: skip
    faults = [int(line) for line in done.stdout.split()]
    if own:
        assert faults[0] > 100  # a call has two tensors of 1,024 pages of 4 kB
    else:
        assert faults == [0, 0]


@pytest.mark.parametrize("own", [{"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_a_user_s_own_setting_wins(own: dict[str, str]):
    environment = dict(own)
    shorten_spinning(environment)
    assert environment == own


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [("0::/job/step\n", {"job/step/cpu.max": "300000 100000\n"}, 3),
     ("0::/job/step\n", {"job/cpu.max": "200000 100000", "job/step/cpu.max": "max 100000"}, 2),
     ("0::/\n", {"cpu.max": "max 100000\n"}, 8), ("0::/\n", {"cpu.max": "5000 100000\n"}, 1),
     ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
     ("4:cpu,cpuacct:/job\n0::/job\n", {"job/cpu.max": "150000 100000"}, 2),
     ("4:cpu,cpuacct:/job\n0::/\n", {"cpu/job/cpu.cfs_quota_us": "250000\n",
                                     "cpu/job/cpu.cfs_period_us": "100000\n"}, 3),
     ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
     ("4:cpuset:/\n", {}, 8), ("0::/\n", {"cpu.max": "nonsense\n"}, 8), ("0::/gone:else\n", {}, 8),
     (None, {}, 8)],
)  # fmt: skip
def test_a_job_has_the_cores_of_its_affinity_and_its_quota(
    group, files, cores, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    write_groups(tmp_path, group, files)
    assert available_cores(tmp_path) == cores


def write_groups(root: Path, group: str | None, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    if group is not None:
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(group)


def test_make_demo_sets_the_spinning_of_the_command():
    makefile = Path(__file__).parents[1] / "Makefile"
    assert f"GOMP_SPINCOUNT=$${{GOMP_SPINCOUNT:-{SPINCOUNT}}} " in makefile.read_text()
