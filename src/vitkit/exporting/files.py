"""The formats of exported models: written, read with care before they are opened, and opened.

A `.pt2` archive of torch holds an exported program (`torch`), or compiled machine code (`aoti`).
Loading either can run code that is in the file: torch reads pickles and formulas of a program, and
machine code is code. So it is opened only where its maker is trusted.
"""

import hashlib
import json
import math
import re
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from vitkit.data.images.decode import BACKGROUND
from vitkit.engines import engine, onnxruntime_engine, openvino_engine, registry
from vitkit.errors import CheckpointError, SettingError, VitkitError
from vitkit.exporting.artefact import ENDINGS, ArtefactDescription
from vitkit.exporting.graph import DTYPES, exported_program, program_names
from vitkit.io import caches, untrusted
from vitkit.weights.checkpoint import Checkpoint

KEY = "vitkit"
"""Key of the description in the metadata of ONNX and OpenVINO."""
ENTRY = "extra/vitkit.json"
"""Name of the description in a `.pt2` archive, after the archive's root folder."""
LONGEST_REASON = 300
"""Characters of a runtime's message that are quoted; some quote a whole graph."""


class RuntimeFailure(CheckpointError):
    """A runtime cannot write, open or run a model."""


@contextmanager
def one_line_errors(path: Path, runtime: str, action: str) -> Iterator[None]:
    """Turn any error of a runtime into a `RuntimeFailure` of one line, and hide its warnings.

    Errors of the system stay as they are where a file is written. Warnings are not hidden while a
    model runs: their filters are those of the whole process, whose threads may run models, too.

    Args:
        path: the artefact.
        runtime: its name.
        action: what it was to do: `open`, `run`, or `write` and more words.
    """
    try:
        with nullcontext() if action == "run" else engine.without_warnings():
            yield
    except VitkitError:
        raise
    except Exception as error:  # runtimes have their own exceptions
        if isinstance(error, OSError) and action.startswith("write"):
            raise
        message = f"{path}: {runtime} cannot {action} it: {first_line(error)}"
        raise RuntimeFailure(message) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message that has letters, shortened."""
    lines = (line.strip() for line in str(error).splitlines() if re.search("[A-Za-z]", line))
    return next(lines, type(error).__name__)[:LONGEST_REASON]


# An exported model of any format: its description is read first, then its runtime opens it.


@dataclass(frozen=True)
class Artefact:
    """An exported model that is open.

    Attributes:
        path: path of the file.
        description: its preprocessing, class names and temperature.
        run: a batch of images, uint8 (B, H, W, 3) or float32 (B, C, h, w) -> the outputs of the
            graph, of which the logits (B, K) are the last.
        int8_layers: number of layers that the runtime executes in int8, as far as it can tell.
    """

    path: Path
    description: ArtefactDescription
    run: Callable[[np.ndarray], list[np.ndarray]]
    int8_layers: int = 0

    def __call__(self, images: Tensor) -> Tensor:
        """Return the logits (B, K) float32 of images (B, C, h, w), or of pixels (B, H, W, 3).

        Raises:
            CheckpointError: the model fails, or gives another number of logits.
        """
        with one_line_errors(self.path, "its runtime", "run"):
            found = self.run(np.ascontiguousarray(images.cpu().numpy()))[-1]
            logits = torch.from_numpy(np.asarray(found, dtype=np.float32))
        expected = (len(images), self.description.num_classes)
        if logits.shape != expected:
            raise CheckpointError(
                f"{self.path}: returns logits of shape {tuple(logits.shape)}; expected {expected}; "
                "export the checkpoint again"
            )
        return logits


def read_artefact_description(path: Path) -> ArtefactDescription:
    """Read the description of an exported model; nothing of it is run.

    Raises:
        CheckpointError: missing, damaged, hostile, of a newer version, or without a description.
        MissingExtraError: a library that reads the format is not installed.
    """
    readers = {".onnx": _read_onnx, ".xml": _read_openvino, ".pt2": _read_archive}
    ending = path.suffix.lower()
    if ending not in readers or not path.is_file():
        raise CheckpointError(
            f"{path}: expected a file that is there and whose name ends in {', '.join(readers)}"
        )
    try:
        text, weights = readers[ending](path)
    except CheckpointError:
        raise
    except (*untrusted.READ_ERRORS, ElementTree.ParseError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: truncated, damaged, or not a {ending} model ({first_line(error)}); copy or "
            "export it again"
        ) from None
    description = ArtefactDescription.from_text(text, path)
    problem = ""
    if ENDINGS[description.format] != ending:
        problem = f"is for names that end in {ENDINGS[description.format]}"
    elif description.weights not in ("", weights):
        problem = "is of other weights"
    if problem:
        raise CheckpointError(f"{path}: its description {problem}; copy or export it again")
    return description


def open_artefact(path: str | PathLike[str], *, trust_code: bool = False) -> Artefact:
    """Open an exported model on the CPU.

    Args:
        path: as `vitkit export` has written it.
        trust_code: open a `.pt2` file, which can run code that is in it.

    Raises:
        CheckpointError: as for `read_artefact_description`; a `.pt2` file without `trust_code`; a
            runtime that cannot open it.
        DeviceError: the CPU lacks the instructions of its precision.
        MissingExtraError: the runtime is not installed.
    """
    path = Path(fspath(path))
    description = read_artefact_description(path)
    if description.format == "onnx":
        with one_line_errors(path, "ONNX Runtime", "open"):
            return Artefact(path, description, onnxruntime_engine.open_session(path))
    if description.format == "openvino":
        return _open_openvino(path, description)
    if not trust_code:
        raise CheckpointError(
            f"{path}: opening a .pt2 file can run code that is in it; pass --trust-code "
            "(trust_code=True) if you know who made it, or export with --to onnx or openvino"
        )
    with one_line_errors(path, "torch", "open"):
        if description.format == "aoti":
            module = registry.import_runtime("torch._inductor").aoti_load_package(str(path))
        else:
            module = torch.export.load(path).module()

    def run(images: np.ndarray) -> list[np.ndarray]:
        with torch.inference_mode():
            outputs = module(torch.from_numpy(images))
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        return [output.numpy() for output in outputs]

    return Artefact(path, description, run)


def linear_layers(checkpoint: Checkpoint) -> int:
    """Return the number of linear layers in a model's blocks."""
    return sum(isinstance(part, nn.Linear) for part in checkpoint.model.blocks.modules())


def write_artefact(
    checkpoint: Checkpoint,
    path: Path,
    description: ArtefactDescription,
    opset: int | None = None,
    calibration: list[Any] | None = None,
) -> None:
    """Write a checkpoint's model as an artefact with its description.

    Args:
        checkpoint: with the model.
        path: path of the artefact.
        description: description of it.
        opset: version of ONNX's operators; default 20.
        calibration: inputs of the model without the batch axis, which int8 measures.

    Raises:
        CheckpointError: the model cannot be converted.
        SettingError: it cannot be exported, or preprocessing that cannot be a part of the graph.
    """
    to, pixels = description.format, description.with_preprocessing
    precision = description.precision
    if to == "openvino":  # its half precision is for the file only
        precision = "float32"
    program = exported_program(checkpoint, dtype=DTYPES[precision], with_preprocessing=pixels)
    if to == "onnx":
        opset = opset or onnxruntime_engine.OPSET
        with one_line_errors(path, "torch's exporter", f"write as opset {opset}"):
            model = onnxruntime_engine.to_onnx(program, opset, *program_names(program))
        write_onnx(model, path, description)
    elif to == "openvino":
        with one_line_errors(path, "OpenVINO", "convert"):
            model = openvino_engine.to_openvino(program, program_names(program)[1])
        if calibration is not None:
            with one_line_errors(path, "NNCF", "quantise"):
                model = openvino_engine.quantise(
                    model, calibration, layers=linear_layers(checkpoint)
                )
        _write_openvino(model, path, description)
    else:
        _write_torch(program, path, description)


# `.pt2` archives of torch.


def _write_torch(program: ExportedProgram, path: Path, description: ArtefactDescription) -> None:
    """Write an exported program, or machine code for the CPU of this machine.

    Raises:
        MissingExtraError: there is no C++ compiler for machine code.
    """
    if description.format == "aoti":
        registry.refuse_no_compiler("--to aoti", "--to torch")
        inductor = registry.import_runtime("torch._inductor")
        with one_line_errors(path, "torch's inductor", "compile"):
            inductor.aoti_compile_and_package(program, package_path=str(path))
    else:
        with one_line_errors(path, "torch", "write"):
            torch.export.save(program, path)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/{ENTRY}", description.to_text())


def _read_archive(path: Path) -> tuple[str | None, str]:
    """Return the description in an archive, whose checksums are compared."""
    with zipfile.ZipFile(path) as archive:
        entries = untrusted.checked_entries(path, archive)
        damaged = archive.testzip()
        if damaged is not None:
            raise ValueError(f"the checksum of {damaged} differs")
        for entry in entries:
            if entry.filename.partition("/")[2] == ENTRY:
                return archive.read(entry).decode(), ""
        return None, ""


# ONNX files.

OLDEST_OPSET = 18
"""The exporter writes this opset first; older ones lack operators of the models."""
MOST_WEIGHTS = 1.9e9
"""Most bytes of weights in a single file; protobuf allows 2**31 with graph and texts."""
STANDARD_DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft", "pkg.onnxscript.torch_lib")
"""Domains of operators that ONNX Runtime has itself."""
DATA_ENDING = ".data"
"""Ending, after the file's name, of the external data of more than 2 GB."""
EXTERNAL = 1
"""`TensorProto.DataLocation.EXTERNAL` of onnx.proto."""


def check_opset(opset: int) -> None:
    """Refuse an opset that cannot be written.

    Raises:
        SettingError: too old, or newer than the installed `onnx`.
    """
    newest = registry.import_runtime("onnx").defs.onnx_opset_version()
    if not OLDEST_OPSET <= opset <= newest:
        raise SettingError(
            f"--opset {opset} (opset=): expected {OLDEST_OPSET} to {newest}; older ones lack "
            "operators of the model, and newer ones are not known to the installed onnx"
        )


def write_onnx(
    model: onnxruntime_engine.OnnxModel, path: Path, description: ArtefactDescription
) -> None:
    """Write a model with its description; weights go into a second file only beyond 2 GB."""
    # a graph's size cannot be asked for beyond 2 GB: protobuf writes it to measure it
    weights = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    large = weights > MOST_WEIGHTS
    digest = "" if large else _onnx_digest(model)
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, replace(description, weights=digest).to_text()
    registry.import_runtime("onnx").save_model(
        model, str(path), save_as_external_data=large, location=path.name + DATA_ENDING
    )


def _onnx_digest(model: onnxruntime_engine.OnnxModel) -> str:
    digest = hashlib.sha256()
    for tensor in model.graph.initializer:
        digest.update(tensor.raw_data)
    return digest.hexdigest()


def _read_onnx(path: Path) -> tuple[str | None, str]:
    """Return the description in a file, and the digest of its weights.

    Raises:
        CheckpointError: data of it outside of its folder; operators that no runtime has by itself.
    """
    onnx = registry.import_runtime("onnx")
    try:
        model = onnx.load_model(str(path), load_external_data=False)
    except Exception as error:  # protobuf raises a class of its own
        raise ValueError(first_line(error)) from error
    if not model.graph.node:
        raise ValueError("its graph is empty")
    known = {*STANDARD_DOMAINS, *(function.domain for function in model.functions)}
    for message in _messages(model):
        if isinstance(message, onnx.TensorProto) and message.data_location == EXTERNAL:
            entries = {entry.key: entry.value for entry in message.external_data}
            _refuse_outside(path, path.parent / entries.get("location", "").replace("\\", "/"))
        if isinstance(message, onnx.NodeProto) and message.domain not in known:
            raise CheckpointError(
                f"{path}: its operator {message.op_type} is of {message.domain!r}, which needs an "
                "additional library; export the checkpoint again with vitkit export"
            )
    for entry in model.metadata_props:
        if entry.key == KEY:
            return str(entry.value), _onnx_digest(model)
    return None, ""


def _refuse_outside(path: Path, weights: Path) -> None:
    """Refuse weights outside of the artefact's folder, also through a link, or that are missing."""
    # In a cache of the Hugging Face Hub both files are links into one folder.
    folders = (path.parent.resolve(), path.resolve().parent)
    problem = ""
    if not any(map(weights.resolve().is_relative_to, folders)):
        problem = f"in {weights.resolve()}, outside of the file's folder; such a file is not opened"
    elif not weights.is_file():
        problem = f"missing: {weights.name}"
    if problem:
        raise CheckpointError(f"{path}: its weights are {problem}; copy both files")


def _messages(proto: Any) -> Iterator[Any]:
    """Yield a message of protobuf and all that are in it, at any depth: graphs, nodes, tensors."""
    waiting = [proto]
    while waiting:
        message = waiting.pop()
        yield message
        for field, value in message.ListFields():
            if field.message_type is not None:
                waiting += [value] if hasattr(value, "ListFields") else value


# OpenVINO files: a graph (.xml) with its weights beside it (.bin).

MAX_XML = 200_000_000
"""Bytes of a graph without its weights; those of the largest models have some 10 MB."""


def _write_openvino(
    model: openvino_engine.OVModel, path: Path, description: ArtefactDescription
) -> None:
    """Write a model with its description; with precision float16 its weights are stored so."""
    half = description.precision == "float16"
    digest = ""
    with one_line_errors(path, "OpenVINO", "write"):
        for _ in range(2):  # the digest of the weights is known once they are written
            model.set_rt_info(replace(description, weights=digest).to_text(), KEY)
            registry.import_runtime("openvino").save_model(model, str(path), compress_to_fp16=half)
            digest = caches.file_sha256(path.with_suffix(".bin"))


def _read_openvino(path: Path) -> tuple[str | None, str]:
    """Return the description in a model, and the digest of its weights.

    Raises:
        CheckpointError: weights that are missing, cut off, or a link out of the folder.
    """
    with path.open("rb") as file:
        text = file.read(MAX_XML + 1)
    # entities may expand without end, and name other files; the format has none
    if len(text) > MAX_XML or re.search(rb"<!(DOCTYPE|ENTITY)|\0", text):
        raise ValueError("too large for a graph, or with a DOCTYPE or zero bytes, as no model has")
    root = ElementTree.fromstring(text)
    weights = path.with_suffix(".bin")
    _refuse_outside(path, weights)
    needed = 0
    for data in root.iterfind("layers/layer/data"):
        # weights are at an offset of the .bin file
        needed = max(needed, int(data.get("offset") or 0) + int(data.get("size") or 0))
    if needed > weights.stat().st_size:
        raise CheckpointError(
            f"{weights}: truncated: {weights.stat().st_size} of {needed} bytes; copy or export "
            "it again"
        )
    entry = root.find(f"rt_info/{KEY}")
    if entry is None:
        return None, ""
    return entry.get("value"), caches.file_sha256(weights)


def _open_openvino(path: Path, description: ArtefactDescription) -> Artefact:
    openvino_engine.refuse_no_instructions(str(path), description.precision)
    with one_line_errors(path, "OpenVINO", "open"):
        compiled = openvino_engine.compile_model(path, description.precision)
    lock = threading.Lock()  # a compiled model has one request, and a request one output

    def run(images: np.ndarray) -> list[np.ndarray]:
        with lock:
            outputs = compiled(images)
            return [np.array(outputs[index]) for index in range(len(compiled.outputs))]

    return Artefact(path, description, run, openvino_engine.count_int8_layers(compiled))


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
        hint = "f32"
        if description.precision == "bfloat16":
            hint = "bf16"
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
