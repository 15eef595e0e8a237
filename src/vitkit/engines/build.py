"""Build an engine by its name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name

import torch
from torch import Tensor

from vitkit.engines.engine import Engine, EngineRequest
from vitkit.engines.registry import ENGINES, check_engine, refuse_not_installed
from vitkit.errors import SettingError
from vitkit.models.vit import ViT


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
