"""Quantisation to int8 by NNCF: the linear layers of the blocks, and nothing else.

Patch embedding, head, norms, softmax, the products of attention and the residual sums stay in
float32: quantised, they cost most of the accuracy. SmoothQuant (arXiv 2211.10438) moves the
outliers of activations into the weights first.
"""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import numpy as np

from vitkit.engines.telemetry import import_runtime
from vitkit.errors import SettingError

SUBSET_SIZE = 300
"""Images that the ranges of activations are measured on."""
INT8 = ("i8", "u8")
"""OpenVINO's names of the precisions of 8 bits."""
PRODUCTS = ("FullyConnected", "MatMul", "Convolution")
"""Executed layer types that multiply matrices: the ones that int8 makes faster."""
QUANTISABLE = ("MatMul", "Convolution", "GroupConvolution", "ScaledDotProductAttention")
"""Operators that NNCF would quantise."""
ATTENTION = ("ScaledDotProductAttention", "Softmax")
"""Operators of which every block has one."""
TOKENS_RANK = 3
"""Axes of tokens (B, T, D); the head's input has two."""


def quantise(model: Any, images: Iterable[Any], *, layers: int | None = None) -> Any:
    """Return a quantised OpenVINO model.

    Args:
        model: an `openvino.Model` of images (B, C, H, W), or of pixels (B, H, W, 3); it may be
            changed.
        images: what the model takes, without the batch axis, to measure ranges on: preprocessed
            images (C, H, W), tensors or arrays, or pixels (H, W, 3) uint8; the first 300 are used.
        layers: the number of linear layers in the blocks; default all that take tokens, from the
            first block on.

    Raises:
        SettingError: no image, or a model without linear layers to quantise.
    """
    chosen = _linear_layers(model)[:layers]
    if not chosen:
        raise SettingError("precision int8: the model has no linear layers in its blocks")
    inputs = []
    for image in images:
        array = np.asarray(image)
        # pixels stay whole numbers, for a model that has its preprocessing inside
        dtype = np.uint8 if array.dtype == np.uint8 else np.float32
        inputs.append(np.ascontiguousarray(array[None], dtype=dtype))
        if len(inputs) == SUBSET_SIZE:
            break
    if not inputs:
        raise SettingError("precision int8 needs images to calibrate with, and got none")
    return _quantised(model, inputs, set(chosen))


def _quantised(model: Any, inputs: list[Any], chosen: set[str]) -> Any:
    """Quantise the chosen products of a model."""
    with _quiet():
        nncf = import_runtime("nncf")
        others = []
        for node in model.get_ordered_ops():
            if node.get_type_name() in QUANTISABLE and node.get_friendly_name() not in chosen:
                others.append(node.get_friendly_name())
        return nncf.quantize(
            model,
            nncf.Dataset(inputs),
            preset=nncf.QuantizationPreset.MIXED,
            model_type=nncf.ModelType.TRANSFORMER,
            subset_size=len(inputs),
            ignored_scope=nncf.IgnoredScope(names=others),
            # Weights of 7 bits: processors without VNNI add pairs of products in 16 bits, which
            # those of 8 bits overflow.
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=nncf.OverflowFix.ENABLE
            ),
        )


def _linear_layers(model: Any) -> list[str]:
    """Return the names of the linear layers that take tokens, from the first block on, in order."""
    names: list[str] = []
    in_blocks = False
    for node in model.get_ordered_ops():
        kind = node.get_type_name()
        if kind in ATTENTION and not in_blocks:
            # the last one before is the first block's projection to queries, keys and values
            names = names[-1:]
            in_blocks = True
        elif kind == "MatMul" and _is_linear(node):
            names.append(node.get_friendly_name())
    return names if in_blocks else []


def _is_linear(node: Any) -> bool:
    """Return True for a product of tokens with constant weights."""
    weights = node.input_value(1).get_node()
    while weights.get_type_name() in ("Convert", "Transpose"):
        weights = weights.input_value(0).get_node()
    rank = node.get_output_partial_shape(0).rank
    is_tokens = rank.is_static and rank.get_length() == TOKENS_RANK
    return bool(weights.get_type_name() == "Constant" and is_tokens)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what NNCF prints: warnings, log lines and progress bars."""
    logger = logging.getLogger("nncf")
    disabled = logger.disabled
    logger.disabled = True
    try:
        # no progress bars
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = disabled


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
