"""Docstrings are plain text: what reStructuredText would take for markup is kept as it stands."""

from __future__ import annotations

import re

from sphinx.application import Sphinx

CODE = re.compile(r"(`[^`]*`)")
SIGNS = re.compile(r"[|*_](?=\w)|(?<=\w)[|*_](?!\w)|\\")
SECTION = re.compile(r"[A-Z]\w+:")
NAME = re.compile(r" +[*\w, ]+:(?= |$)")


def plain(lines: list[str]) -> list[str]:
    """The lines, with signs outside of `code` and examples escaped and drawings kept as drawn."""
    kept: list[str] = []
    drawn = example = section = False
    for line in lines:
        section = section or bool(SECTION.fullmatch(line))
        if line.startswith("    ") and not section and not drawn and kept and not kept[-1]:
            drawn = True
            kept += ["::", ""]
        elif line and not line.startswith("    "):
            drawn = False
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        kept.append(line if drawn or example else escaped(line))
    return kept


def escaped(line: str) -> str:
    """Every sign escaped that is not in `code`; a name before a colon is for napoleon to read."""
    name = NAME.match(line)
    start = name.end() if name else 0
    parts = CODE.split(line[start:])
    rest = "".join(p if n % 2 else SIGNS.sub(r"\\\g<0>", p) for n, p in enumerate(parts))
    return line[:start] + rest


def process(
    app: Sphinx, what: str, name: str, given: object, options: object, lines: list[str]
) -> None:
    """Before napoleon reads the sections."""
    lines[:] = plain(lines)


def process_types(
    app: Sphinx, what: str, name: str, given: object, options: object, lines: list[str]
) -> None:
    """After napoleon, which writes the types of attributes: the star of an axis is no emphasis."""
    lines[:] = [
        line.replace("*", r"\*") if line.lstrip().startswith(":type:") else line for line in lines
    ]


def setup(app: Sphinx) -> dict[str, object]:
    """Before and after napoleon, whose priority is the usual 500."""
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-process-docstring", process_types, priority=600)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
