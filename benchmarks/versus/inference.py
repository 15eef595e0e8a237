"""Forward passes by an engine, a library or a bare runtime, and the fastest matrix products."""

from __future__ import annotations

import re
import timeit
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from versus.baselines import OPTIMIZED
from versus.child import Ready, Request
from versus.machine import declare_missing_operators, named
from vitkit.engines.choose import sample_images
from vitkit.engines.engine import build_engine, export_program, without_warnings
from vitkit.engines.inference_folds import optimized
from vitkit.engines.onnxruntime_engine import to_onnx
from vitkit.engines.openvino_engine import compile_model, refuse_no_instructions
from vitkit.engines.registry import import_runtime
from vitkit.errors import DeviceError, SettingError
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.weights.load import load
from vitkit.weights.recognise_format import FORMATS

BATCHES = 3
"""Batches that calls go through, so that no input stays in a cache."""
PROBES = 8
"""Images whose logits are compared before anything is timed."""
CALIBRATION_IMAGES = 16
VIT_PYTORCH_NAMES = {
    r"patch_embed\.proj": "to_patch_embedding.2",
    r"^norm\.": "transformer.norm.",
    r"^head\.": "mlp_head.",
    r"^pos_embed": "pos_embedding",
    r"^blocks\.": "transformer.layers.",
    r"\.norm1": ".0.norm",
    r"\.attn\.qkv": ".0.to_qkv",
    r"\.attn\.proj": ".0.to_out.0",
    r"\.norm2": ".1.net.0",
    r"\.mlp\.fc1": ".1.net.1",
    r"\.mlp\.fc2": ".1.net.4",
}
"""Our names of a plain ViT's parts -> vit-pytorch's."""
SIDES = (512, 2048)
"""Rows and columns of both operands of a matrix product."""
SLOW = 0.05
"""Seconds of a product from which no larger one is tried: in half precision torch takes minutes for
it on a processor without instructions for that."""
REPEATS = 12
Forward = Callable[[Tensor], Tensor]
"""Images (B, C, H, W) float32 -> logits (B, K) float32."""


def build(request: Request) -> Ready:
    """Build the forward pass of a library.

    Raises:
        VitkitError: it does not compute this model, refuses the file, or is not installed.
    """
    builders = {"engine": _engine, "library": _library, "runtime": _runtime}
    version, forward_for = builders[request["kind"]](request)
    spec = ViTSpec.from_json(request["spec"])

    def fit(count: int) -> Callable[[int], object]:
        batches = [sample(spec, count, seed) for seed in range(BATCHES)]
        forward = forward_for(count)

        @torch.inference_mode()
        def call(number: int) -> None:
            forward(batches[number % BATCHES])

        return call

    with torch.inference_mode():
        logits = forward_for(PROBES)(probes(spec))
    return Ready(version, fit, logits.float())


def sample(spec: ViTSpec, count: int, seed: int = 0) -> Tensor:
    """Return images (B, C, H, W) for a model."""
    return sample_images(count, spec.in_channels, spec.image_size, seed=seed)


def probes(spec: ViTSpec) -> Tensor:
    """Return the images (B, C, H, W) whose logits are compared."""
    return sample(spec, PROBES)


def library_model(request: Request, source: str) -> tuple[str, nn.Module]:
    """Return the name and version of a library, and its model in float32, which gives logits.

    Raises:
        SettingError: none of its classes computes the model, or it cannot be imported.
        CheckpointError: it refuses the file.
    """
    declare_missing_operators()
    if source == "vit-pytorch":
        model = _vit_pytorch_model(load(request["own"]).model)
        return f"{named(source)} without the two norms around its patches", model
    reference = FORMATS[source].reference
    built = None
    if reference is not None:
        built = reference.build(Path(request["path"]), ViTSpec.from_json(request["spec"]))
    if reference is None or built is None:
        raise SettingError(f"{source} has no class that computes this model")
    return named(reference.distribution), built.eval().float()


def _vit_pytorch_model(source: ViT) -> nn.Module:
    """Return vit-pytorch's `ViT` with our weights and epsilon, without the norms of its patches.

    Neither the first paper nor another library has these two norms; without them it is a little
    faster than as released. It has no biases of query, key and value.
    """
    spec, weights = source.spec, source.state_dict()
    library: Any = import_module("vit_pytorch")
    with torch.device("meta"):
        model: Any = library.ViT(
            image_size=spec.image_size, patch_size=spec.patch_size, num_classes=spec.num_classes,
            dim=spec.width, depth=spec.depth, heads=spec.num_heads, mlp_dim=spec.mlp_width,
            channels=spec.in_channels, dim_head=weights["blocks.0.attn.proj.weight"].shape[1]
            // spec.num_heads,
        )  # fmt: skip
    for place in (1, 3):
        model.to_patch_embedding[place] = nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = spec.norm_eps
    state: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name in ("cls_token", "pos_embed"):
            tensor = tensor[0]
        elif name == "patch_embed.proj.weight":
            tensor = tensor.permute(0, 2, 3, 1).flatten(1)
        for ours, theirs in VIT_PYTORCH_NAMES.items():
            name = re.sub(ours, theirs, name)
        if not name.endswith("to_qkv.bias") or tensor.any():
            state[name] = tensor
    model.load_state_dict(state, assign=True)
    return model.eval()


def _engine(request: Request) -> tuple[str, Callable[[int], Forward]]:
    """Build an engine of vitkit, as its users do."""
    model = load(request["own"]).model.eval()
    source, precision = request["source"], request["precision"]
    if source == OPTIMIZED:
        return named("torch"), lambda count: optimized(model, precision=precision, batch_size=count)
    calibration = _calibration(model.spec) if precision == "int8" else None
    engine = build_engine(
        source, model, precision=precision, threads=request["threads"],
        image_size=model.spec.image_size, calibration=calibration,
    )  # fmt: skip
    return named("torch" if source == "compile" else source), lambda count: engine


def _library(request: Request) -> tuple[str, Callable[[int], Forward]]:
    """Build a library's model in eager torch, or compiled."""
    version, model = library_model(request, request["source"])
    dtype = getattr(torch, request["precision"])
    run: Callable[[Tensor], Tensor] = model.to(dtype).requires_grad_(False)
    if request["compiled"]:
        run = torch.compile(model, options={"freezing": True})

    def forward(images: Tensor) -> Tensor:
        with torch.no_grad():
            return run(images.to(dtype)).float()

    return version, lambda count: forward


def _runtime(request: Request) -> tuple[str, Callable[[int], Forward]]:
    """Convert timm's model, or ours where timm has none, by the runtime's own converter."""
    model: nn.Module = load(request["own"]).model.eval()
    spec = model.spec
    if request["path"] != request["own"]:
        with suppress(SettingError):
            model = library_model(request, "timm")[1]
    convert = {"openvino": _openvino, "onnxruntime": _onnxruntime}[request["source"]]
    return named(request["source"]), convert(request, model, spec)


def _openvino(request: Request, model: nn.Module, spec: ViTSpec) -> Callable[[int], Forward]:
    """Convert and compile as OpenVINO's documentation has it, for batches of one size."""
    openvino: Any = import_runtime("openvino")
    with torch.no_grad(), without_warnings():
        converted = openvino.convert_model(model, example_input=sample(spec, 2))
    if request["precision"] == "int8":
        nncf: Any = import_runtime("nncf")
        images = nncf.Dataset([image[None].numpy() for image in _calibration(spec)])
        converted = nncf.quantize(converted, images, model_type=nncf.ModelType.TRANSFORMER)

    def fit(count: int) -> Forward:
        converted.reshape([count, spec.in_channels, *spec.image_size])
        task = _openvino_task(converted, request["precision"], request["threads"])

        def forward(images: Tensor) -> Tensor:
            task.infer([images.numpy()], share_inputs=True)
            return torch.from_numpy(task.get_output_tensor(0).data.copy())

        return forward

    return fit


def _openvino_task(model: Any, precision: str, threads: int) -> Any:
    """Compile an OpenVINO model; refuse bfloat16 where it would be float32."""
    refuse_no_instructions(f"precision {precision}", precision)
    return compile_model(model, precision, threads).create_infer_request()


def _onnxruntime(request: Request, model: nn.Module, spec: ViTSpec) -> Callable[[int], Forward]:
    """Export by `torch.onnx.export` and open a session for batches of one size."""
    runtime: Any = import_runtime("onnxruntime")
    program = export_program(model, sample(spec, 2))
    content = to_onnx(program).SerializeToString()

    def fit(count: int) -> Forward:
        options = runtime.SessionOptions()
        options.intra_op_num_threads = request["threads"]
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # errors
        options.add_free_dimension_override_by_name("batch", count)
        session = runtime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name

        def forward(images: Tensor) -> Tensor:
            return torch.from_numpy(np.asarray(session.run(None, {name: images.numpy()})[0]))

        return forward

    return fit


def _calibration(spec: ViTSpec) -> Tensor:
    """Return the images (N, C, H, W) that int8 is calibrated with, other than the timed ones."""
    return sample(spec, CALIBRATION_IMAGES, seed=1_000)


def product_speeds(precision: str, threads: int) -> dict[str, float]:
    """Return the speed of square matrix products by each library, in operations per second.

    No library is the fastest on every processor (torch's products in float32 are slow on AMD's), so
    that a peak is that of several. A multiply-add counts as two. Operands are random: zeros are
    faster on some hardware.
    """
    torch.set_num_threads(threads)
    found: dict[str, float] = {}
    slow: set[str] = set()
    for side in SIDES:
        for name, product in _products(precision, threads, torch.randn(side, side)).items():
            if name not in slow:
                product()
                seconds = median(timeit.repeat(product, number=1, repeat=REPEATS))
                found[name] = max(found.get(name, 0.0), 2 * side**3 / seconds)
                if seconds > SLOW:
                    slow.add(name)
    return found


def _products(precision: str, threads: int, full: Tensor) -> dict[str, Callable[[], object]]:
    """Return a product of an operand with itself by each library, as in a layer."""
    half, array = full.to(getattr(torch, precision)), full.numpy()
    made: dict[str, Callable[[], object]] = {"torch": lambda: F.linear(half, half)}
    if precision == "float32":
        made["numpy"] = lambda: array @ array
    if find_spec("openvino"):
        openvino: Any = import_runtime("openvino")
        operators: Any = import_runtime("openvino.opset13")
        given = operators.parameter(array.shape, array.dtype)
        product = operators.matmul(given, operators.constant(array), False, False)
        with suppress(DeviceError):  # a processor without bfloat16
            task = _openvino_task(openvino.Model([product], [given]), precision, threads)
            made["openvino"] = lambda: task.infer([array], share_inputs=True)
    return made
