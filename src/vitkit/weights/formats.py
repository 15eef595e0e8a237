"""The foreign formats by name, in the order in which a file is held against them."""

from __future__ import annotations

from vitkit.weights import google, huggingface, torchvision
from vitkit.weights.format import Format

FORMATS: dict[str, Format] = {
    form.name: form for form in (google.FORMAT, huggingface.FORMAT, torchvision.FORMAT)
}
