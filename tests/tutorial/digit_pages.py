"""The tutorial's interactive pages, without its chapters: for a browser."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_extensions"))

import interactive  # noqa: E402

SCRIPTS = DOCS / "_static/interactive"
CHAPTERS = {"02_attention": "attention-example", "10_transformer": "mask-example"}
"""Chapter -> the part that it has."""
CONFIGURATION = f"""
import sys
sys.path.insert(0, {str(DOCS / "_extensions")!r})
extensions = ["myst_parser", "mathml", "interactive"]
myst_enable_extensions = ["dollarmath"]
html_math_renderer = "mathml"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("tables.js", {{"defer": "defer"}})]
html_copy_source = False
"""


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
    for chapter in ("00_one_page", "01_patches", "03_encoder", "04_vit"):
        text = "# Chapter\n\n## All of Eq. 1\n"
        (source / f"tutorial/{chapter}.md").write_text(text, encoding="utf-8")
    (source / "index.md").write_text(
        "# Site\n\n```{toctree}\n:glob:\n\ntutorial/*\n```\n", encoding="utf-8"
    )
    (source / "conf.py").write_text(CONFIGURATION, encoding="utf-8")
    # a process of its own: two applications of Sphinx disturb each other
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(source), str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return out
