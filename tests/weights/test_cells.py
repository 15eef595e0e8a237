"""docs/formats.md says what the formats do."""

from __future__ import annotations

from pathlib import Path

import pytest
from weights.cells import KINDS, cell, document, small

from vitkit.weights.formats import FORMATS

DOCUMENT = Path(__file__).parent.parent.parent / "docs" / "formats.md"


def test_the_document_is_the_table_as_it_is():
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run scripts/formats_table.py"


@pytest.mark.parametrize(
    ("kind", "form", "expected"),
    [
        *(("ViT", name, "exact") for name in ("huggingface", "torchvision", "jeonsworld", "timm")),
        ("DeiT distilled", "deit", "exact"),
        ("DINOv2", "huggingface", "exact"),
        ("DINOv2 with registers", "dinov2", "exact"),
        ("DeiT III", "torchvision", "folded"),
        ("DeiT distilled", "torchvision", "lossy"),
        ("SigLIP (MAP)", "google", "lossy"),
        ("DINOv3", "torchvision", "no"),
    ],
)
def test_cells_that_are_known_by_other_ways(kind, form, expected):
    how, why = cell(small(KINDS[kind]), FORMATS[form])
    assert how == expected, why
