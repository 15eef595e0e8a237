"""The largest speed of matrix products that a library reaches on this machine.

No library is the fastest on every processor (torch's products in float32 are slow on AMD's), so
that the peak is that of several, each with operands that a ViT has.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from vitkit.engines.registry import import_runtime
from vitkit.engines.runtimes import HINTS, refuse_no_bfloat16
from vitkit.errors import SettingError

SIDES = (512, 2048)
"""Rows and columns of both operands; the larger ones only where the smaller ones are fast."""
SLOW = 0.05
"""Seconds of a product from which no larger one is tried. In half precision torch takes minutes for
it on a processor without instructions for that."""
REPEATS = 12


def product_speeds(precision: str, threads: int) -> dict[str, float]:
    """Return the speed of square matrix products by each library, in operations per second.

    A multiply-add counts as two. Operands are random: zeros are faster on some hardware.
    """
    torch.set_num_threads(threads)
    found: dict[str, float] = {}
    slow: set[str] = set()
    for side in SIDES:
        for name, product in _products(precision, threads, torch.randn(side, side)).items():
            if name not in slow:
                seconds = _seconds(product)
                found[name] = max(found.get(name, 0.0), 2 * side**3 / seconds)
                if seconds > SLOW:
                    slow.add(name)
    return found


def _seconds(product: Callable[[], object]) -> float:
    """Return the median seconds of a product after a first one."""
    product()
    seconds: list[float] = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        product()
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def _products(precision: str, threads: int, full: Tensor) -> dict[str, Callable[[], object]]:
    """Return a product of an operand with itself by each library, as in a layer."""
    half, array = full.to(getattr(torch, precision)), full.numpy()
    made: dict[str, Callable[[], object]] = {"torch": lambda: F.linear(half, half)}
    if precision == "float32":
        made["numpy"] = lambda: array @ array
    if find_spec("openvino"):
        with suppress(SettingError):
            if precision == "bfloat16":
                refuse_no_bfloat16()
            openvino: Any = import_runtime("openvino")
            operators: Any = import_runtime("openvino.opset13")
            given = operators.parameter(array.shape, np.float32)
            product = operators.matmul(given, operators.constant(array), False, False)
            settings = {"INFERENCE_NUM_THREADS": threads,
                        "INFERENCE_PRECISION_HINT": HINTS[precision]}  # fmt: skip
            model = openvino.Model([product], [given])
            request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
            made["openvino"] = lambda: request.infer([array], share_inputs=True)
    return made
