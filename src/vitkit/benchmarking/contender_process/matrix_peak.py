"""The largest speed of matrix products that a library reaches on this machine.

Runs in a process of its own. No library is the fastest on every processor (torch's products in
float32 are slow on AMD's), so that the peak is that of several, each with operands that a ViT has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from vitkit.engines.openvino import HINTS, refuse_no_bfloat16
from vitkit.engines.telemetry import import_runtime
from vitkit.errors import SettingError

SIDES = (512, 2048)
"""Rows and columns of both operands; the larger ones only where the smaller ones are fast."""
SLOW = 0.05
"""Seconds of a product from which no larger one is tried. In half precision torch takes minutes for
it on a processor without instructions for that."""
REPEATS = 5
SECONDS = 0.3
"""Spent on each size and library at least."""


def matrix_peak(precision: str, threads: int, sides: Sequence[int] = SIDES) -> dict[str, float]:
    """Return the speed of square matrix products by each library, in operations per second.

    A multiply-add counts as two. Operands are random: zeros are faster on some hardware.

    Args:
        precision: float32 or bfloat16.
        threads: of the processor.
        sides: rows and columns, from small to large; the fastest product counts.
    """
    torch.set_num_threads(threads)
    found: dict[str, float] = {}
    slow: set[str] = set()
    for side in sides:
        for name, product in _products(precision, threads, side):
            if name in slow:
                continue
            seconds = _seconds(product)
            found[name] = max(found.get(name, 0.0), 2 * side**3 / seconds)
            if seconds > SLOW:
                slow.add(name)
    return found


def _seconds(product: Callable[[], object]) -> float:
    """Return the median seconds of a product after a first one."""
    product()
    seconds: list[float] = []
    start = time.perf_counter()
    while len(seconds) < REPEATS or time.perf_counter() - start < SECONDS:
        began = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _products(
    precision: str, threads: int, side: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator) for _ in "ab")
    # as in a layer: without transposing, half precision is far slower on some processors
    dtype = getattr(torch, precision)
    operands = left.to(dtype), right.to(dtype)
    yield "torch", lambda: F.linear(*operands)
    if precision == "float32":
        arrays = left.numpy(), right.numpy()
        yield "numpy", lambda: arrays[0] @ arrays[1]
    if _openvino_has(precision):
        yield "openvino", _openvino_product(left.numpy(), right.numpy(), precision, threads)


def _openvino_has(precision: str) -> bool:
    """Return True if OpenVINO is installed and multiplies in this precision here."""
    if not find_spec("openvino"):
        return False
    if precision == "bfloat16":
        try:
            refuse_no_bfloat16()
        except SettingError:
            return False
    return True


def _openvino_product(
    left: np.ndarray, right: np.ndarray, precision: str, threads: int
) -> Callable[[], object]:
    """Return a product with a constant, as weights are."""
    openvino: Any = import_runtime("openvino")
    operators: Any = import_runtime("openvino.opset13")
    given = operators.parameter(left.shape, np.float32)
    product = operators.matmul(given, operators.constant(right), False, False)
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": HINTS[precision],
    }
    model = openvino.Model([product], [given])
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    return lambda: request.infer([left], share_inputs=True)
