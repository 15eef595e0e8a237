"""The engine `onnxruntime`: the model as an ONNX file, run by Microsoft's runtime on the CPU."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.export import ExportedProgram

from vitkit.engines import engine, registry
from vitkit.io.caches import caching, is_whole
from vitkit.models.attention import Heads

OnnxModel: TypeAlias = Any
"""An `onnx.ModelProto`."""
Run: TypeAlias = Callable[[np.ndarray], list[np.ndarray]]
"""A batch -> the outputs of a graph."""
OPSET = 20
"""Version of the operators that is written: the first one with Gelu as one operator."""
FATAL_ONLY = 4
"""Severity of messages from which the runtime prints them; errors are raised anyway."""


def build_onnxruntime(request: engine.EngineRequest) -> engine.Forward:
    """Return a session for the model; it is converted once and kept in the folder of the request.

    Raises:
        SettingError: a model that cannot be exported.
    """
    path = None if request.folder is None else request.folder / "model.onnx"
    if path is not None and is_whole(path):
        return _forward(path, request.threads)
    content = to_onnx(engine.program_for_inference(request, _fused_attention)).SerializeToString()
    if path is not None:
        with contextlib.suppress(OSError), caching(path.parent) as folder:
            (folder / path.name).write_bytes(content)
    return _forward(content, request.threads)


def _fused_attention(
    q: Heads, k: Heads, v: Heads, mask: torch.Tensor | None = None, dropout: float = 0.0
) -> Heads:
    """Compute attention by the runtime's fused operator; for exports only."""
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
    name: str = engine.INPUT,
    outputs: Sequence[str] = (engine.OUTPUT,),
) -> OnnxModel:
    """Return the ONNX model of a program.

    Args:
        program: program of a model, with one input.
        opset: version of ONNX's operators.
        name: name of the input.
        outputs: names of the outputs.
    """
    registry.quiet_imports()  # the exporter may import the runtime
    with engine.without_warnings(), torch.no_grad():
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


def open_session(model: Path | bytes, threads: int = 0) -> Run:
    """Return a function that runs an ONNX model on the CPU, from a batch to its outputs.

    Args:
        model: the file, or its content.
        threads: threads of the processor; 0: all cores.

    Raises:
        MissingExtraError: the runtime is not installed.
    """
    runtime = registry.import_runtime("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = FATAL_ONLY
    given = model if isinstance(model, bytes) else str(model)
    session = runtime.InferenceSession(given, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda batch: session.run(None, {name: batch})


def _forward(model: Path | bytes, threads: int) -> engine.Forward:
    """Return a function (B, C, H, W) -> (B, K) that runs an ONNX model on the CPU."""
    run = open_session(model, threads)

    def forward(images: torch.Tensor) -> torch.Tensor:
        array = np.ascontiguousarray(images.detach().float().cpu().numpy())
        return torch.from_numpy(run(array)[0])

    return forward
