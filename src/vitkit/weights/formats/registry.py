"""The foreign formats by name, in the order in which a file is held against them."""

from __future__ import annotations

from vitkit.weights.formats import deit, dinov2, jeonsworld, lucidrains, torchvision
from vitkit.weights.formats.format import Format
from vitkit.weights.formats.google import format as google
from vitkit.weights.formats.huggingface import format as huggingface
from vitkit.weights.formats.timm import format as timm

FORMATS: dict[str, Format] = {
    room.FORMAT.name: room.FORMAT
    for room in (google, huggingface, torchvision, jeonsworld, lucidrains, dinov2, deit, timm)
}
