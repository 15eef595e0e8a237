"""All foreign formats by name, in the order in which `detect` is called on a file."""

from __future__ import annotations

from vitkit.weights.formats.deit import DEIT
from vitkit.weights.formats.description import OWN_FORMAT
from vitkit.weights.formats.dinov2 import DINOV2
from vitkit.weights.formats.format import Format
from vitkit.weights.formats.google.format import GOOGLE
from vitkit.weights.formats.huggingface.format import HUGGINGFACE
from vitkit.weights.formats.jeonsworld import JEONSWORLD
from vitkit.weights.formats.lucidrains import LUCIDRAINS
from vitkit.weights.formats.timm.format import TIMM
from vitkit.weights.formats.torchvision import TORCHVISION

# timm comes last: its names are the most general, and files of others match them, too.
_IN_ORDER = (GOOGLE, HUGGINGFACE, TORCHVISION, JEONSWORLD, LUCIDRAINS, DINOV2, DEIT, TIMM)
FORMATS: dict[str, Format] = {form.name: form for form in _IN_ORDER}


def formats() -> set[str]:
    """Return the names of the formats that can be read and written."""
    return {OWN_FORMAT, *FORMATS}
