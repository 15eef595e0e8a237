"""The tutorial's interactive pages, without its chapters: for a browser."""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_extensions"))

import interactive  # noqa: E402

SCRIPTS = DOCS / "_static/interactive"
CHAPTERS = {"02_attention": "attention-example", "10_transformer": "mask-example"}
"""Chapter -> the part that it has."""


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


def directive_of(chapter: str) -> str:
    """Return the cell of a chapter that holds its part, as Markdown."""
    text = (DOCS / f"tutorial/{chapter}.py").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^# (```{{{CHAPTERS[chapter]}}}\n(?:#.*\n)*?# ```)$", text, re.M)
    return re.sub(r"^# ?", "", found, flags=re.M)


def built_site(folder: Path) -> Path:
    """Build the page of the digit, and of chapters 2 and 10 their parts; return the site."""
    source, out = folder / "docs", folder / "out"
    shutil.copytree(DOCS / "_static", source / "_static")
    shutil.copytree(DOCS / "tutorial/checkpoints", source / "tutorial/checkpoints")
    shutil.copy(DOCS / "tutorial/draw_a_digit.md", source / "tutorial")
    for chapter in CHAPTERS:
        text = f"# Chapter\n\n## Self-attention and heads\n\n{directive_of(chapter)}\n"
        (source / f"tutorial/{chapter}.md").write_text(text, encoding="utf-8")
    for chapter in ("01_patches", "03_encoder", "04_vit"):
        text = "# Chapter\n\n## All of Eq. 1\n"
        (source / f"tutorial/{chapter}.md").write_text(text, encoding="utf-8")
    (source / "index.md").write_text(
        "# Site\n\n```{toctree}\n:glob:\n\ntutorial/*\n```\n", encoding="utf-8"
    )
    warnings = io.StringIO()
    app = Sphinx(
        source, None, out, folder / "trees", "html", status=None, warning=warnings,
        confoverrides={
            "extensions": ["myst_parser", "mathml", "interactive"],
            "myst_enable_extensions": ["dollarmath"], "html_math_renderer": "mathml",
            "html_theme": "furo", "html_static_path": ["_static"], "html_css_files": ["site.css"],
            "html_js_files": [("tables.js", {"defer": "defer"})], "html_copy_source": False,
        },
    )  # fmt: skip
    app.build()
    assert warnings.getvalue() == ""
    return out
