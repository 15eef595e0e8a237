"""The foreign formats by name, in the order in which a file is held against them."""

from __future__ import annotations

from vitkit.weights import (
    deit,
    dinov2,
    google,
    huggingface,
    jeonsworld,
    lucidrains,
    timm,
    torchvision,
)
from vitkit.weights.format import Format

FORMATS: dict[str, Format] = {
    room.FORMAT.name: room.FORMAT
    for room in (google, huggingface, torchvision, jeonsworld, lucidrains, dinov2, deit, timm)
}
