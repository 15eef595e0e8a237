"""The engines of other runtimes: OpenVINO and ONNX Runtime, with quantisation to int8 by NNCF."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitkit.engines.engine import (
    INPUT,
    OUTPUT,
    EngineRequest,
    Forward,
    export_program,
    without_warnings,
)
from vitkit.engines.inference_folds import fold_for_inference
from vitkit.engines.registry import import_runtime, quiet_imports, refuse_uncalibrated
from vitkit.errors import SettingError
from vitkit.io.caches import caching, is_whole
from vitkit.models.attention import Heads, MultiHeadAttention

OVModel: TypeAlias = Any
"""An `openvino.Model`."""
HINTS = {"float32": "f32", "bfloat16": "bf16", "int8": "f32"}
"""Precision of the parts that are not quantised."""
NATIVE_BFLOAT16 = "BF16"
"""The device capability that means instructions for bfloat16."""


def build_openvino(request: EngineRequest) -> Forward:
    """Return a compiled model; it is converted once and kept in the folder of the request.

    Raises:
        SettingError: a model that cannot be converted; int8 without calibration images; bfloat16 on
            a processor that would compute in float32.
    """
    if request.precision == "bfloat16":
        refuse_no_bfloat16()
    model = _kept(request) or _convert_and_keep(request)
    return _openvino_forward(model, request.precision, request.threads)


def refuse_no_bfloat16() -> None:
    """Raise `SettingError` where OpenVINO would compute in float32 in spite of the hint."""
    openvino = import_runtime("openvino")
    if NATIVE_BFLOAT16 not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise SettingError(
            "precision bfloat16: this processor has no instructions for it, and OpenVINO would "
            "compute in float32; pass --precision float32 or int8"
        )


def _file(request: EngineRequest) -> Path | None:
    if request.folder is None:
        return None
    kind = "int8" if request.precision == "int8" else "float32"
    return request.folder / f"openvino-{kind}.xml"


def _kept(request: EngineRequest) -> OVModel | None:
    """Return the converted model of the folder, or None where there is none that is whole."""
    path = _file(request)
    if path is None or not is_whole(path) or not is_whole(path.with_suffix(".bin")):
        return None
    return import_runtime("openvino").Core().read_model(path)


def _convert_and_keep(request: EngineRequest) -> OVModel:
    """Convert the model of a request, quantise it for int8, and keep the result in its folder."""
    folded = fold_for_inference(request.model).float().cpu()
    program = export_program(folded, folded.spec.in_channels, request.image_size)
    model = to_openvino(program)
    if request.precision == "int8":
        refuse_uncalibrated(request.precision, request.calibration)
        assert request.calibration is not None, "refused above"
        model = quantise(model, request.calibration)
    path = _file(request)
    if path is not None:
        # a cache only saves time; weights are kept in float32
        with contextlib.suppress(OSError, RuntimeError), caching(path.parent) as folder:
            import_runtime("openvino").save_model(model, folder / path.name, compress_to_fp16=False)
    return model


def to_openvino(program: ExportedProgram, outputs: Sequence[str] = (OUTPUT,)) -> OVModel:
    """Return the OpenVINO model of a program.

    Args:
        program: program of a model, with one input.
        outputs: names of the outputs.
    """
    openvino = import_runtime("openvino")
    with without_warnings():
        model = openvino.convert_model(program)
    for output, name in zip(model.outputs, outputs, strict=True):
        output.get_tensor().set_names({name})
    return model


def _openvino_forward(model: OVModel, precision: str, threads: int, **more: Any) -> Forward:
    """Return a function (B, C, H, W) -> (B, K) that runs a model on the CPU."""
    openvino = import_runtime("openvino")
    settings: Mapping[str, Any] = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": HINTS[precision],
        **more,
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    lock = threading.Lock()  # a request has one output

    def forward(images: Tensor) -> Tensor:
        array = np.ascontiguousarray(images.detach().float().cpu().numpy())
        with lock:
            request.infer([array], share_inputs=True)
            # a copy: the memory of the output belongs to the request
            return torch.from_numpy(request.get_output_tensor(0).data.copy())

    return forward


# The engine `onnxruntime`: the model as an ONNX file, run by Microsoft's runtime.

OnnxModel: TypeAlias = Any
"""An `onnx.ModelProto`."""
OPSET = 20
"""Version of the operators that is written: the first one with Gelu as one operator."""
ERRORS_ONLY = 3
"""Severity of messages from which ONNX Runtime prints them."""


def build_onnxruntime(request: EngineRequest) -> Forward:
    """Return a session for the model; it is converted once and kept in the folder of the request.

    Raises:
        SettingError: a model that cannot be exported.
    """
    path = None if request.folder is None else request.folder / "model.onnx"
    if path is not None and is_whole(path):
        return _onnx_forward(path, request.threads)
    folded = fold_for_inference(request.model, query_scale=False).float().cpu()
    for module in folded.modules():
        if isinstance(module, MultiHeadAttention):
            module.attend = _fused_attention
    program = export_program(folded, folded.spec.in_channels, request.image_size)
    content = to_onnx(program).SerializeToString()
    if path is not None:
        with contextlib.suppress(OSError), caching(path.parent) as folder:
            (folder / path.name).write_bytes(content)
    return _onnx_forward(content, request.threads)


def _fused_attention(
    q: Heads, k: Heads, v: Heads, mask: Tensor | None = None, dropout: float = 0.0
) -> Heads:
    """Compute attention by ONNX Runtime's fused operator; for exports only."""
    assert mask is None
    batch, heads, queries, _ = q.shape
    inputs = [part.transpose(1, 2).flatten(2) for part in (q, k, v)]
    mixed = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention",
        inputs,
        {"num_heads": heads},
        dtype=q.dtype,
        shape=(batch, queries, heads * v.shape[-1]),
        version=1,
    )
    return mixed.unflatten(-1, (heads, -1)).transpose(1, 2)


def to_onnx(
    program: ExportedProgram,
    opset: int = OPSET,
    name: str = INPUT,
    outputs: Sequence[str] = (OUTPUT,),
) -> OnnxModel:
    """Return the ONNX model of a program.

    Args:
        program: program of a model, with one input.
        opset: version of ONNX's operators.
        name: name of the input.
        outputs: names of the outputs.
    """
    quiet_imports()  # the exporter may import ONNX Runtime
    with without_warnings():
        exported = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=opset,
            input_names=[name],
            output_names=list(outputs),
            verbose=False,
        )
    assert exported is not None, "with dynamo=True the exporter returns a program"
    return exported.model_proto


def _onnx_forward(model: Path | bytes, threads: int) -> Forward:
    """Return a function (B, C, H, W) -> (B, K) that runs an ONNX model on the CPU."""
    runtime = import_runtime("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = ERRORS_ONLY
    opened = runtime.InferenceSession(
        str(model) if isinstance(model, Path) else model,
        options,
        providers=["CPUExecutionProvider"],
    )
    name = opened.get_inputs()[0].name

    def forward(images: Tensor) -> Tensor:
        array = np.ascontiguousarray(images.detach().float().cpu().numpy())
        return torch.from_numpy(opened.run(None, {name: array})[0])

    return forward


# Quantisation to int8 by NNCF: the linear layers of the blocks, and nothing else.
#
# Patch embedding, head, norms, softmax, the products of attention and the residual sums stay in
# float32: quantised, they cost most of the accuracy. SmoothQuant (arXiv 2211.10438) moves the
# outliers of activations into the weights first.

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
