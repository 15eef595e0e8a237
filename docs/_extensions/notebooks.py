"""Each chapter as a Jupyter notebook to download, with all files that it needs in a zip archive.

The archive has the wheel of vitkit itself, so that a notebook runs without a checkout. What only
the site draws becomes what Jupyter shows: captions are text, directives are code, pictures or a
sentence, and each solution is folded, with an empty cell before it.
"""

from __future__ import annotations

import ast
import base64
import hashlib
import html
import json
import re
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import chapters
import nbformat
from docutils import nodes
from drawings import svg
from hatchling.builders.wheel import WheelBuilder
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
TUTORIAL = DOCS / "tutorial"
RUNS = TUTORIAL / "results/chapters.json"
"""Seconds and megabytes of each chapter, by scripts/measure_chapters.py."""
FOLDER = "downloads"
HOW_TO_RUN = """**To run this notebook**, unpack the zip archive of the chapter, and open the
notebook in its folder, which has all files that the cells read. It needs Python 3.11 or newer. The
next cell installs vitkit if it is missing."""
INSTALL = """import importlib.util

if not all(map(importlib.util.find_spec, ("vitkit", "skimage", "sklearn"))):
    %pip install --quiet ./{wheel} scikit-image scikit-learn"""
EMPTY = "# Write your solution here, then unfold the next cell."
FENCE = re.compile(r"^```\{([\w-]+)\}[ \t]*(.*)\n((?:.*\n)*?)```[ \t]*$", flags=re.MULTILINE)
BOX = re.compile(r"^:::\{[\w-]+\}[ \t]*(.*)\n((?:.*\n)*?):::[ \t]*$", flags=re.MULTILINE)
ROLE = re.compile(r"\{[\w:-]+\}`([^`<]*?)(?:\s*<([^`>]*)>)?`")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
OPTION = re.compile(r"^:([\w-]+):[ \t]*(.*)$", flags=re.MULTILINE)
FOLDED = {"jupyter": {"source_hidden": True}, "cellView": "form"}
"""Metadata of a cell whose code JupyterLab and Colab fold."""


def notebook(path: Path) -> NotebookNode:
    """Return a chapter as a notebook without outputs."""
    cells: list[NotebookNode] = []
    for cell in chapters.read(path.read_text(encoding="utf-8")).cells:
        if cell.cell_type == "markdown":
            cells.append(markdown_cell(cell.source))
            if len(cells) == 1:
                cells.append(new_markdown_cell(HOW_TO_RUN))
                cells.append(new_code_cell(INSTALL.format(wheel=wheel_name())))
            continue
        cells += code_cells(cell)
    for number, cell in enumerate(cells):  # the same names in every build
        cell["id"] = hashlib.sha256(f"{path.stem}{number}".encode()).hexdigest()[:8]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made = new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.validate(made)
    return made


def code_cells(cell: NotebookNode) -> Iterator[NotebookNode]:
    """Yield a cell of code with what belongs to it: an empty cell before, a caption after."""
    tags = cell.metadata.get("tags", [])
    shown = cell.metadata.get("mystnb", {})
    if "hide-cell" in tags:
        yield new_code_cell(EMPTY)
    folded = {"hide-cell", "hide-input"} & set(tags)
    yield new_code_cell(cell.source, metadata=FOLDED if folded else {})
    if caption := shown.get("figure", {}).get("caption"):
        yield new_markdown_cell(f"*{plain(caption)}*")


def markdown_cell(source: str) -> NotebookNode:
    """Return a cell of text in which nothing is left that only the site understands."""
    pictures: dict[str, dict[str, str]] = {}

    def replaced(found: re.Match[str]) -> str:
        return directive(found[1], found[2].strip(), found[3], pictures)

    text = FENCE.sub(replaced, f"{source}\n")
    cell = new_markdown_cell(plain(BOX.sub(quoted, text)).strip())
    if pictures:
        cell["attachments"] = pictures
    return cell


def directive(name: str, argument: str, body: str, pictures: dict[str, dict[str, str]]) -> str:
    """Return what a notebook shows for a directive; drawings are added to `pictures`."""
    options = dict(OPTION.findall(body))
    rest = OPTION.sub("", body).strip()
    if name == "literalinclude":
        return f"```python\n{included(argument, options)}\n```"
    if name == "drawing":
        content = base64.b64encode(svg(argument).encode()).decode("ascii")
        pictures[f"{argument}.svg"] = {"image/svg+xml": content}
        return f"![{argument}](attachment:{argument}.svg)\n\n{rest}"
    return f"{rest} (This part is on the page of the chapter.)" if rest else ""


def included(argument: str, options: dict[str, str]) -> str:
    """Return the lines of a file that a `literalinclude` shows."""
    text = (TUTORIAL / argument).read_text(encoding="utf-8")
    if "pyobject" in options:
        return segment(text, options["pyobject"])
    if "lines" in options:
        first, _, last = options["lines"].partition("-")
        return "\n".join(text.splitlines()[int(first) - 1 : int(last or first)])
    return text.strip()


def segment(text: str, name: str) -> str:
    """Return the lines of a class or function, `ViT.forward` for one in a class."""
    body: list[ast.stmt] = ast.parse(text).body
    lines = text.splitlines()
    for part in name.split("."):
        kinds = ast.ClassDef | ast.FunctionDef
        node = next(n for n in body if isinstance(n, kinds) and n.name == part)
        body = node.body
    assert isinstance(node, kinds)
    start = min([node.lineno, *(line.lineno for line in node.decorator_list)])
    return "\n".join(lines[start - 1 : node.end_lineno])


def quoted(found: re.Match[str]) -> str:
    """Return a box of the site as a block quote."""
    lines = [f"**{found[1].strip()}**", "", *OPTION.sub("", found[2]).strip().splitlines()]
    return "\n".join(f"> {line}".rstrip() for line in lines)


def plain(text: str) -> str:
    """Return text without the roles of the site; links lead to other notebooks, or are words."""

    def link(found: re.Match[str]) -> str:
        words, target = found[1], found[2]
        if re.match(r"[a-z]+:", target):
            return found[0]
        file = target.partition("#")[0]
        if file.endswith(".py") and (TUTORIAL / file).is_file() and file[:1].isdigit():
            return f"[{words}]({file.removesuffix('.py')}.ipynb)"
        return words

    def role(found: re.Match[str]) -> str:
        return f"`{found[1]}`"

    return LINK.sub(link, ROLE.sub(role, text))


def data_files(text: str) -> list[Path]:
    """Return the results that a file reads by `measured(NAME)`, and the checkpoints it names,
    with their receipts."""
    quoted_words = set(re.findall(r'"([\w./-]+)"', text))
    results = [
        file
        for file in sorted((TUTORIAL / "results").glob("*.json"))
        if file.stem in quoted_words and "measured" in imported_names(text)
    ]
    words = set(re.findall(r"[\w.-]+", text))
    carried = sorted((TUTORIAL / "checkpoints").glob("*.safetensors"))
    named = [file for file in carried if file.name in words]
    receipts = [file.with_suffix(".json") for file in named]
    return results + named + [file for file in receipts if file.is_file()]


def imported_names(text: str) -> list[str]:
    """Return the modules that a file imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
    return sorted(names)


def needed_files(path: Path) -> list[Path]:
    """Return the files beside a chapter that it imports or reads, directly or through others."""
    found: dict[Path, None] = {}
    new = [path]
    while new:
        text = new.pop().read_text(encoding="utf-8")
        helpers = [TUTORIAL / f"{name}.py" for name in imported_names(text)]
        fresh = [helper for helper in helpers if helper.is_file() and helper not in found]
        found |= dict.fromkeys([*fresh, *data_files(text)])
        new += fresh
    return list(found)


@cache
def wheel() -> tuple[str, bytes]:
    """Return the wheel of vitkit: its name and its content."""
    with tempfile.TemporaryDirectory() as folder:
        (path,) = WheelBuilder(str(ROOT)).build(directory=folder, versions=["standard"])
        return Path(path).name, Path(path).read_bytes()


def wheel_name() -> str:
    """Return the file name of vitkit's wheel."""
    return wheel()[0]


def write_archive(place: Path, paths: list[Path]) -> None:
    """Write a zip archive of chapters as notebooks, with all files that they need."""
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        name, content = wheel()
        archive.writestr(entry(f"{place.stem}/{name}"), content)
        for path in paths:
            text = nbformat.writes(notebook(path))
            archive.writestr(entry(f"{place.stem}/{path.stem}.ipynb"), text)
        for file in dict.fromkeys(file for path in paths for file in needed_files(path)):
            inside = file.relative_to(TUTORIAL).as_posix()
            archive.writestr(entry(f"{place.stem}/{inside}"), file.read_bytes())


def entry(name: str) -> zipfile.ZipInfo:
    """Return an entry of an archive with a fixed date, so that equal builds are equal."""
    made = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
    made.compress_type = zipfile.ZIP_DEFLATED
    made.external_attr = 0o644 << 16
    return made


def all_chapters() -> list[Path]:
    """Return the chapters in order."""
    return sorted(TUTORIAL.glob("[0-9]*.py"))


def write_downloads(app: Sphinx, error: Exception | None) -> None:
    """Write all notebooks and archives into the site."""
    if error is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir) / FOLDER
    folder.mkdir(exist_ok=True)
    for path in all_chapters():
        nbformat.write(notebook(path), folder / f"{path.stem}.ipynb")
        write_archive(folder / f"{path.stem}.zip", [path])
    write_archive(folder / "vitkit-tutorial.zip", all_chapters())


def add_links(app: Sphinx, document: nodes.document) -> None:
    """Put the downloads of a chapter under its title, and its time into the box of its aims."""
    chapter = Path(app.env.docname).name
    if f"{chapter}.py" not in {path.name for path in all_chapters()}:
        return
    title = next(iter(document.findall(nodes.title)), None)
    if title is None or title.parent is None:
        return
    links = [
        ("Notebook", f"{chapter}.ipynb"),
        ("Notebook with all its files (zip)", f"{chapter}.zip"),
    ]
    items = [f'<a href="../{FOLDER}/{file}" download>{text}</a>' for text, file in links]
    if app.config.colab_base:
        address = html.escape(f"{app.config.colab_base}/{chapter}.ipynb", quote=True)
        items.append(f'<a href="{address}">Open in Colab</a>')
    listed = f'<p class="chapter-files">{" ".join(items)}</p>'
    title.parent.insert(title.parent.index(title) + 1, nodes.raw("", listed, format="html"))
    cost = running(chapter)
    for box in document.findall(nodes.admonition):
        points = next(iter(box.findall(nodes.bullet_list)), None)
        if cost and points is not None and "aims" in box["classes"]:
            points += nodes.list_item("", nodes.paragraph("", "", *cost))


def running(chapter: str) -> list[nodes.Node]:
    """Return what a chapter costs, in words; nothing where it was not measured."""
    measured: dict[str, Any] = json.loads(RUNS.read_text()) if RUNS.is_file() else {}
    cost = measured.get("chapters", {}).get(chapter)
    if cost is None:
        return []
    words = (
        f" takes {cost['seconds']:.0f} s and {cost['megabytes']:.0f} MB ({measured['processor']})"
    )
    return [nodes.strong("", "Running"), nodes.Text(words)]


def setup(app: Sphinx) -> dict[str, object]:
    """When a page is read, and when all are written."""
    app.add_config_value("colab_base", "", "html", types=[str])
    app.connect("doctree-read", add_links)
    app.connect("build-finished", write_downloads)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
