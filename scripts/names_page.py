"""Write docs/guides/names.md from src/vitkit/other_names.py: `python scripts/names_page.py`."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from vitkit.other_names import AMBIGUOUS, CLASSES, KEYWORDS, TIMM_KEYWORDS, TRANSFORMER

PAGE = Path(__file__).parents[1] / "docs" / "guides" / "names.md"
QUOTED = r"'(?=vit_)|(?<=\d)'"
"""The quotes around the name of a model."""
INTRODUCTION = """# Names elsewhere, and here

Teaching notebooks and other libraries have other names for the same things. Many of them work in
vitkit. For the others, the error message says the name to write. (`scripts/names_page.py` writes
this page from the tables that the messages use.)

## Models

`vitkit.ViT()` is ViT-B/16 for 224 pixels and 1,000 classes. `vitkit.create_model`, `--model` and
`vitkit summary` take the [names of timm](../models.md), and the short names of the papers:

| elsewhere | here |
| --- | --- |
| `ViT-B/16`, `vit_b16`, `vit_b_16`, `ViT-B_16`, `B/16` | `vit_base_patch16_224` |
| `ViT-L/32`, `vit_l_32` | `vit_large_patch32_224` |
| `ViT-L_16-384` | `vit_large_patch16_384` |
| `ViT-Ti/16`, `ViT-S/16` | `vit_tiny_patch16_224`, `vit_small_patch16_224` |
"""
WITHOUT_BIAS = """
The model with 86,540,008 parameters that a teaching notebook calls `vit_b16` has no bias of the
qkv projection: `vitkit.create_model("vit_b16", qkv_bias=False)`. With the bias, as published, it
has 86,567,656.
"""
FIELDS = """
## Keywords of a ViT

`vitkit.ViT(...)` and `vitkit.create_model(name, ...)` take each of these keywords, or the field of
`ViTSpec` itself. `ViTSpec` takes its own fields alone.

```python
import vitkit

model = vitkit.ViT(image_size=64, patch_size=16, dim=128, depth=2, heads=4, mlp_dim=256)
```

The sizes are those of vit-pytorch's `ViT`. Its other differences are fields, too:
`stem="normed_linear"`, `qkv_bias=False`, `head_width=64`, `norm_eps=1e-5`.

| keyword elsewhere | field |
| --- | --- |
"""
SEQUENCES = """
## Keywords of a Transformer

| keyword elsewhere | argument of `vitkit.Transformer` |
| --- | --- |
"""
NAMES = """
## Classes and functions

| elsewhere | here |
| --- | --- |
"""


def page() -> str:
    """Return the whole page."""
    ambiguous = "".join(
        f"| `{name}` | {re.sub(QUOTED, '`', answer)} |\n" for name, answer in AMBIGUOUS.items()
    )
    classes = defaultdict(list)
    for name, ours in CLASSES.items():
        classes[ours].append(name)
    rows = (
        f"| {words(names)} | {' or '.join(f'`vitkit.{one}`' for one in ours.split(' or '))} |\n"
        for ours, names in classes.items()
    )
    sequences = by_field({name: (ours,) for name, ours in TRANSFORMER.items()})
    fields = by_field(KEYWORDS | TIMM_KEYWORDS)
    return (
        INTRODUCTION
        + ambiguous
        + WITHOUT_BIAS
        + FIELDS
        + fields
        + SEQUENCES
        + sequences
        + NAMES
        + "".join(rows)
    )


def by_field(keywords: Mapping[str, tuple[str, ...]]) -> str:
    """Return a row for each field, with all keywords that mean it."""
    found = defaultdict(list)
    for keyword, fields in keywords.items():
        found[fields].append(keyword)
    return "".join(f"| {words(names)} | {words(fields)} |\n" for fields, names in found.items())


def words(names: Iterable[str]) -> str:
    """Return names as code, with commas."""
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
