"""Write a checkpoint as an artefact of any format, and its description into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit.data.images.preprocess import normalise
from vitkit.engines.onnxruntime import OPSET
from vitkit.engines.openvino import to_openvino
from vitkit.engines.quantise import quantise
from vitkit.errors import SettingError
from vitkit.exporting.files.description import FORMATS, ArtefactDescription
from vitkit.exporting.files.endings import ENDINGS
from vitkit.exporting.files.onnx_file import check_opset, describe_onnx, write_onnx
from vitkit.exporting.files.openvino_file import (
    describe_openvino,
    refuse_no_instructions,
    write_openvino,
)
from vitkit.exporting.files.runtime_errors import one_line_errors, runtime_module
from vitkit.exporting.files.torch_file import (
    describe_torch,
    refuse_missing_compiler,
    write_aoti,
    write_torch,
)
from vitkit.exporting.graph import exported_program, named_onnx, program_names
from vitkit.messages import did_you_mean
from vitkit.weights.checkpoint import Checkpoint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ExportChoice:
    """How a checkpoint is written.

    Attributes:
        to: a name of `FORMATS`.
        precision: a name of `DTYPES`.
        int8: quantise the linear layers of the blocks.
        with_preprocessing: take uint8 images of any size.
        opset: opset of ONNX; None: 20.
    """

    to: str
    precision: str = "float32"
    int8: bool = False
    with_preprocessing: bool = False
    opset: int | None = None

    def check(self, out: Path) -> None:
        """Refuse what cannot be written, before any work.

        Args:
            out: the artefact's path.

        Raises:
            DeviceError: the CPU lacks the instructions of the precision.
            MissingExtraError: a library, or a compiler, is not installed.
            SettingError: an unknown format or precision, a wrong ending, or options that do not go
                together.
        """
        for name, value, known in (
            ("to", self.to, FORMATS),
            ("precision", self.precision, tuple(DTYPES)),
        ):
            if value not in known:
                raise SettingError(
                    f"--{name} {value!r} does not exist{did_you_mean(value, known)}; expected "
                    f"{', '.join(known)}"
                )
        if out.suffix != ENDINGS[self.to]:
            raise SettingError(
                f"OUT {out}: expected a name that ends in {ENDINGS[self.to]} for --to {self.to}"
            )
        if self.int8 and (self.to, self.precision) != ("openvino", "float32"):
            raise SettingError(
                "--int8 needs --to openvino and --precision float32, which is that of the other "
                "layers"
            )
        if self.opset is not None and self.to != "onnx":
            raise SettingError(f"--opset {self.opset} is for --to onnx, not {self.to}")
        self._check_machine(out)

    def _check_machine(self, out: Path) -> None:
        """Refuse what is missing on this machine."""
        if self.to == "onnx":
            for name in ("onnx", "onnxscript", "onnxruntime"):
                runtime_module(name)
            check_opset(self.opset)
        elif self.to == "openvino":
            refuse_no_instructions(out, self.precision)
        elif self.to == "aoti":
            refuse_missing_compiler()
        if self.int8:
            runtime_module("nncf")


def linear_layers(checkpoint: Checkpoint) -> int:
    """Return the number of linear layers in a model's blocks."""
    return sum(isinstance(part, nn.Linear) for part in checkpoint.model.blocks.modules())


def write_artefact(
    checkpoint: Checkpoint,
    choice: ExportChoice,
    path: Path,
    description: ArtefactDescription,
    calibration: Sequence[np.ndarray] = (),
) -> None:
    """Write a checkpoint's model as an artefact with its description.

    Args:
        checkpoint: with the model.
        choice: checked by its `check`.
        path: path of the artefact.
        description: description of it.
        calibration: images for int8: RGB (H, W, 3) uint8 of any size where the graph resizes them,
            else fitted to the model (h, w, C).

    Raises:
        CheckpointError: the model cannot be exported or converted.
        SettingError: preprocessing that cannot be a part of the graph.
    """
    # OpenVINO's half precision is for the file only
    dtype = torch.float32 if choice.to == "openvino" else DTYPES[choice.precision]
    program = exported_program(
        checkpoint, dtype=dtype, with_preprocessing=choice.with_preprocessing
    )
    text = description.to_text()
    if choice.to == "onnx":
        write_onnx(named_onnx(program, choice.opset or OPSET, path), path, text)
    elif choice.to == "openvino":
        with one_line_errors(path, "OpenVINO", "convert"):
            model = to_openvino(program, program_names(program)[1])
        if choice.int8:
            inputs: Any = calibration
            if not choice.with_preprocessing:
                inputs = normalise(torch.from_numpy(np.stack(calibration)), checkpoint.preprocess)
            with one_line_errors(path, "NNCF", "quantise"):
                model = quantise(model, inputs, layers=linear_layers(checkpoint))
        write_openvino(model, path, text, half=choice.precision == "float16")
    else:
        writer = write_torch if choice.to == "torch" else write_aoti
        writer(program, path)
        describe_torch(path, text)


def describe_artefact(path: Path, description: ArtefactDescription) -> None:
    """Replace the description inside an artefact; the graph and its weights stay."""
    writers = {"onnx": describe_onnx, "openvino": describe_openvino}
    writers.get(description.format, describe_torch)(path, description.to_text())
