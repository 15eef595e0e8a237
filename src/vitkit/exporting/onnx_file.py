"""ONNX files: written, and checked before a runtime opens them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from vitkit.errors import CheckpointError, SettingError
from vitkit.exporting.artefact import (
    ARTEFACT_KEY,
    Session,
    first_line,
    one_line_errors,
    runtime_module,
)

OLDEST_OPSET = 18
"""The exporter writes this opset first; older ones lack operators of the models."""
MOST_WEIGHTS = 1.9e9
"""Most bytes of weights in a single file; protobuf allows 2**31 with graph and texts."""
STANDARD_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "pkg.onnxscript.torch_lib")
"""Domains of operators that onnxruntime has itself."""
DATA_ENDING = ".data"
"""Ending, after the file's name, of the external data of more than 2 GB."""
EXTERNAL = 1
"""`TensorProto.DataLocation.EXTERNAL` of onnx.proto."""


def check_opset(opset: int | None) -> None:
    """Refuse an opset that cannot be written.

    Raises:
        SettingError: too old, or newer than the installed `onnx`.
    """
    if opset is None:
        return
    newest = runtime_module("onnx").defs.onnx_opset_version()
    if not OLDEST_OPSET <= opset <= newest:
        raise SettingError(
            f"--opset {opset} (opset=): expected {OLDEST_OPSET} to {newest}; older ones lack "
            "operators of the model, and newer ones are not known to the installed onnx"
        )


def write_onnx(proto: Any, path: Path, description: str) -> None:
    """Write a model with its description; weights go into a second file only beyond 2 GB.

    Args:
        proto: `onnx.ModelProto`.
        path: path of the file.
        description: the text of an `ArtefactDescription`.
    """
    onnx = runtime_module("onnx")
    _describe(proto, description)
    # a graph's size cannot be asked for beyond 2 GB: protobuf writes it to measure it
    weights = sum(len(tensor.raw_data) for tensor in proto.graph.initializer)
    large = weights > MOST_WEIGHTS
    onnx.save_model(proto, str(path), save_as_external_data=large, location=path.name + DATA_ENDING)


def describe_onnx(path: Path, description: str) -> None:
    """Replace the description of a file that vitkit has written."""
    onnx = runtime_module("onnx")
    proto = onnx.load_model(str(path), load_external_data=False)
    _describe(proto, description)
    path.write_bytes(proto.SerializeToString())


def _describe(proto: Any, description: str) -> None:
    kept = [(one.key, one.value) for one in proto.metadata_props if one.key != ARTEFACT_KEY]
    del proto.metadata_props[:]
    for key, value in (*kept, (ARTEFACT_KEY, description)):
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value


def read_onnx_description(path: Path) -> str | None:
    """Return the description in a file; nothing of it is run.

    Raises:
        CheckpointError: truncated or not an ONNX file; data of it outside of its folder; operators
            that no runtime has by itself.
        MissingExtraError: `onnx` is not installed.
    """
    onnx = runtime_module("onnx")
    try:
        proto = onnx.load_model(str(path), load_external_data=False)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except Exception as error:  # noqa: BLE001 - protobuf raises a class of its own
        raise CheckpointError(
            f"{path}: truncated, damaged, or not an ONNX file ({first_line(error)}); copy or "
            "export it again"
        ) from None
    if not proto.graph.node:
        raise CheckpointError(
            f"{path}: truncated, or not an ONNX file: its graph is empty; copy or export it again"
        )
    known = {*STANDARD_DOMAINS, *(function.domain for function in proto.functions)}
    for message in _messages(proto):
        if isinstance(message, onnx.TensorProto) and message.data_location == EXTERNAL:
            _check_location(path, message)
        if isinstance(message, onnx.NodeProto) and message.domain not in known:
            raise CheckpointError(
                f"{path}: its operator {message.op_type} is of {message.domain!r}, which needs an "
                "additional library; export the checkpoint again with vitkit export"
            )
    for entry in proto.metadata_props:
        if entry.key == ARTEFACT_KEY:
            return str(entry.value)
    return None


def _check_location(path: Path, tensor: Any) -> None:
    """Refuse weights in a file outside of the artefact's folder, or in one that is missing."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = PurePosixPath(entries.get("location", "").replace("\\", "/"))
    outside = location.is_absolute() or ".." in location.parts or ":" in str(location)
    file = path.parent / location
    if outside or not file.resolve().is_relative_to(path.parent.resolve()):
        raise CheckpointError(
            f"{path}: its tensor {tensor.name!r} is in {str(location)!r}, outside of the file's "
            "folder; such a file is not opened"
        )
    if not file.is_file():
        raise CheckpointError(
            f"{path}: its weights are in {str(location)!r} beside it, which is missing; copy both "
            "files"
        )


def _messages(proto: Any) -> Iterator[Any]:
    """Yield a message of protobuf and all that are in it, at any depth: graphs, nodes, tensors."""
    waiting = [proto]
    while waiting:
        message = waiting.pop()
        yield message
        for field, value in message.ListFields():
            if field.message_type is not None:
                waiting += [value] if hasattr(value, "ListFields") else value


def open_onnx(path: Path) -> Session:
    """Open a file that `read_onnx_description` has checked, on the CPU.

    Args:
        path: path of the file.

    Raises:
        CheckpointError: onnxruntime lacks an operator, or a newer opset is needed.
        MissingExtraError: onnxruntime is not installed.
    """
    runtime = runtime_module("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    with one_line_errors(path, "onnxruntime", "open"):
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name

    def run(images: np.ndarray) -> list[np.ndarray]:
        with one_line_errors(path, "onnxruntime", "run"):
            outputs: list[np.ndarray] = session.run(None, {name: images})
        return outputs

    return Session(run)
