"""Figures of the chapters as SVG within the page, whose axes and words have the theme's colour.

The kernel that runs a chapter is configured to draw with `INK`; the page replaces that colour by
`currentColor`, so one figure serves light and dark pages. Colours of data stay as they are.
"""

from __future__ import annotations

import hashlib
import html
import os
import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

INK = "#010203"
"""The colour that stands for the text of the page."""
INKED = (
    "text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color",
    "axes.titlecolor", "legend.labelcolor", "patch.edgecolor", "boxplot.flierprops.color",
)  # fmt: skip
STYLE: dict[str, object] = {
    **dict.fromkeys(INKED, INK),
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9.0,
    "figure.dpi": 160,
    "svg.fonttype": "path",
    "svg.hashsalt": "vitkit",
}
"""matplotlib's settings in the kernel; `figure.dpi` is the resolution of images in an SVG."""
CONFIG = """c = get_config()  # noqa: F821
c.HistoryManager.enabled = False
c.IPKernelApp.log_level = "ERROR"
c.IPKernelApp.exec_lines = ["import warnings; warnings.filterwarnings('ignore', 'IProgress')"]
c.InlineBackend.figure_formats = {{"svg"}}
c.InlineBackend.rc = {style!r}
"""
INK_IN_SVG = re.compile(rf"({INK}|(?<=stroke: )#000000)\b", flags=re.IGNORECASE)
PROLOGUE = re.compile(r"\A.*?(?=<svg\b)|<metadata>.*?</metadata>", flags=re.DOTALL)
IDENTIFIER = re.compile(r'(\bid="|href="#|url\(#)([^")]+)')
UNUSED_GROUP = re.compile(r'<g id="[^"]*">')


def configure_kernels(folder: Path) -> None:
    """Let every kernel that is started from here draw SVG in `STYLE`; `folder` is overwritten."""
    profile = folder / "profile_default"
    profile.mkdir(parents=True, exist_ok=True)
    (profile / "ipython_kernel_config.py").write_text(CONFIG.format(style=STYLE), encoding="utf-8")
    os.environ["IPYTHONDIR"] = str(folder)
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"


def inline(svg: str, text: str) -> str:
    """Return an SVG of matplotlib as an element of a page.

    Args:
        svg: the file.
        text: what it shows, for readers who do not see it.
    """
    svg = INK_IN_SVG.sub("currentColor", PROLOGUE.sub("", svg))
    svg = UNUSED_GROUP.sub("<g>", svg)  # the same in every figure, and used by none
    prefix = f"f{hashlib.sha256(svg.encode()).hexdigest()[:8]}-"
    svg = IDENTIFIER.sub(rf"\g<1>{prefix}\g<2>", svg)
    width = re.search(r'\bwidth="([\d.]+)pt"', svg)
    size = f' style="width: {float(width[1]) / 72 * 96:.0f}px"' if width else ""
    svg = re.sub(r'\b(?:width|height)="[\d.]+pt"\s*', "", svg, count=2)
    label = html.escape(text, quote=True)
    return svg.replace("<svg", f'<svg class="figure" role="img" aria-label="{label}"{size}', 1)


def put_figures_in_line(app: Sphinx, document: nodes.document) -> None:
    """Replace the SVG images of a chapter's figures by the SVG itself."""
    for figure in document.findall(nodes.figure):
        captions = list(figure.findall(nodes.caption))
        for image in list(figure.findall(nodes.image)):
            place = Path(app.srcdir) / image["uri"].lstrip("/")
            if place.suffix == ".svg" and place.is_file():
                text = captions[0].astext() if captions else ""
                made = inline(place.read_text(encoding="utf-8"), text)
                image.replace_self(nodes.raw("", made, format="html"))


def setup(app: Sphinx) -> dict[str, object]:
    """When a page is read, before other extensions look at its images."""
    app.connect("doctree-read", put_figures_in_line, priority=100)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
