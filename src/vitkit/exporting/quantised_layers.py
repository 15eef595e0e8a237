"""Layers that a runtime executes in int8, read back after its optimisation."""

from __future__ import annotations

from collections import Counter
from typing import Any

INT8 = ("i8", "u8")
"""OpenVINO's names of the precisions of 8 bits."""
PRODUCTS = ("FullyConnected", "MatMul", "Convolution")
"""Layer types that multiply matrices: the ones that int8 makes faster."""


def count_int8_layers(compiled: Any) -> dict[str, int]:
    """Count the products of matrices that OpenVINO executes in int8, by layer type.

    A model whose file holds int8 weights may still be executed in float32; the executed graph
    has the truth.

    Args:
        compiled: `openvino.CompiledModel`.
    """
    counts: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ordered_ops():
        facts = node.get_rt_info()
        kind, precision = (facts[name].astype(str) for name in ("layerType", "runtimePrecision"))
        if kind in PRODUCTS and precision in INT8:
            counts[kind] += 1
    return dict(counts)
