"""Write docs/settings.md from the settings classes: `python scripts/settings_page.py`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from train_settings import INTERNAL, docs

from vitkit.training.config.merging import programs
from vitkit.training.config.train_config import SECTIONS

PAGE = Path(__file__).parents[1] / "docs" / "settings.md"
INTRODUCTION = """# Settings of `vitkit train`

Every setting has one name. With dashes it is a flag (`--batch-size 64`), with underscores a key of
a YAML file for `--recipe` (`batch_size: 64`) and a keyword in Python
(`vitkit.train("photos", batch_size=64)`). Values come from the defaults, then from the recipe, then
from flags or keywords; later ones win. Any field of `ViTSpec` is a setting as well:
`--spec.patch-size 4`, or `spec={"patch_size": 4}`.

`scripts/settings_page.py` writes this page from `src/vitkit/training/config/`.
"""
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
    for program, words in programs().items():
        for word, meaning in words.items():
            ours = meaning
            # a sentence says what to do instead; anything else is names of settings
            if not meaning.endswith("."):
                ours = ", ".join(f"`{name}`" for name in meaning.split())
            rows += f"| {program} | `{word}` | {ours} |\n"
    return INTRODUCTION + "".join(map(section, SECTIONS)) + NAMES + rows


def section(settings: type[Any]) -> str:
    """Return one section: heading, its purpose, a row for each of its settings."""
    # FineTuningSettings -> Fine-tuning
    words = re.findall("[A-Z][a-z]+", settings.__name__.removesuffix("Settings"))
    title = "-".join(words).capitalize()
    head = "\n| setting | values | default | meaning |\n| --- | --- | --- | --- |\n"
    hints, texts = get_type_hints(settings), docs(settings)
    own = [field for field in fields(settings) if field.name not in INTERNAL]
    rows = "".join(row(field, hints[field.name], texts[field.name]) for field in own)
    return f"\n## {title}\n\n{inspect.getdoc(settings)}\n{head}{rows}"


def row(field: Field[Any], kind: Any, text: str) -> str:
    """Return the row of one setting; a line break in its description would end the row."""
    meaning = " ".join(text.split())
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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
