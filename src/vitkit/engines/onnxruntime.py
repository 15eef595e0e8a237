"""The engine `onnxruntime`: the model as an ONNX file, run by Microsoft's runtime."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitkit.engines.engine import EngineRequest, Forward
from vitkit.engines.inference_folds import fold_for_inference
from vitkit.engines.program import INPUT, OUTPUT, export_program, without_warnings
from vitkit.engines.telemetry import import_runtime, quiet_imports
from vitkit.io.atomic import replacing_in_cache
from vitkit.models.attention import Heads, MultiHeadAttention

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
    if path is not None and path.exists():
        with contextlib.suppress(Exception):  # damaged: it is converted again
            return onnx_forward(path, request.threads)
    folded = fold_for_inference(request.model, query_scale=False).float().cpu()
    for module in folded.modules():
        if isinstance(module, MultiHeadAttention):
            module.attend = fused_attention
    program = export_program(folded, folded.spec.in_channels, request.image_size)
    content = to_onnx(program).SerializeToString()
    if path is not None:
        with contextlib.suppress(OSError), replacing_in_cache(path) as file:
            file.write(content)
    return onnx_forward(content, request.threads)


def fused_attention(
    q: Heads, k: Heads, v: Heads, mask: Tensor | None = None, dropout: float = 0.0
) -> Heads:
    """Compute attention by ONNX Runtime's fused operator; for exports only.

    ONNX's standard operators would be two products with a softmax and transposes between them.

    Args:
        q: queries (B, k, N, h).
        k: keys (B, k, M, h).
        v: values (B, k, M, e).
        mask: must be None, as in a ViT.
        dropout: no meaning in inference.
    """
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


def onnx_forward(model: Path | bytes, threads: int) -> Forward:
    """Return a function (B, C, H, W) -> (B, K) that runs an ONNX model on the CPU.

    Args:
        model: a file, or its content.
        threads: threads of the processor.
    """
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
