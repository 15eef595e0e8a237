"""`Engine`: a model that is ready to run, and how it is built by its name."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitkit.engines.registry import ENGINES, check_engine, refuse_not_installed
from vitkit.errors import SettingError
from vitkit.models.vit import ViT
from vitkit.shapes import Images

Forward = Callable[[Tensor], Tensor]
"""Preprocessed images (B, C, H, W) -> logits (B, K)."""


@dataclass(frozen=True)
class EngineRequest:
    """The inputs from which an engine is built.

    Attributes:
        model: in eval mode; an engine may share its weights, and never changes it.
        precision: `float32`, `bfloat16` or `int8`.
        threads: threads of the processor.
        image_size: (height, width) of all images, in pixels.
        device: where it runs; engines for processors alone ignore it.
        folder: where a converted model is kept and found again; `None` converts in memory.
        calibration: preprocessed images (N, C, H, W) that show int8 the range of each activation.
    """

    model: ViT
    precision: str
    threads: int
    image_size: tuple[int, int]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
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
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __call__(self, images: Images) -> Float[Tensor, "B K"]:
        """Return logits (B, K) as float32, on the device of the engine."""
        return self.forward(images.to(self.device)).float()


# Build an engine by its name.


def build_engine(
    name: str,
    model: ViT,
    *,
    precision: str = "float32",
    threads: int | None = None,
    image_size: tuple[int, int] | None = None,
    device: torch.device | None = None,
    folder: Path | None = None,
    calibration: Tensor | None = None,
) -> Engine:
    """Build an engine for a model, in this process.

    Args:
        name: a name of `ENGINES`.
        model: a `ViT` in eval mode; it stays as it is.
        precision: `float32`, `bfloat16` or `int8`.
        threads: threads of the processor; default torch's.
        image_size: (height, width) of the images; default the model's.
        device: for torch and compile; default the model's.
        folder: where a converted model is kept, and found again.
        calibration: preprocessed images (N, C, H, W) for int8.

    Raises:
        SettingError: an engine or a precision that does not exist, not together, or not here.
        MissingExtraError: packages of the engine are not installed.
    """
    request = EngineRequest(
        model=model,
        precision=precision,
        threads=threads or torch.get_num_threads(),
        image_size=image_size or model.spec.image_size,
        device=device or next(model.parameters()).device,
        folder=folder,
        calibration=calibration,
    )
    return build_requested(name, request)


def build_requested(name: str, request: EngineRequest) -> Engine:
    """Build an engine for all that a request has. Errors as `build_engine`."""
    check_engine(name, request.precision)
    if name not in ENGINES:
        raise SettingError(f"engine {name!r}: name one of {', '.join(ENGINES)}")
    refuse_not_installed(name, request.precision)
    kind = ENGINES[name]
    if kind.cpu_only:
        request = replace(request, device=torch.device("cpu"))
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
    model: nn.Module, in_channels: int, image_size: tuple[int, int]
) -> ExportedProgram:
    """Return a model's program for batches of any size (`torch.export`).

    Args:
        model: (B, C, H, W) -> (B, K); in eval mode, on the CPU.
        in_channels: C.
        image_size: (H, W) of all images, in pixels.

    Raises:
        SettingError: a model that torch cannot export, with torch's reason.
    """
    like = next(model.parameters())
    example = torch.zeros(EXAMPLE_BATCH, in_channels, *image_size, dtype=like.dtype)
    shapes = ({0: Dim("batch", min=1)},)
    try:
        with torch.no_grad(), without_warnings():
            return torch.export.export(model, (example,), dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch raises many kinds
        reason = str(error).strip().partition("\n")[0]
        raise SettingError(
            f"torch cannot export this model ({type(error).__name__}: {reason}); pass --engine "
            "torch, and report the model"
        ) from error


@contextmanager
def without_warnings() -> Iterator[None]:
    """Hide the warnings of exporters and converters about their internals."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
