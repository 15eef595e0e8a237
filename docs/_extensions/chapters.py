"""Chapters: scripts in jupytext's percent format, read as notebooks; names that lead somewhere."""

from __future__ import annotations

import ast
import re
from functools import partial
from pathlib import Path
from typing import Any

import jupytext
import myst_nb.core.execute.cache
from docutils import nodes
from jupyter_cache import get_cache
from jupyter_cache.executors.utils import single_nb_execution
from nbformat import NotebookNode
from sphinx import addnodes
from sphinx.application import Sphinx

import vitkit

CELL = re.compile(r"^# %%", flags=re.MULTILINE)
FOR_TOOLS = re.compile(
    r"^[ \t]*# fmt: (?:off|on)\n?|[ \t]*#[ \t]*(?:fmt: skip|noqa\b[^\n]*|type: ignore[^\n]*)$",
    flags=re.MULTILINE,
)
TUTORIAL = Path(__file__).parents[1] / "tutorial"


def read(text: str, beside: Path = TUTORIAL) -> NotebookNode:
    """A chapter as a notebook that knows its lines, without the comments that are for ruff.

    Args:
        text: the script.
        beside: the folder of the files whose text replaces the import of a cell that is tagged
            "written-out".
    """
    notebook: Any = jupytext.reads(text, fmt="py:percent")
    starts = [text.count("\n", 0, found.start()) + 1 for found in CELL.finditer(text)]
    if len(starts) == len(notebook.cells):
        notebook.metadata["source_map"] = starts
    for cell in notebook.cells:
        if cell.cell_type == "code":
            if "written-out" in cell.metadata.get("tags", []):
                cell.source = written_out(cell.source, beside)
            cell.source = FOR_TOOLS.sub("", cell.source)
    return notebook


def written_out(source: str, beside: Path) -> str:
    """The text of the file from which a cell imports, so that the page shows and runs it.

    Raises:
        ValueError: the cell does more than import from one file that lies beside the chapter.
    """
    body = ast.parse(source).body
    if len(body) != 1 or not isinstance(body[0], ast.ImportFrom):
        raise ValueError(f'a "written-out" cell is one `from FILE import NAME`: {source!r}')
    imported = body[0]
    path = beside / f"{imported.module}.py"
    if not path.is_file():
        raise ValueError(f'a "written-out" cell imports from no file beside it: {path}')
    text = path.read_text(encoding="utf-8")
    for name in imported.names:
        if name.asname is not None or name.name not in defined(text):
            raise ValueError(f"{path.name} does not define {name.name}, or the cell renames it")
    return text.strip()


def defined(text: str) -> set[str]:
    """Names of the classes and functions of a file."""
    kinds = ast.ClassDef | ast.FunctionDef
    return {node.name for node in ast.parse(text).body if isinstance(node, kinds)}


def name_images(app: Sphinx, document: nodes.document) -> None:
    """Use the caption of a figure as the alternative text of its image, for screen readers."""
    for figure in document.findall(nodes.figure):
        captions = list(figure.findall(nodes.caption))
        for image in figure.findall(nodes.image):
            if captions and not image.get("alt"):
                image["alt"] = captions[0].astext()


def without_comments_for_tools(app: Sphinx, document: nodes.document) -> None:
    """Files that a page includes are shown as cells are, without the comments for ruff and mypy."""
    for block in document.findall(nodes.literal_block):
        if str(block.get("source", "")).endswith(".py"):
            block.rawsource = FOR_TOOLS.sub("", block.astext()).rstrip() + "\n"
            block.children = [nodes.Text(block.rawsource)]


def link_names(app: Sphinx, document: nodes.document) -> None:
    """`vitkit.ViT` in a text leads to that name in the reference."""
    public = {f"vitkit.{name}" for name in vitkit.__all__}
    for literal in list(document.findall(nodes.literal)):
        inside = literal.parent
        if literal.astext() in public and not isinstance(inside, (nodes.title, nodes.reference)):
            link = addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=literal.astext(), refwarn=True
            )
            literal.replace_self(link)
            link += literal


EXECUTE = partial(
    single_nb_execution, startup_timeout=300, iopub_timeout=120, raise_on_iopub_timeout=True
)
"""On a busy machine output comes late; by default it would be left out in silence."""


def create_cache(app: Sphinx) -> None:
    """Create the database of results before several processes want to."""
    path = app.config.nb_execution_cache_path
    if path:
        get_cache(path).list_cache_records()


def setup(app: Sphinx) -> dict[str, object]:
    """All when a page is read; `read` is given to myst-nb by conf.py."""
    myst_nb.core.execute.cache.single_nb_execution = EXECUTE
    app.connect("builder-inited", create_cache)
    app.connect("doctree-read", name_images)
    app.connect("doctree-read", link_names)
    app.connect("doctree-read", without_comments_for_tools)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
