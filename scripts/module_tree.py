"""Write the tree of modules into docs/architecture.md: `python scripts/module_tree.py`.

Each line is the first line of a module's docstring. `--check` writes nothing, and exits with 1 if
the page is not up to date.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tree: scripts/module_tree.py -->\n", "<!-- end of tree -->\n"
ORDER = (
    "cli", "api.py", "prediction", "training", "explaining", "evaluation", "weights", "models",
    "data", "io",
)  # fmt: skip
"""From the highest layer down; other modules come last, by name."""


def purpose(path: Path) -> str:
    """Return the first line of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.splitlines()[0] if text else ""


def tree(folder: Path, depth: int = 0) -> Iterator[str]:
    """Yield a line for each module and package of a folder."""
    entries = [
        path
        for path in folder.iterdir()
        if (path / "__init__.py").exists() or (path.suffix == ".py" and path.name[:2] != "__")
    ]

    def rank(path: Path) -> tuple[int, bool, str]:
        place = ORDER.index(path.name) if depth == 0 and path.name in ORDER else len(ORDER)
        return place, path.is_dir(), path.name

    for path in sorted(entries, key=rank):
        name = "  " * depth + path.name + ("/" if path.is_dir() else "")
        about = purpose(path / "__init__.py" if path.is_dir() else path)
        yield f"{name:<34} {about}".rstrip()
        if path.is_dir():
            yield from tree(path, depth + 1)


def page() -> str:
    """Return the page with the current tree."""
    lines = "\n".join(tree(ROOT / "src" / "vitkit"))
    text = PAGE.read_text(encoding="utf-8")
    block = f"{BEGIN}```\n{lines}\n```\n{END}"
    return re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: block, text, flags=re.DOTALL)


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(page() != PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page(), encoding="utf-8")
