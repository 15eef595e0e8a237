"""The engine `openvino`: Intel's runtime, for processors of any maker."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from vitkit.engines.engine import EngineRequest, Forward
from vitkit.engines.inference_folds import fold_for_inference
from vitkit.engines.program import OUTPUT, export_program, without_warnings
from vitkit.engines.registry import refuse_uncalibrated
from vitkit.engines.telemetry import import_runtime
from vitkit.errors import SettingError

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
    model = _kept(request) or convert_and_keep(request)
    return openvino_forward(model, request.precision, request.threads)


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
    """Return the converted model of the folder, or None where there is none that can be read."""
    path = _file(request)
    if path is None or not path.exists() or not path.with_suffix(".bin").exists():
        return None
    try:
        return import_runtime("openvino").Core().read_model(path)
    except RuntimeError:  # damaged: it is converted again
        return None


def convert_and_keep(request: EngineRequest) -> OVModel:
    """Convert the model of a request, quantise it for int8, and keep the result in its folder."""
    folded = fold_for_inference(request.model).float().cpu()
    program = export_program(folded, folded.spec.in_channels, request.image_size)
    model = to_openvino(program)
    if request.precision == "int8":
        from vitkit.engines.quantise import quantise

        refuse_uncalibrated(request.precision, request.calibration)
        assert request.calibration is not None, "refused above"
        model = quantise(model, request.calibration)
    path = _file(request)
    if path is not None:
        with contextlib.suppress(OSError, RuntimeError):  # a cache only saves time
            save_openvino(model, path)
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


def save_openvino(model: OVModel, path: Path) -> None:
    """Write a model as `path` (.xml) and its weights beside it (.bin), weights in float32.

    Other processes may write or read the same model: each file is renamed when it is whole, the
    .xml last, as it is looked for first.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as name:
        temporary = Path(name) / path.name
        import_runtime("openvino").save_model(model, temporary, compress_to_fp16=False)
        for ending in (".bin", ".xml"):
            temporary.with_suffix(ending).replace(path.with_suffix(ending))


def openvino_forward(model: OVModel, precision: str, threads: int, **more: Any) -> Forward:
    """Return a function (B, C, H, W) -> (B, K) that runs a model on the CPU.

    Args:
        model: an `openvino.Model`, or the path of one.
        precision: of what is not quantised: `float32` or `bfloat16`; `int8` means float32.
        threads: threads of the processor.
        **more: further properties of the device, such as `PERF_COUNT`.
    """
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
