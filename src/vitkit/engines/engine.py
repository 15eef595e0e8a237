"""`Engine`: a model that is ready to run, as one function from images to logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

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
