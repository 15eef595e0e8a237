"""OpenVINO files: written, and checked before a runtime opens them."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np

from vitkit.engines.runtimes import count_int8_layers
from vitkit.errors import CheckpointError, DeviceError
from vitkit.exporting.artefact import (
    ARTEFACT_KEY,
    Session,
    first_line,
    one_line_errors,
    runtime_module,
)

MAX_XML = 200_000_000
"""Bytes of a graph without its weights; those of the largest models have some 10 MB."""
PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f32"}
"""Precision of an artefact -> OpenVINO's inference precision; float16 is for the file only."""
CAPABILITIES = {"bfloat16": "BF16"}
"""Precision -> the capability that the CPU needs for it."""


def _weights_beside(path: Path) -> Path:
    """Return the file of the weights, beside the graph."""
    return path.with_suffix(".bin")


def write_openvino(model: Any, path: Path, description: str, *, half: bool) -> None:
    """Write a model with its description.

    Args:
        model: `openvino.Model`.
        path: path of the `.xml` file.
        description: the text of an `ArtefactDescription`.
        half: store the weights in float16.
    """
    model.set_rt_info(description, ARTEFACT_KEY)
    with one_line_errors(path, "OpenVINO", "write"):
        runtime_module("openvino").save_model(model, str(path), compress_to_fp16=half)


def describe_openvino(path: Path, description: str) -> None:
    """Replace the description of a model that vitkit has written; the weights stay."""
    tree = ElementTree.parse(path)
    entry = tree.getroot().find(f"rt_info/{ARTEFACT_KEY}")
    assert entry is not None, "write_openvino has written it"
    entry.set("value", description)
    tree.write(path, encoding="utf-8", xml_declaration=True)


def read_openvino_description(path: Path) -> str | None:
    """Return the description in a model; nothing of it is run.

    Raises:
        CheckpointError: truncated or not an OpenVINO model, or weights missing, cut off, or a link
            out of the folder.
    """
    root = _parse(path)
    if root.tag != "net" or root.find("layers") is None:
        raise CheckpointError(f"{path}: not an OpenVINO model; expected <net> with <layers>")
    weights = _weights_beside(path)
    if not weights.is_file():
        raise CheckpointError(f"{path}: its weights {weights.name} are missing; copy both files")
    # In a cache of the Hugging Face Hub both files are links into one folder.
    folders = (path.parent.resolve(), path.resolve().parent)
    if not any(map(weights.resolve().is_relative_to, folders)):
        raise CheckpointError(
            f"{weights}: is a link to {weights.resolve()}, outside of the file's folder; such a "
            "file is not opened; copy both files"
        )
    needed = 0
    for data in root.iterfind("layers/layer/data"):
        # weights are at an offset of the .bin file
        offset, size = data.get("offset"), data.get("size")
        if offset is not None and size is not None:
            needed = max(needed, _whole(path, offset) + _whole(path, size))
    if needed > weights.stat().st_size:
        raise CheckpointError(
            f"{weights}: truncated: {weights.stat().st_size} of {needed} bytes; copy or export "
            "it again"
        )
    entry = root.find(f"rt_info/{ARTEFACT_KEY}")
    return None if entry is None else entry.get("value")


def _whole(path: Path, text: str) -> int:
    """Return a whole number of bytes."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(f"{path}: damaged: {text[:20]!r} is not a number of bytes")
    return int(text)


def _parse(path: Path) -> ElementTree.Element:
    try:
        if path.stat().st_size > MAX_XML:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes are too many for a graph")
        text = path.read_bytes()
        # entities may expand without end, and name other files; the format has none
        if re.search(rb"<!(DOCTYPE|ENTITY)|\0", text):
            raise CheckpointError(f"{path}: has a DOCTYPE or zero bytes, as no model has")
        return ElementTree.fromstring(text)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: truncated, damaged, or not an OpenVINO model ({first_line(error)}); copy or "
            "export it again"
        ) from None


def refuse_no_instructions(path: Path, precision: str) -> None:
    """Raise `DeviceError` if the CPU lacks the instructions of a precision."""
    core = runtime_module("openvino").Core()
    needed = CAPABILITIES.get(precision)
    if needed and needed not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        raise DeviceError(
            f"{path}: this CPU has no instructions for {precision}, and OpenVINO would compute in "
            "float32; use --precision float32"
        )


def open_openvino(path: Path, precision: str) -> Session:
    """Open a model that `read_openvino_description` has checked, on the CPU.

    Args:
        path: path of the `.xml` file.
        precision: precision of the artefact.

    Raises:
        CheckpointError: OpenVINO lacks an operator.
        DeviceError: the CPU lacks the instructions of the precision.
        MissingExtraError: OpenVINO is not installed.
    """
    refuse_no_instructions(path, precision)
    core = runtime_module("openvino").Core()
    settings = {
        "INFERENCE_PRECISION_HINT": PRECISIONS.get(precision, "f32"),
        "PERFORMANCE_HINT": "LATENCY",
    }
    with one_line_errors(path, "OpenVINO", "open"):
        compiled = core.compile_model(core.read_model(str(path)), "CPU", settings)

    lock = threading.Lock()  # a compiled model has one request, and a request one output

    def run(images: np.ndarray) -> list[np.ndarray]:
        with lock, one_line_errors(path, "OpenVINO", "run"):
            outputs = compiled(images)
            return [np.array(outputs[index]) for index in range(len(compiled.outputs))]

    return Session(run, count_int8_layers(compiled))
