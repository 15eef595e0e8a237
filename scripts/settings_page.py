"""Write docs/settings.md from the settings classes: `python scripts/settings_page.py`."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from vitkit.training.config.foreign_names import PROGRAMS
from vitkit.training.config.train_config import SECTIONS

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
INTRODUCTION = """# Settings of `vitkit train`

Every setting has one name. With dashes it is a flag (`--batch-size 64`), with underscores a key of
a YAML file for `--recipe` (`batch_size: 64`) and a keyword in Python
(`vitkit.train("photos", batch_size=64)`). Values come from the defaults, then from the recipe, then
from flags or keywords; later ones win. Any field of `ViTSpec` is a setting as well:
`--spec.patch-size 4`, or `spec={"patch_size": 4}`.

`scripts/settings_page.py` writes this page from `src/vitkit/training/config/sections/`.
"""
INTERNAL = ("start",)
"""Settings that vitkit writes for itself."""
NAMES = """
## Names in other programs

vitkit refuses a name that it does not know. It answers the names of other programs with its own, or
with what to do instead; case, dashes and underscores do not matter.

| program | name there | in vitkit |
| --- | --- | --- |
"""


def page() -> str:
    """Return the whole page."""
    rows = ""
    for program, words in PROGRAMS.items():
        for word, meaning in words.items():
            ours = ", ".join(f"`{name}`" for name in meaning.split())
            rows += f"| {program} | `{word}` | {meaning if meaning.endswith('.') else ours} |\n"
    return INTRODUCTION + "".join(map(section, SECTIONS)) + NAMES + rows


def section(settings: type[Any]) -> str:
    """Return one section: heading, its purpose, a row for each of its settings."""
    title = settings.__name__.removesuffix("Settings")
    head = "\n| setting | values | default | meaning |\n| --- | --- | --- | --- |\n"
    hints, meanings = get_type_hints(settings), descriptions(settings)
    own = [field for field in fields(settings) if field.name not in INTERNAL]
    rows = "".join(row(field, hints[field.name], meanings[field.name]) for field in own)
    return f"\n## {title}\n\n{inspect.getdoc(settings)}\n{head}{rows}"


def row(field: Field[Any], kind: Any, meaning: str) -> str:
    """Return the row of one setting."""
    cells = (f"`{field.name}`", ", ".join(values(kind)), default(field), meaning)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def values(kind: Any) -> Iterator[str]:
    """Yield the values that a setting may have, in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        yield from (f"`{choice}`" for choice in parts)
    elif origin is tuple:
        yield f"several: {' or '.join(values(parts[0]))}"
    elif origin in (dict, Mapping):
        yield "fields and values"
    elif parts:
        # a tuple of one length or of another is one kind of value
        yield from dict.fromkeys(value for part in parts for value in values(part))
    elif kind is not type(None):
        yield {str: "text", int: "integer", float: "number", bool: "on, off"}[kind]


def default(field: Field[Any]) -> str:
    """Return the default of a setting; an empty cell where the description gives it."""
    value = field.default
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`" if isinstance(value, str | int | float) else ""


def descriptions(settings: type[Any]) -> dict[str, str]:
    """Return the text below each field of a settings class, in one line."""
    (tree,) = ast.parse(inspect.getsource(settings)).body
    assert isinstance(tree, ast.ClassDef)
    found = {}
    for statement, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(after, ast.Expr)
            assert isinstance(after.value, ast.Constant)
            found[statement.target.id] = " ".join(str(after.value.value).split())
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
