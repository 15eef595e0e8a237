"""The engine `openvino`: the model converted for Intel's runtime, in int8 quantised by NNCF."""

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.export import ExportedProgram

from vitkit.engines import engine, registry
from vitkit.errors import DeviceError, SettingError
from vitkit.io.caches import caching, is_whole

OVModel: TypeAlias = Any
"""An `openvino.Model`."""
HINTS = {"float32": "f32", "bfloat16": "bf16"}
"""Precision of the parts that are not quantised; f32 for all others."""
CAPABILITIES = {"bfloat16": "BF16"}
"""Precision -> the device capability that means instructions for it."""


def build_openvino(request: engine.EngineRequest) -> engine.Forward:
    """Return a compiled model; it is converted once and kept in the folder of the request.

    Raises:
        SettingError: a model that cannot be converted.
        DeviceError: bfloat16 on a processor that would compute in float32.
    """
    refuse_no_instructions(f"precision {request.precision}", request.precision)
    compiled = compile_model(_kept(request), request.precision, request.threads)
    task = compiled.create_infer_request()
    lock = threading.Lock()  # a request has one output

    def forward(images: torch.Tensor) -> torch.Tensor:
        array = np.ascontiguousarray(images.detach().float().cpu().numpy())
        with lock:
            task.infer([array], share_inputs=True)
            # a copy: the memory of the output belongs to the request
            return torch.from_numpy(task.get_output_tensor(0).data.copy())

    return forward


def refuse_no_instructions(what: str, precision: str) -> None:
    """Raise `DeviceError` where the CPU would compute in float32 in spite of the hint.

    Args:
        what: the setting or the file that asks for it.
        precision: the precision.
    """
    core = registry.import_runtime("openvino").Core()
    needed = CAPABILITIES.get(precision)
    if needed and needed not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise DeviceError(
            f"{what}: this processor has no instructions for {precision}, and OpenVINO would "
            "compute in float32; use another precision"
        )


def _kept(request: engine.EngineRequest) -> OVModel:
    """Return the converted model of the folder, or convert it and keep it there."""
    path = None
    if request.folder is not None:
        kind = "int8" if request.precision == "int8" else "float32"
        path = request.folder / f"openvino-{kind}.xml"
        if is_whole(path) and is_whole(path.with_suffix(".bin")):
            return registry.import_runtime("openvino").Core().read_model(path)
    model = to_openvino(engine.program_for_inference(request))
    if request.precision == "int8":
        assert request.calibration is not None, "checked where the engine is built"
        model = quantise(model, request.calibration)
    if path is not None:
        # a cache only saves time; weights are kept in float32
        with contextlib.suppress(OSError, RuntimeError), caching(path.parent) as folder:
            registry.import_runtime("openvino").save_model(
                model, folder / path.name, compress_to_fp16=False
            )
    return model


def to_openvino(program: ExportedProgram, outputs: Sequence[str] = (engine.OUTPUT,)) -> OVModel:
    """Return the OpenVINO model of a program.

    Args:
        program: program of a model, with one input.
        outputs: names of the outputs.
    """
    with engine.without_warnings():
        model = registry.import_runtime("openvino").convert_model(program)
    for output, name in zip(model.outputs, outputs, strict=True):
        output.get_tensor().set_names({name})
    return model


def compile_model(model: OVModel | Path, precision: str, threads: int = 0) -> Any:
    """Return an `openvino.CompiledModel` for the CPU.

    Args:
        model: a model, or its `.xml` file.
        precision: precision of the parts that are not quantised.
        threads: threads of the processor; 0: all cores.
    """
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": HINTS.get(precision, "f32"),
    }
    return registry.import_runtime("openvino").Core().compile_model(model, "CPU", settings)


# Quantisation to int8 by NNCF: the linear layers of the blocks, and nothing else.
#
# Patch embedding, head, norms, softmax, the products of attention and the residual sums stay in
# float32: quantised, they cost most of the accuracy. SmoothQuant (arXiv 2211.10438) moves the
# outliers of activations into the weights first.

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


def quantise(model: OVModel, images: Iterable[Any], *, layers: int | None = None) -> OVModel:
    """Return a quantised OpenVINO model.

    Args:
        model: a model of images (B, C, H, W), or of pixels (B, H, W, 3); it may be changed.
        images: what the model takes, without the batch axis, to measure ranges on: preprocessed
            images (C, H, W) float32, or pixels (H, W, 3) uint8; tensors or arrays.
        layers: the number of linear layers in the blocks; default all that take tokens, from the
            first block on.

    Raises:
        SettingError: a model without linear layers to quantise.
    """
    chosen = _linear_layers(model)[:layers]
    if not chosen:
        raise SettingError("precision int8: the model has no linear layers in its blocks")
    nncf = registry.import_runtime("nncf")
    inputs = [np.ascontiguousarray(np.asarray(image)[None]) for image in images]
    others = []
    for node in model.get_ordered_ops():
        if node.get_type_name() in QUANTISABLE and node.get_friendly_name() not in chosen:
            others.append(node.get_friendly_name())
    with _quiet():
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
    if in_blocks:
        return names
    return []


def _is_linear(node: Any) -> bool:
    """Return True for a product of tokens with constant weights."""
    weights = node.input_value(1).get_node()
    while weights.get_type_name() in ("Convert", "Transpose"):
        weights = weights.input_value(0).get_node()
    rank = node.get_output_partial_shape(0).rank
    is_tokens = rank.is_static and rank.get_length() == TOKENS_RANK
    return bool(weights.get_type_name() == "Constant" and is_tokens)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what NNCF prints: warnings, log lines and progress bars."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with engine.without_warnings(), contextlib.redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(level)


def count_int8_layers(compiled: Any) -> int:
    """Count the products of matrices that OpenVINO executes in int8.

    A model whose file holds int8 weights may still be executed in float32; the executed graph
    has the truth.

    Args:
        compiled: `openvino.CompiledModel`.
    """
    count = 0
    for node in compiled.get_runtime_model().get_ordered_ops():
        facts = node.get_rt_info()
        kind, precision = (facts[name].astype(str) for name in ("layerType", "runtimePrecision"))
        count += kind in PRODUCTS and precision in INT8
    return count
