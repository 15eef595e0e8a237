"""`Engine`: a model that is ready to run; how it is built by its name; the engines of torch."""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitkit import errors, process
from vitkit.engines import inference_folds, registry
from vitkit.models.attention import MultiHeadAttention
from vitkit.models.vit import ViT
from vitkit.shapes import Images

Forward: TypeAlias = Callable[[Tensor], Tensor]
"""Preprocessed images (B, C, H, W) -> logits (B, K)."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class EngineRequest:
    """The inputs from which an engine is built.

    Attributes:
        model: in eval mode; an engine may share its weights, and never changes it.
        image_size: (height, width) of all images, in pixels.
        precision: `float32`, `bfloat16` or `int8`.
        threads: threads of the processor.
        device: where it runs; engines for processors alone ignore it.
        folder: where a converted model is kept and found again; `None` converts in memory.
        calibration: preprocessed images (N, C, H, W) that show int8 the range of each activation.
    """

    model: ViT
    image_size: tuple[int, int]
    precision: str = "float32"
    threads: int = field(default_factory=torch.get_num_threads)
    device: torch.device = CPU
    folder: Path | None = None
    calibration: Float[Tensor, "N C H W"] | None = None


@dataclass(frozen=True)
class Engine:
    """A model that is ready to run.

    Attributes:
        name: name of the engine, as in `ENGINES`.
        precision: precision that it computes in.
        forward: preprocessed images (B, C, H, W) float32 -> outputs (B, K); any B of 1 or more.
        device: device of the images that it takes.
    """

    name: str
    precision: str
    forward: Forward
    device: torch.device = CPU

    def __call__(self, images: Images) -> Float[Tensor, "B K"]:
        """Return logits (B, K) as float32, on the device of the engine."""
        return self.forward(images.to(self.device)).float()


def build_engine(name: str, model: ViT, **settings: Any) -> Engine:
    """Build an engine for a model, in this process.

    Args:
        name: a name of `ENGINES`.
        model: a `ViT` in eval mode; it stays as it is.
        **settings: other fields of `EngineRequest`; default size and device are the model's.

    Raises:
        SettingError: an engine or a precision that does not exist, not together, or not here.
        MissingExtraError: packages of the engine are not installed.
    """
    own: dict[str, Any] = {"image_size": model.spec.image_size}
    own["device"] = next(model.parameters()).device
    return build_requested(name, EngineRequest(model, **own | settings))


def build_requested(name: str, request: EngineRequest) -> Engine:
    """Build an engine for all that a request has. Errors as `build_engine`."""
    registry.check_engine(name, request.precision, request.calibration)
    registry.refuse_not_installed(name, request.precision)
    kind = registry.ENGINES[name]
    if kind.cpu_only:
        request = replace(request, device=CPU)
    forward = resolve_name(f"vitkit.engines.{kind.builder}")(request)
    return Engine(name, request.precision, forward, request.device)


# The model as a `torch.export` program, from which the files of other runtimes are made.

INPUT = "images"
"""Name of the input, (B, C, H, W)."""
OUTPUT = "logits"
"""Name of the output, (B, K)."""
EXAMPLE_BATCH = 2
"""Batch size of the example input; a batch of one would be exported as a constant."""


def export_program(
    model: nn.Module, example: Tensor, sizes: dict[int, Any] | None = None
) -> ExportedProgram:
    """Return a model's program for batches of any size (`torch.export`).

    Args:
        model: images -> outputs; in eval mode, on the CPU.
        example: a batch of `EXAMPLE_BATCH` images.
        sizes: further axes of free length -> their `Dim`.

    Raises:
        SettingError: a model that torch cannot export, with torch's reason.
    """
    shapes = ({0: Dim("batch", min=1), **(sizes or {})},)
    try:
        with torch.no_grad(), without_warnings():
            return torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch raises many kinds
        reason = str(error).strip().partition("\n")[0]
        raise errors.SettingError(
            f"torch cannot export this model ({type(error).__name__}: {reason}); report the model"
        ) from error


def program_for_inference(request: EngineRequest, attend: Any = None) -> ExportedProgram:
    """Return the program of a request's model, folded, in float32.

    Args:
        request: with the model.
        attend: takes the place of its attention, as a runtime has it; default torch's.
    """
    model = inference_folds.fold_for_inference(request.model).float().cpu()
    for module in model.modules():
        if attend is not None and isinstance(module, MultiHeadAttention):
            module.attend = attend
    shape = (EXAMPLE_BATCH, model.spec.in_channels, *request.image_size)
    return export_program(model, torch.zeros(shape))


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hide the warnings of exporters and converters about their internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# The engine `torch`: the model itself, without autocast.

Capture: TypeAlias = Callable[[Forward, Tensor], Forward]
Kind: TypeAlias = tuple[torch.Size, torch.dtype]
"""Shape and dtype of images."""
WARM_UP_CALLS = 3
"""Calls on a side stream before a capture, in which libraries allocate their workspaces."""


def build_eager(request: EngineRequest) -> Forward:
    """Return the model's forward pass in the precision of the request, without autocast."""
    if request.device.type == "cpu":
        process.keep_freed_memory()
    model = _cast(request.model, request.precision)
    dtype = next(model.parameters()).dtype

    def forward(images: Tensor) -> Tensor:
        logits: Tensor = model(images.to(dtype))
        return logits

    if request.device.type == "cuda":
        return SingleImageGraph(forward)
    return forward


def _cast(model: ViT, precision: str) -> ViT:
    """Return a model in a precision: itself, or a copy where its weights are cast to bfloat16."""
    like = next(model.parameters())
    if precision == "bfloat16" and like.dtype == torch.float32:
        model = copy.deepcopy(model).to(torch.bfloat16)
        if like.is_cuda:
            inference_folds.fuse_gelu(model)
    return model


def _capture_graph(forward: Forward, images: Tensor) -> Forward:
    """Return the CUDA graph of a forward pass, as a function of images of this shape and dtype."""
    given = images.clone()
    with torch.cuda.device(images.device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_CALLS):
                forward(given)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = forward(given)

    def replay(images: Tensor) -> Tensor:
        with torch.cuda.device(given.device):
            given.copy_(images)
            graph.replay()
            return output.clone()  # the next replay overwrites it

    return replay


class SingleImageGraph:
    """A forward pass on a GPU that captures a CUDA graph for single images, at the second one.

    One image is not enough work for a GPU: its time is that of starting some 150 kernels, which a
    graph starts at once (`docs/benchmarks.md`, "On a GPU"). Other batches run as they are, and so
    do single images of another shape or dtype than those of the graph.

    Args:
        forward: (B, C, H, W) -> (B, K), without any wait for the GPU inside.
        capture: makes the graph of `forward` for an image, as a function from such an image.
    """

    def __init__(self, forward: Forward, capture: Capture = _capture_graph) -> None:
        self._forward = forward
        self._capture = capture
        self._lock = threading.Lock()  # a graph has one input and one output
        self._seen: Kind | None = None
        self._graphs: dict[Kind, Forward] = {}
        """At most one: each graph holds the memory of a forward pass."""

    def __call__(self, images: Tensor) -> Tensor:
        """Return the outputs (B, K)."""
        if len(images) != 1:
            return self._forward(images)
        kind = (images.shape, images.dtype)
        with self._lock, torch.inference_mode():
            if not self._graphs and self._seen == kind:  # not the first one: there may be no other
                self._graphs[kind] = self._capture(self._forward, images)
            self._seen = kind
            return self._graphs.get(kind, self._forward)(images)


# The engine `compile`: torch.compile with the inductor backend.


def build_compiled(request: EngineRequest) -> Forward:
    """Return a compiled forward pass; the first batch compiles for up to a minute.

    On a processor its program is for any number of images, so that the last batch, and the batches
    of another process, find it compiled: about as fast as one for each size. A single image has a
    program of its own.

    Raises:
        MissingExtraError: no C++ compiler is installed.
    """
    on_cpu = request.device.type == "cpu"
    if on_cpu:
        registry.refuse_no_compiler("engine compile", "--engine torch")
        process.keep_freed_memory()
    model = _cast(
        inference_folds.fold_for_inference(request.model), request.precision
    ).requires_grad_(False)
    dtype = next(model.parameters()).dtype
    run = torch.compile(model, options={"freezing": on_cpu})

    def forward(images: Tensor) -> Tensor:
        images = images.detach().to(dtype)
        if on_cpu:
            torch._dynamo.maybe_mark_dynamic(images, 0)
        # frozen weights are constants of the program, which gradients do not allow
        with torch.no_grad():
            logits: Tensor = run(images)
        return logits

    return forward
