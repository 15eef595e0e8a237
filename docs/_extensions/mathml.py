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
PAIRS = re.compile(
    r"(?<!\\left)\\l(?P<kind>Vert|vert|floor|ceil)(?![A-Za-z])(?P<inner>(?:(?!\\l(?P=kind)).)*?)"
    r"\\r(?P=kind)(?![A-Za-z])",
    flags=re.DOTALL,
)
FENCES = {"Vert": (r"\|", r"\|"), "vert": ("|", "|"), "floor": (r"\lfloor", r"\rfloor"),
          "ceil": (r"\lceil", r"\rceil")}  # fmt: skip
RIGHT_WITH_SCRIPT = {"msub", "msup", "msubsup"}
OPERANDS = {"mi", "mn", "mtext", "msub", "msup", "msubsup", "mfrac", "msqrt", "mroot", "mover"}
THIN = "0.167em"
BARS = {"\u2015", "\u00af"}
"""Bars of latex2mathml above a letter or a group."""
PRIMES = {"\u2032", "\u2033", "\u2034"}
TIGHT = {".", "\u22a4", "\u2032", "\u2033", "\u2034", "*"}
"""Operators without space around them, of which MathML Core's dictionary knows nothing."""
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
    bare = fenced(ALIGNED.sub(r"\\\1{align*}", spaced).strip())
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
    for element in list(root.iter()):
        mend_row(element)
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


def fenced(latex: str) -> str:
    r"""Write `\lVert x \rVert` as a group with fences that are as high as it is."""

    def group(found: re.Match[str]) -> str:
        left, right = FENCES[found["kind"]]
        return rf"{{\left{left} {fenced(found['inner'])} \right{right}}}"

    return PAIRS.sub(group, latex)


def named(element: ElementTree.Element) -> str:
    """Return the name of an element without its namespace."""
    return element.tag.rpartition("}")[2]


def renamed(element: ElementTree.Element, name: str) -> None:
    """Give an element another name."""
    element.tag = f"{{{NAMESPACE}}}{name}"


def mend(element: ElementTree.Element) -> None:
    """Put right an element alone: MathML Core knows neither all names nor all attributes."""
    name, text = named(element), element.text or ""
    if name == "mo" and re.fullmatch(r"[A-Za-z]{2,}", text):
        renamed(element, "mi")
    if name == "mi" and text in TIGHT | set("\u230a\u230b\u2308\u2309"):
        renamed(element, "mo")
    if named(element) == "mo" and text in TIGHT:
        element.attrib.update(lspace="0", rspace="0")
    if name == "mspace" and element.get("width") in SPACES:
        element.set("width", SPACES[element.attrib["width"]])
    if name == "mtd" and element.get("columnalign"):
        element.set("style", f"text-align: {element.attrib.pop('columnalign')}")
    if name == "mover" and len(element) == 2 and named(element[1]) == "mo":
        mend_accent(element)
    if name in {"msup", "msubsup"} and (element[-1].text or "") in PRIMES:
        mend_prime(element)


def mend_prime(element: ElementTree.Element) -> None:
    """Set a prime beside its letter: fonts draw it raised already, and small as a superscript."""
    base, prime = element[0], element[-1]
    renamed(prime, "mo")
    prime.attrib.update(lspace="0", rspace="0")
    if named(element) == "msup":
        renamed(element, "mrow")
        return
    lower = element[1]
    for child in (base, lower, prime):
        element.remove(child)
    both = ElementTree.SubElement(element, f"{{{NAMESPACE}}}mrow")
    both.extend([base, prime])
    element.append(lower)
    renamed(element, "msub")


def mend_accent(element: ElementTree.Element) -> None:
    """Let a bar be as wide as what it covers; other accents keep their size."""
    base, accent = element
    element.set("accent", "true")
    accent.attrib.pop("accent", None)
    letters = "".join(base.itertext()).strip()
    text = accent.text or ""
    if text in BARS and len(letters) > 1:  # few fonts have a bar of any width
        renamed(element, "mrow")
        element.attrib.pop("accent")
        element.remove(accent)
        element.set("style", "border-top: 0.06em solid; padding-top: 0.12em")
        return
    if text in BARS:
        accent.text = "\u00af"
    wide = text in "\u23de\u23b4\u2192" and len(letters) > 1
    accent.set("stretchy", "true" if wide else "false")


def mend_row(element: ElementTree.Element) -> None:
    """Put right what stands in a row: fences with scripts, bars, names of functions."""
    if named(element) not in {"mrow", "math", "mtd", "mstyle"}:
        return
    bars = [child for child in element if named(child) == "mo" and child.text in ("|", "\u2016")]
    plain = [bar for bar in bars if bar.get("form") is None]
    if len(plain) % 2 == 0:
        for number, bar in enumerate(plain):
            bar.attrib.update(fence="true", form="postfix" if number % 2 else "prefix")
    for before, after in reversed(list(zip(element, list(element)[1:], strict=False))):
        if needs_space(before, after):
            place = list(element).index(after)
            element.insert(place, ElementTree.Element(f"{{{NAMESPACE}}}mspace", width=THIN))


def needs_space(before: ElementTree.Element, after: ElementTree.Element) -> bool:
    """Return True between the name of a function and an operand beside it."""
    kinds = named(before), named(after)
    if not OPERANDS.issuperset(kinds):
        return False
    return is_function(before) or is_function(after)


def is_function(element: ElementTree.Element) -> bool:
    """Return True for `argmax`, with or without scripts."""
    base = element[0] if named(element) in RIGHT_WITH_SCRIPT else element
    return named(base) == "mi" and bool(re.fullmatch(r"[A-Za-z]{2,}", base.text or ""))


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
