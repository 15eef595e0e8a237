"""`Engine`: a model that is ready to run, and the registry of all engines by name."""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from vitkit.errors import MissingExtraError, SettingError
from vitkit.messages import did_you_mean, plural
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


# The engines by name: the packages that each needs, and the precisions that it has.

EngineName = Literal["torch", "compile", "openvino", "onnxruntime"]
Precision = Literal["float32", "bfloat16", "int8"]
PRECISIONS: tuple[str, ...] = get_args(Precision)
CPU_PRECISIONS = ("int8",)
"""Precisions of CPU engines only."""
QUANTISERS = ("nncf",)
"""Packages that int8 needs besides those of the engine."""
EXTRA = "vitkit[export]"
"""The extra that has the packages of all engines."""
USUAL_COMPILERS = {"darwin": "clang++", "win32": "cl"}
"""Platform -> the C++ compiler that torch's inductor calls there; g++ on all others."""


@dataclass(frozen=True)
class EngineKind:
    """An engine that may be installed.

    Attributes:
        name: by which users choose it.
        builder: the function that makes it, as `module:function` of this package.
        packages: packages that it needs besides torch.
        precisions: precisions that it can compute in.
        gain: its measured gain over torch on processors, for messages.
        cpu_only: True if it runs on the processor alone.
    """

    name: EngineName
    builder: str
    packages: tuple[str, ...]
    precisions: tuple[str, ...]
    gain: str
    cpu_only: bool

    def missing(self, precision: str = "float32") -> tuple[str, ...]:
        """Return the packages that a precision needs and are not installed; none is imported."""
        packages = self.packages
        if precision == "int8":
            packages += QUANTISERS
        return tuple(name for name in packages if find_spec(name) is None)


ONNX = ("onnxruntime", "onnx", "onnxscript")
KINDS = (
    EngineKind("torch", "torch_engines:build_eager", (), PRECISIONS[:2], "", cpu_only=False),
    EngineKind("compile", "torch_engines:build_compiled", (), PRECISIONS[:2], "", cpu_only=False),
    EngineKind(
        "openvino",
        "runtimes:build_openvino",
        ("openvino",),
        PRECISIONS,
        "1.0 to 2.4 times as fast as torch, by the CPU",
        cpu_only=True,
    ),
    EngineKind(
        "onnxruntime",
        "runtimes:build_onnxruntime",
        ONNX,
        PRECISIONS[:1],
        "1.1 to 2.0 times as fast as torch, by the CPU",
        cpu_only=True,
    ),
)
ENGINES: dict[str, EngineKind] = {kind.name: kind for kind in KINDS}
"""Name -> engine."""
CHOICES = ("auto", *ENGINES)
PRECISION_CHOICES = ("auto", *PRECISIONS)


def compiler_name() -> str:
    """Return the C++ compiler of torch's inductor: `$CXX`, else the usual one of the platform."""
    return os.environ.get("CXX") or USUAL_COMPILERS.get(sys.platform, "g++")


def has_compiler() -> bool:
    """Return True if that compiler is installed; it is not run."""
    return shutil.which(compiler_name()) is not None


def check_engine(engine: str, precision: str) -> None:
    """Raise `SettingError` for an engine or a precision that does not exist, or not together.

    Args:
        engine: a name of `ENGINES`, or `auto`.
        precision: a name of `PRECISIONS`, or `auto`.
    """
    values = (("engine", engine, CHOICES), ("precision", precision, PRECISION_CHOICES))
    for noun, value, known in values:
        if value not in known:
            raise SettingError(
                f"{noun} {value!r} does not exist{did_you_mean(value, known)}; "
                f"{noun}s are {', '.join(known)}"
            )
    if engine == "auto" or precision == "auto":
        return
    able = [name for name, kind in ENGINES.items() if precision in kind.precisions]
    if engine not in able:
        raise SettingError(
            f"engine {engine} has no precision {precision}; {' or '.join(able)} has it"
        )


def refuse_not_installed(engine: str, precision: str = "float32") -> None:
    """Raise `MissingExtraError` if packages of an engine in a precision are not installed."""
    kind = ENGINES[engine]
    missing = kind.missing(precision)
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise MissingExtraError(
            f"engine {engine} needs {plural(len(missing), 'package')} that {verb} not installed "
            f"({', '.join(missing)}): pip install '{EXTRA}'; it is {kind.gain}"
        )


def refuse_uncalibrated(precision: str, images: object) -> None:
    """Raise `SettingError` for int8 without calibration images."""
    if precision == "int8" and images is None:
        raise SettingError(
            "precision int8 needs images to calibrate with; pass --calibrate DATA (calibrate=), "
            "such as the training data"
        )


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
