"""A page with the digits' model of the tutorial and no more, for a browser."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs/_extensions"))

import interactive  # noqa: E402

SCRIPTS = ROOT / "docs/_static/interactive"


def bare_page(folder: Path) -> Path:
    """Write a page that loads the model and the strokes."""
    for name in ("vit.js", "strokes.js"):
        shutil.copy(SCRIPTS / name, folder)
    (folder / "digit_weights.js").write_text(interactive.weights_script(), encoding="utf-8")
    names = ("vit.js", "strokes.js", "digit_weights.js")
    tags = "".join(f'<script src="{name}"></script>' for name in names)
    page = folder / "bare.html"
    page.write_text(f'<!doctype html><html lang="en"><title>bare</title>{tags}', encoding="utf-8")
    return page
