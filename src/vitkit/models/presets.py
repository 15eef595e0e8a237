"""Named models. Names are timm's: `vit_<size>_patch<P>_<pixels>`.

Sizes: "An Image is Worth 16x16 Words", Table 1 (base, large, huge), and "How to train your ViT?"
(arXiv 2106.10270), Table 2 (tiny, small).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from vitkit.errors import SettingError, did_you_mean
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec


class _Size(NamedTuple):
    width: int
    depth: int
    num_heads: int
    mlp_width: int


SIZES = {
    "tiny": _Size(192, 12, 3, 768),
    "small": _Size(384, 12, 6, 1536),
    "base": _Size(768, 12, 12, 3072),
    "large": _Size(1024, 24, 16, 4096),
    "huge": _Size(1280, 32, 16, 5120),
}
PATCHES = (8, 14, 16, 32)
PIXELS = (224, 384)


def _presets() -> dict[str, ViTSpec]:
    return {
        f"vit_{name}_patch{patch}_{pixels}": ViTSpec(
            image_size=(pixels, pixels), patch_size=(patch, patch), **size._asdict()
        )
        for name, size in SIZES.items()
        for patch in PATCHES
        for pixels in PIXELS
        if pixels % patch == 0
    }


PRESETS = _presets()


def list_models(pattern: str = "*") -> list[str]:
    """The names of the models that `create_model` knows, sorted.

    Args:
        pattern: shell-style, such as `"vit_base*"`.

    >>> list_models("vit_huge*_224")
    ['vit_huge_patch14_224', 'vit_huge_patch16_224', 'vit_huge_patch32_224', 'vit_huge_patch8_224']
    """
    return sorted(name for name in PRESETS if fnmatchcase(name, pattern))


def preset(name: str, **overrides: Any) -> ViTSpec:
    """The spec of a named model, with any `ViTSpec` field overridden.

    Raises:
        SettingError: no model of that name; the nearest three are named.
        SpecError: an unknown field, or a spec that cannot exist.
    """
    if name not in PRESETS:
        near = did_you_mean(name, PRESETS, count=3)
        raise SettingError(f"there is no model {name!r}{near} (`vitkit models` lists all)")
    return PRESETS[name].replace(**overrides)


def build(name: str, **overrides: Any) -> ViT:
    """A freshly initialised model by name; errors as for `preset`."""
    return ViT(preset(name, **overrides))
