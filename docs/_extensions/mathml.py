"""Formulas as MathML, which browsers draw by themselves: no script, nothing fetched.

LaTeX goes through latex2mathml. That library passes on what it does not know, so its answer is
read again: a formula with an unknown command or an unmatched brace stops the build with its page
and line. What it writes in ways that MathML Core does not have is put right.
"""

from __future__ import annotations

import re
from typing import NoReturn
from xml.etree import ElementTree

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.math import get_node_equation_number
from sphinx.writers.html5 import HTML5Translator

NAMESPACE = "http://www.w3.org/1998/Math/MathML"
TAG = re.compile(r"\\tag\{([^{}]*)\}")
SPACE_AT_LINE_END = re.compile(r"(?<!\\)\\\s*\n")
ALIGNED = re.compile(r"\\(begin|end)\{(?:aligned|split|gathered)\}")
SPACES = {"negativethinmathspace": "-0.167em", "negativemediummathspace": "-0.222em",
          "negativethickmathspace": "-0.278em"}  # fmt: skip
logger = logging.getLogger(__name__)


class FormulaError(ValueError):
    """A formula that cannot be drawn; the message says why."""


def to_mathml(latex: str, *, display: bool = False) -> tuple[str, str]:
    r"""A formula as a `<math>` element, and its number: what stood in `\tag{...}`, else empty.

    Raises:
        FormulaError: unmatched braces, an unknown command, or LaTeX that means nothing.
    """
    numbers = TAG.findall(latex)
    if len(numbers) > 1:
        raise FormulaError(f"{len(numbers)} numbers for one formula: {latex.strip()}")
    spaced = SPACE_AT_LINE_END.sub(r"\\ ", TAG.sub("", latex))
    bare = ALIGNED.sub(r"\\\1{align*}", spaced).strip()
    check_braces(bare)
    try:
        made = convert(bare, display="block" if display else "inline")
        root = ElementTree.fromstring(made)
    except Exception as error:  # latex2mathml raises IndexError, KeyError and its own errors
        why = str(error) or type(error).__name__
        raise FormulaError(f"no formula ({why}): {latex.strip()}") from error
    for element in root.iter():
        if "\\" in (text := element.text or ""):
            raise FormulaError(f"unknown command {text.strip()}: {latex.strip()}")
        mend(element)
    ElementTree.register_namespace("", NAMESPACE)
    return ElementTree.tostring(root, encoding="unicode"), "".join(numbers)


def check_braces(latex: str) -> None:
    """Raises `FormulaError` where { and } do not match; latex2mathml would not say it."""
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", latex.replace(r"\\", "")):
        depth += 1 if brace == "{" else -1
        if depth < 0:
            break
    if depth:
        raise FormulaError(f"unmatched brace: {latex}")


def mend(element: ElementTree.Element) -> None:
    """Names of functions are identifiers, spaces have lengths: MathML Core knows no others."""
    name = element.tag.rpartition("}")[2]
    if name == "mo" and re.fullmatch(r"[A-Za-z]{2,}", element.text or ""):
        element.tag = element.tag.replace("}mo", "}mi")
    if name == "mspace" and element.get("width") in SPACES:
        element.set("width", SPACES[element.attrib["width"]])
    if name == "mtd" and element.get("columnalign"):
        element.set("style", f"text-align: {element.attrib.pop('columnalign')}")


def formula(node: nodes.math | nodes.math_block, *, display: bool) -> tuple[str, str]:
    """Return a node as MathML; warn of a wrong formula with page and line (an error under -W)."""
    try:
        return to_mathml(node.astext(), display=display)
    except FormulaError as error:
        logger.warning("%s", error, location=node, type="mathml")
        return f"<code>{nodes.unescape(node.astext())}</code>", ""


def visit_math(writer: HTML5Translator, node: nodes.math) -> NoReturn:
    """A formula within a line."""
    writer.body.append(formula(node, display=False)[0])
    raise nodes.SkipNode


def visit_displaymath(writer: HTML5Translator, node: nodes.math_block) -> NoReturn:
    """A formula by itself, with its number at the right; `#equation-N` leads to it."""
    made, number = formula(node, display=True)
    if node.get("number"):
        number = get_node_equation_number(writer, node)
    names = {"ids": [f"equation-{number}"]} if number and not node["ids"] else {}
    writer.body.append(writer.starttag(node, "div", CLASS="formula", **names))
    writer.body.append(f'<div class="formula-itself">{made}</div>')
    if number:
        writer.body.append(f'<span class="formula-number">({number})</span>')
    writer.body.append("</div>\n")
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, object]:
    """Takes the place of MathJax where `html_math_renderer = "mathml"`."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_displaymath, None))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
