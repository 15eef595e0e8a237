"""What every test needs before anything else is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


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


KEPT: list[torch.library.Library] = []
declare_torchvision_operators()


@pytest.fixture(autouse=True, scope="session")
def a_cache_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests remember of their pictures stays out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITKIT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
