"""A short script that runs an exported model without vitkit, as a start for a program."""

from __future__ import annotations

import json
import math
from pathlib import Path

from vitkit.data.images.colour import BACKGROUND
from vitkit.exporting.files.description import ArtefactDescription

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
