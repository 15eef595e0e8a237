"""Formulas as a browser draws them: heights and positions of their parts, and MathML Core alone."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

from reporting.browser import Browser, needs_browser

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))

import chapters  # noqa: E402
import mathml  # noqa: E402

sys.path.pop(0)
FURTHER = [
    r"\lVert x_p^i \rVert^2", r"\overline{g + \lambda w}", r"\hat{y} + \bar{x} + \tilde{x}",
    r"\operatorname{argmax} z", r"z'_l + z'' + f'(x)", r"\left\lfloor \frac{H}{P} \right\rfloor",
    r"\lfloor x \rfloor + \lceil y \rceil", r"\left| \frac{a}{b} \right|",
]  # fmt: skip
CORE = {
    "math", "mfrac", "mi", "mn", "mo", "mover", "mroot", "mrow", "mspace", "msqrt", "mstyle",
    "msub", "msubsup", "msup", "mtable", "mtd", "mtext", "mtr", "munder", "munderover",
}  # fmt: skip
ATTRIBUTES = {
    "display", "style", "stretchy", "fence", "form", "lspace", "rspace", "width", "accent",
    "minsize", "maxsize", "movablelimits", "displaystyle", "symmetric", "mathvariant",
    "linethickness", "separator", "largeop", "scriptlevel",
}  # fmt: skip
FAULTS = Path(__file__).with_name("formula_faults.js").read_text(encoding="utf-8")


def formulas() -> list[str]:
    """All formulas of the chapters and pages."""
    found: list[str] = list(FURTHER)
    for path in sorted((ROOT / "docs").rglob("*")):
        if path.suffix == ".py" and path.name[0].isdigit():
            cells = chapters.read(path.read_text(encoding="utf-8")).cells
            text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
        elif path.suffix == ".md":
            text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        else:
            continue
        text = re.sub(r"`[^`]*`", "", text)
        shown = re.findall(r"\$\$(.+?)\$\$", text, flags=re.DOTALL)
        found += shown + re.findall(
            r"\$([^$\n]+)\$", re.sub(r"\$\$.+?\$\$", "", text, flags=re.DOTALL)
        )
    return list(dict.fromkeys(found))


def test_formulas_have_elements_and_attributes_of_mathml_core():
    """Firefox and Chromium draw MathML Core; what is beyond it is lost in one of them."""
    for latex in formulas():
        for element in ElementTree.fromstring(mathml.to_mathml(latex)[0]).iter():
            assert element.tag.rpartition("}")[2] in CORE, latex
            assert set(element.attrib) <= ATTRIBUTES, (latex, element.attrib)


@needs_browser
def test_the_parts_of_a_formula_stand_where_they_belong(tmp_path: Path, browser: Browser):
    drawn = []
    for latex in formulas():
        made = mathml.to_mathml(latex, display=True)[0]
        name = latex.strip().replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
        named = made.replace("<math", f'<math data-latex="{name}"', 1)
        drawn.append(f"<div>{named}</div>")
    page = tmp_path / "formulas.html"
    style = (ROOT / "docs/_static/site.css").read_text(encoding="utf-8")
    page.write_text(
        f"<!doctype html><meta charset=utf-8><style>{style}</style>{''.join(drawn)}",
        encoding="utf-8",
    )
    browser.show(1280)
    browser.open(page)
    assert browser.run(FAULTS) == []
    # The checks see a fault: a fence that is three times as high as what it encloses.
    browser.run("document.querySelector('mo[fence]').style.fontSize = '400%';")
    assert browser.run(FAULTS) != []
