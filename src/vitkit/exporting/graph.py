"""The program that is exported: the folded model, with or without preprocessing around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitkit.engines.inference_folds import fold_for_inference
from vitkit.engines.onnxruntime import to_onnx
from vitkit.engines.program import EXAMPLE_BATCH, INPUT, OUTPUT, without_warnings
from vitkit.errors import CheckpointError
from vitkit.exporting.files.runtime_errors import first_line, one_line_errors
from vitkit.exporting.preprocessing_graph import PreprocessingGraph
from vitkit.weights.checkpoint import Checkpoint

NAMES = ((INPUT, (OUTPUT,)), ("pixels", ("probabilities", OUTPUT)))
"""Name of the input, and of the outputs, without preprocessing and with it."""
MAX_SIDE = 2**15
"""The longest side of an image that a graph with preprocessing takes, in pixels."""
EXAMPLE_SIZE = (67, 45)
"""Height and width of the example of a graph that takes all sizes."""


class ExportedModel(nn.Module):
    """Images (B, C, h, w) float32 -> logits (B, K) float32, in any precision inside.

    Args:
        model: folded, in the precision.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.model(images.to(self.dtype))
        return logits.to(torch.float32)


class PixelModel(nn.Module):
    """Pixels (B, H, W, 3) uint8 -> probabilities (B, K), logits (B, K), both float32.

    Args:
        model: images -> logits.
        preprocessing: pixels -> images.
        temperature: divides the logits before the softmax.
    """

    def __init__(
        self, model: nn.Module, preprocessing: PreprocessingGraph, temperature: float
    ) -> None:
        super().__init__()
        self.model = model
        self.preprocessing = preprocessing
        self.temperature = temperature

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probabilities and the logits."""
        logits = self.model(self.preprocessing(pixels))
        return torch.softmax(logits / self.temperature, 1), logits


def exported_program(
    checkpoint: Checkpoint, *, dtype: torch.dtype, with_preprocessing: bool
) -> ExportedProgram:
    """Return the program of a checkpoint's model, for batches of any size.

    Args:
        checkpoint: its model stays as it is.
        dtype: dtype of the weights and of what is computed.
        with_preprocessing: take pixels of any size.

    Raises:
        CheckpointError: torch cannot export the model.
        SettingError: preprocessing that cannot be a part of the graph.
    """
    folded = fold_for_inference(checkpoint.model).cpu().to(dtype).requires_grad_(False)
    model: nn.Module = ExportedModel(folded, dtype)
    batch = Dim("batch", min=1)
    if with_preprocessing:
        preprocessing = PreprocessingGraph(checkpoint.preprocess)
        model = PixelModel(model, preprocessing, checkpoint.temperature)
        example = torch.zeros(EXAMPLE_BATCH, *EXAMPLE_SIZE, 3, dtype=torch.uint8)
        sides = {1: Dim("height", min=2, max=MAX_SIDE), 2: Dim("width", min=2, max=MAX_SIDE)}
        shapes = ({0: batch, **sides},)
    else:
        size = checkpoint.preprocess.image_size
        example = torch.zeros(EXAMPLE_BATCH, checkpoint.preprocess.channels, *size)
        shapes = ({0: batch},)
    try:
        with torch.no_grad(), without_warnings():
            return torch.export.export(
                model.eval(), (example,), dynamic_shapes=shapes, strict=False
            )
    except Exception as error:  # torch raises many kinds
        raise CheckpointError(
            f"{checkpoint.path or 'this model'}: torch cannot export it "
            f"({type(error).__name__}: {first_line(error)}); report the model"
        ) from error


def program_names(program: ExportedProgram) -> tuple[str, tuple[str, ...]]:
    """Return the name of a program's input, and those of its outputs."""
    return NAMES[len(program.graph_signature.user_outputs) - 1]


def named_onnx(program: ExportedProgram, opset: int, path: Path) -> Any:
    """Return the ONNX model of a program, an `onnx.ModelProto`, with named inputs and outputs.

    Args:
        program: program of `exported_program`.
        opset: version of ONNX's operators.
        path: path of the artefact, for messages.

    Raises:
        CheckpointError: the exporter fails, or cannot write the opset.
    """
    with one_line_errors(path, "torch's exporter", f"write as opset {opset}"), torch.no_grad():
        model = to_onnx(program, opset, *program_names(program))
    written = {entry.domain: entry.version for entry in model.opset_import}
    if written.get("") != opset:
        raise CheckpointError(
            f"{path}: the exporter wrote opset {written.get('')} instead of {opset}; leave out "
            "--opset"
        )
    return model
