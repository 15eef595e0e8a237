"""Write a checkpoint as an artefact of any format, and its description into it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitkit.data.images.colour import BACKGROUND
from vitkit.data.images.preprocess import normalise
from vitkit.engines.runtimes import OPSET, quantise, to_openvino
from vitkit.errors import SettingError
from vitkit.exporting.artefact import (
    ENDINGS,
    FORMATS,
    ArtefactDescription,
    describe_torch,
    one_line_errors,
    refuse_missing_compiler,
    runtime_module,
    write_aoti,
    write_torch,
)
from vitkit.exporting.graph import exported_program, named_onnx, program_names
from vitkit.exporting.onnx_file import check_opset, describe_onnx, write_onnx
from vitkit.exporting.openvino_file import describe_openvino, refuse_no_instructions, write_openvino
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


# A short script that runs an exported model without vitkit, as a start for a program.

OPEN_ONNX = """import os
os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # read by the import
import onnxruntime
session = onnxruntime.InferenceSession("{path}", providers=["CPUExecutionProvider"])
facts = json.loads(session.get_modelmeta().custom_metadata_map["vitkit"])
name = session.get_inputs()[0].name
run = lambda batch: session.run(None, {{name: batch}})"""
OPEN_OPENVINO = """import openvino
graph = openvino.Core().read_model("{path}")
facts = json.loads(graph.get_rt_info(["vitkit"]).astype(str))
model = openvino.Core().compile_model(graph, "CPU", {{"INFERENCE_PRECISION_HINT": "{hint}"}})
run = lambda batch: list(model(batch).values())"""
OPEN_PT2 = """import zipfile, torch
archive = zipfile.ZipFile("{path}")
entry = next(name for name in archive.namelist() if name.endswith("extra/vitkit.json"))
facts = json.loads(archive.read(entry))
model = {load}
def run(batch):
    with torch.inference_mode():
        outputs = model(torch.from_numpy(batch))
    return [one.numpy() for one in ([outputs] if torch.is_tensor(outputs) else outputs)]"""
LOAD = {
    "torch": 'torch.export.load("{path}").module()',
    "aoti": 'torch._inductor.aoti_load_package("{path}")',
}
PIXELS = """def probabilities(image):
    return run(np.asarray(image)[None])[0][0]"""
IMAGES = """def probabilities(image):
{grey}    width, height = image.size
{scaled}
    image = image.resize((wide, tall), Image.Resampling.{filter})
    left, top = round((wide - {width}) / 2), round((tall - {height}) / 2)
    image = image.crop((left, top, left + {width}, top + {height}))
    pixels = np.asarray(image, np.float32).reshape({height}, {width}, -1) / 255
    p = facts["preprocess"]
    pixels = (pixels - np.float32(p["mean"])) / np.float32(p["std"])
    logits = run(np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]))[-1][0]
    powers = np.exp((logits - logits.max()) / facts["temperature"])
    return powers / powers.sum()"""
SCRIPT = """import json, sys
import numpy as np
from PIL import Image, ImageOps
{opened}

{probabilities}

for path in sys.argv[1:]:
    image = ImageOps.exif_transpose(Image.open(path))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "{background}"), image)
    found = probabilities(image.convert("RGB"))
    best = int(found.argmax())
    print(path, facts["classes"][best] if facts["classes"] else best, f"{{found[best]:.4f}}")
"""


def script_without_vitkit(description: ArtefactDescription, path: Path) -> str:
    """Return a Python script of some 30 lines that classifies images with an exported model.

    It needs numpy, Pillow and the runtime.

    Args:
        description: description of the model.
        path: path of its file.
    """
    # escaped as a string literal of the script
    quoted = json.dumps(str(path), ensure_ascii=False)[1:-1]
    if description.format == "onnx":
        opened = OPEN_ONNX.format(path=quoted)
    elif description.format == "openvino":
        hint = "bf16" if description.precision == "bfloat16" else "f32"
        opened = OPEN_OPENVINO.format(path=quoted, hint=hint)
    else:
        load = LOAD[description.format].format(path=quoted)
        opened = OPEN_PT2.format(path=quoted, load=load)
    body = PIXELS if description.with_preprocessing else _images(description)
    return SCRIPT.format(opened=opened, probabilities=body, background=BACKGROUND)


def _images(description: ArtefactDescription) -> str:
    """Return the lines that resize, crop and normalise as `fit` and `normalise` do."""
    preprocess = description.preprocess
    height, width = preprocess.image_size
    tall = math.floor(height / preprocess.crop_ratio)
    wide = math.floor(width / preprocess.crop_ratio)
    if preprocess.fit == "squash":
        scaled = f"    wide, tall = {width}, {height}"
    elif preprocess.fit == "squash-crop":
        scaled = f"    wide, tall = {wide}, {tall}"
    elif tall == wide:
        scaled = f"    wide = {tall} if width <= height else int({tall} * width / height)\n"
        scaled += f"    tall = {tall} if height <= width else int({tall} * height / width)"
    else:
        scaled = f"    factor = min(height / {tall}, width / {wide})\n"
        scaled += "    wide, tall = round(width / factor), round(height / factor)"
    return IMAGES.format(
        grey='    image = image.convert("L")\n' if preprocess.channels == 1 else "",
        scaled=scaled,
        filter=preprocess.interpolation.upper(),
        width=width,
        height=height,
    )
