"""Write docs/models.md from src/vitkit/models/presets.toml: `python scripts/models_table.py`."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from vitkit.models.presets import PresetEntry, preset, table

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
COLUMNS = {
    "width", "depth", "num_heads", "mlp_width", "patch_size", "image_size", "num_classes",
}  # fmt: skip
INTRODUCTION = """# Models

`vitkit.create_model(name)` builds each of these {count} models with initial weights, and
`vitkit models 'vit_base*'` lists them. A name that timm also has means the model that timm builds.
Keywords change any field of `ViTSpec`:
`vitkit.create_model("vit_base_patch16_224", num_classes=37, qkv_bias=False)`.

Parameters include the head. Image and patch are height and width in pixels. With 0 classes the
model has no head, and `forward` returns pooled features. "Other fields" are fields of `ViTSpec`
that differ from their defaults.

`scripts/models_table.py` writes this page from `src/vitkit/models/presets.toml`.
"""
HEADER = """
| model | parameters | image | patch | width x depth x heads, MLP | classes | other fields |
| --- | ---: | ---: | ---: | --- | ---: | --- |
"""


def page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION.format(count=len(table()))]
    for family, lines in groupby(table().items(), key=lambda line: line[1].family):
        parts.append(section(family, dict(lines)))
    return "\n".join(parts)


def section(family: str, models: dict[str, PresetEntry]) -> str:
    """Return one family: heading, source, shared fields, and a row for each model."""
    entries = list(models.values())
    shared = {
        field: value
        for field, value in further(entries[0]).items()
        if all(entry.fields.get(field) == value for entry in entries)
    }
    intro = f"Source: {entries[0].source}."
    if shared:
        intro += f" All have {words(shared)}."
    rows = "\n".join(row(name, entry, shared) for name, entry in models.items())
    return f"## {family}\n\n{intro}\n{HEADER}{rows}\n"


def row(name: str, entry: PresetEntry, shared: dict[str, Any]) -> str:
    """Return the row of one model."""
    spec = preset(name)
    own = {field: value for field, value in further(entry).items() if field not in shared}
    cells = (
        f"`{name}`",
        f"{entry.parameters:,}",
        spec.image_size[0],
        spec.patch_size[0],
        f"{spec.width} x {spec.depth} x {spec.num_heads}, {spec.mlp_width}",
        spec.num_classes,
        words(own),
    )
    return f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |")


def further(entry: PresetEntry) -> dict[str, Any]:
    """Return the fields of a model that differ from the defaults, as keywords of `ViTSpec`."""
    return {field: value for field, value in entry.fields.items() if field not in COLUMNS}


def words(fields: dict[str, Any]) -> str:
    """Return fields as code, such as `class_token=False`, `pooling='map'`."""
    return ", ".join(f"`{field}={value!r}`" for field, value in fields.items())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
