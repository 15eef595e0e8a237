"""Forward passes of the contenders: images to logits, by an engine, a library or a bare runtime.

Runs in the process of one contender.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitkit.benchmarking.contender_process.older_vit_pytorch import NOTE, vit_without_patch_norms
from vitkit.benchmarking.contender_process.torchvision_operators import declare_missing_operators
from vitkit.benchmarking.contenders import OPTIMIZED
from vitkit.benchmarking.machine import installed_versions
from vitkit.engines.build import build_engine
from vitkit.engines.choosing.sample_images import sample_images
from vitkit.engines.inference_folds import optimized
from vitkit.engines.onnxruntime import to_onnx
from vitkit.engines.openvino import HINTS, refuse_no_bfloat16
from vitkit.engines.program import export_program, without_warnings
from vitkit.engines.telemetry import import_runtime
from vitkit.errors import SettingError
from vitkit.spec import ViTSpec
from vitkit.weights.converting.verify import reference_model
from vitkit.weights.load import load

CALIBRATION_IMAGES = 16
"""Images that int8 is calibrated with."""
CALIBRATION_SEED = 1_000
"""No timed or compared batch has it."""


class Task(NamedTuple):
    """The work that a process of a contender is asked for.

    Attributes:
        kind: of the contender: `engine`, `library` or `runtime`.
        source: the engine or `optimized`, the format, or the runtime.
        compiled: by `torch.compile`.
        own: folder with vitkit's own file.
        path: folder with the contender's file.
        spec: of the model in it.
        norm_eps: epsilon of the norms of vitkit's model; some formats cannot store it.
        precision: float32, bfloat16 or int8.
        threads: of the processor.
    """

    kind: str
    source: str
    compiled: bool
    own: str
    path: str
    spec: ViTSpec
    norm_eps: float
    precision: str
    threads: int


class ForwardPass(NamedTuple):
    """A model that is ready.

    Attributes:
        library: with its version.
        fit: given the number of images of the next batches, returns a function
            (B, C, H, W) float32 -> (B, K) float32 for them.
    """

    library: str
    fit: Callable[[int], Callable[[Tensor], Tensor]]


def make_forward_pass(task: Task) -> ForwardPass:
    """Build the forward pass of a contender.

    Raises:
        SettingError: the contender does not compute this model, or not here.
        CheckpointError: the library refuses the file.
        MissingExtraError: a package is missing.
    """
    if task.kind == "engine":
        return _engine(task)
    if task.kind == "library":
        return _library(task)
    if task.source == "openvino":
        return _bare_openvino(task)
    return _bare_onnxruntime(task)


def _engine(task: Task) -> ForwardPass:
    model = load(task.own).model.eval()
    if task.source == OPTIMIZED:
        return ForwardPass(
            _named("torch"),
            lambda count: optimized(model, precision=task.precision, batch_size=count),
        )
    calibration = None
    if task.precision == "int8":
        calibration = _calibration_images(task.spec)
    engine = build_engine(
        task.source,
        model,
        precision=task.precision,
        threads=task.threads,
        image_size=model.spec.image_size,
        calibration=calibration,
    )
    name = {"compile": "torch"}.get(task.source, task.source)
    return ForwardPass(_named(name), lambda count: engine)


def library_model(task: Task) -> tuple[str, nn.Module, Callable[[Any], Any]]:
    """Return the name and version of a library, its model in float32, and what reads its logits.

    Raises:
        SettingError: none of its classes computes the model, or it cannot be imported.
        CheckpointError: it refuses the file.
    """
    declare_missing_operators()
    reference = reference_model(task.source, Path(task.path), task.spec)
    if isinstance(reference, str) and task.source == "lucidrains":
        older = vit_without_patch_norms(Path(task.path), task.norm_eps)
        if older is not None:
            return f"{_named('vit-pytorch')} {NOTE}", older, lambda output: output
    if isinstance(reference, str):
        raise SettingError(reference)
    return reference.library, reference.built.model, reference.built.logits


def _library(task: Task) -> ForwardPass:
    library, model, logits = library_model(task)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[task.precision]
    run: Callable[[Tensor], Any] = model.to(dtype).requires_grad_(False)
    if task.compiled:
        run = torch.compile(model, options={"freezing": True})

    def forward(images: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = logits(run(images.to(dtype)))
        return found.float()

    return ForwardPass(library, lambda count: forward)


def _plain_model(task: Task) -> nn.Module:
    """Return timm's model, or ours where timm has none, as a source for a runtime's converter."""
    if task.path != task.own:
        try:
            return library_model(task._replace(source="timm"))[1]
        except SettingError:
            pass
    return load(task.own).model.eval()


def _bare_openvino(task: Task) -> ForwardPass:
    """Convert and compile as OpenVINO's documentation has it, for batches of one size."""
    if task.precision == "bfloat16":
        refuse_no_bfloat16()
    openvino: Any = import_runtime("openvino")
    model, spec = _plain_model(task), task.spec
    example = sample_images(2, spec.in_channels, spec.image_size)
    with torch.no_grad(), without_warnings():
        converted = openvino.convert_model(model, example_input=example)
    if task.precision == "int8":
        converted = _quantised(converted, spec)
    settings = {
        "INFERENCE_NUM_THREADS": task.threads,
        "INFERENCE_PRECISION_HINT": HINTS[task.precision],
    }

    def fit(count: int) -> Callable[[Tensor], Tensor]:
        converted.reshape([count, spec.in_channels, *spec.image_size])
        compiled = openvino.Core().compile_model(converted, "CPU", settings)
        request = compiled.create_infer_request()

        def forward(images: Tensor) -> Tensor:
            request.infer([images.numpy()], share_inputs=True)
            return torch.from_numpy(request.get_output_tensor(0).data.copy())

        return forward

    return ForwardPass(_named("openvino"), fit)


def _quantised(model: Any, spec: ViTSpec) -> Any:
    """Quantise by NNCF with its settings for transformers."""
    nncf: Any = import_runtime("nncf")
    images = [image[None].numpy() for image in _calibration_images(spec)]
    return nncf.quantize(model, nncf.Dataset(images), model_type=nncf.ModelType.TRANSFORMER)


def _bare_onnxruntime(task: Task) -> ForwardPass:
    """Export by `torch.onnx.export` and open a session for batches of one size."""
    runtime: Any = import_runtime("onnxruntime")
    spec = task.spec
    program = export_program(_plain_model(task), spec.in_channels, spec.image_size)
    content = to_onnx(program).SerializeToString()

    def fit(count: int) -> Callable[[Tensor], Tensor]:
        options = runtime.SessionOptions()
        options.intra_op_num_threads = task.threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors
        options.add_free_dimension_override_by_name("batch", count)
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name

        def forward(images: Tensor) -> Tensor:
            return torch.from_numpy(np.asarray(session.run(None, {name: images.numpy()})[0]))

        return forward

    return ForwardPass(_named("onnxruntime"), fit)


def _calibration_images(spec: ViTSpec) -> Tensor:
    """Return the images (N, C, H, W) that int8 is calibrated with; speed is that of any others."""
    return sample_images(
        CALIBRATION_IMAGES, spec.in_channels, spec.image_size, seed=CALIBRATION_SEED
    )


def _named(distribution: str) -> str:
    return f"{distribution} {installed_versions([distribution]).get(distribution, '')}".strip()
