"""What every test needs before anything else is imported."""

import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import shape_checks
import torch
from long_files import LONGEST


def declare_torchvision_operators() -> None:
    """Let torchvision be imported beside a CPU-only torch.

    timm, a peer of the parity tests, imports torchvision; vitkit never does. Where torchvision's
    own library loads, its operators are there; where it does not (it wants CUDA), they must be
    declared before its Python files name them.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    for library in Path(found.origin).parent.glob("_C*.so"):
        try:
            torch.ops.load_library(str(library))
        except OSError:
            continue
        return
    operators = torch.library.Library("torchvision", "DEF")
    operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    KEPT.append(operators)


def only_seen_by_the_system(descriptor: int) -> None:
    """Stand in for `os.fsync`: no test cuts the power, and a disk takes milliseconds each time."""
    os.fstat(descriptor)  # a closed file is still an error


KEPT: list[torch.library.Library] = []
gc.disable()  # until all is imported
os.fsync = only_seen_by_the_system
torch.set_num_threads(1)  # a fork of a process with more threads may wait without end
declare_torchvision_operators()
shape_checks.install()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first: of two workers, none is left with one when the other is done."""
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.stem, len(rank)))


def pytest_collection_finish() -> None:
    """Leave what is imported by now out of all garbage collections, each of which took 0.5 s."""
    gc.freeze()
    gc.enable()


def end_tracing() -> None:
    """Measure no coverage in a fork, which ends without writing what it has measured."""
    sys.settrace(None)
    threading.settrace(None)


os.register_at_fork(after_in_child=end_tracing)


def pytest_runtest_setup() -> None:
    shape_checks.made.clear()


@pytest.fixture(autouse=True, scope="session")
def a_cache_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests remember of their images stays out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def wrong_types_come_in() -> Iterator[None]:
    """Arguments of another type reach vitkit's own checks, as they do where no tests run."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
