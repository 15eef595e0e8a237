"""Measure the structure and style of the code: `python scripts/measure_code.py [SOURCE]`.

It prints one line per figure: files, lines and tokens, functions, folders, imports and their
closures, docstrings, words, and the density of the lines. A line of code is one without docstring,
comment and blank; tokens are those of `tokenize` in such lines, line ends and indentation apart, so
that neither longer lines nor fewer words of documentation make them fewer. SOURCE is the folder of
the package; the default is `src/vitkit` beside this script. `tests/test_structure.py` holds the
limits.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

WORDS = ("said", "told", "brought", "suited", "rung", "whereabouts", "nobody")
"""Words that docstrings must not have: the field does not use them."""
CLAUSES = ("What", "Who", "Whose", "Whether", "Of")
"""First words of docstrings that are not sentences."""
DENSE: dict[str, tuple[type[ast.AST], ...]] = {
    "comprehensions": (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp),
    "conditional expressions": (ast.IfExp,),
    "walrus": (ast.NamedExpr,),
}
LAYOUT = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip
"""Tokens that are no code."""
CLOSURES = ("training.trainer", "training.step", "data.loading.loader", "weights.checkpoint")
"""Modules whose import closures are counted."""


class Code:
    """The parsed modules of a package, and which of them import which.

    Args:
        root: the folder of the package.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = sorted(root.rglob("*.py"))
        self.texts = {self.name(path): path.read_text(encoding="utf-8") for path in self.files}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}

    def name(self, path: Path) -> str:
        """Return the dotted name of a file; a package has the name of its folder."""
        parts = path.relative_to(self.root.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> the modules of the package that it imports, for types alone included."""
        return {name: set(self._imported(name)) for name in self.trees}

    def _imported(self, module: str) -> Iterator[str]:
        package = self.root.name
        for node in ast.walk(self.trees[module]):
            if not isinstance(node, ast.ImportFrom) or not node.module:
                continue
            if node.module.split(".")[0] != package:
                continue
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                target = inner if inner in self.trees else node.module
                if target not in (package, module):
                    yield target

    def behind(self, module: str) -> set[str]:
        """Return a module and everything that it imports, directly or not."""
        found: set[str] = set()
        todo = [module]
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += self.imports[name]
        return found

    @cached_property
    def longest_chain(self) -> list[str]:
        """The longest chain of imports; a cycle counts once."""
        chains: dict[str, list[str]] = {}

        def chain(name: str, above: tuple[str, ...] = ()) -> list[str]:
            if name not in chains:
                below = [n for n in sorted(self.imports[name]) if n not in above]
                longest = max((chain(n, (*above, name)) for n in below), key=len, default=[])
                chains[name] = [name, *longest]
            return chains[name]

        return max((chain(name) for name in sorted(self.trees)), key=len)

    @cached_property
    def folders(self) -> dict[Path, int]:
        """Folder -> the number of its modules, `__init__` and `__main__` apart."""
        counts: dict[Path, int] = defaultdict(int)
        for path in self.files:
            counts[path.parent] += not path.name.startswith("__")
        return dict(counts)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of all trees."""
        return [node for tree in self.trees.values() for node in ast.walk(tree)]

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions."""
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return [node for node in self.nodes if isinstance(node, kinds)]

    @cached_property
    def docstrings(self) -> list[tuple[str, str]]:
        """All docstrings of modules, classes and functions, with their places."""
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = []
        for name, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                    found.append((f"{name}:{getattr(node, 'lineno', 1)}", text))
        return found

    @cached_property
    def public_docstrings(self) -> list[str]:
        """The docstrings of public classes, functions and methods."""
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        public = (node for node in self.nodes if isinstance(node, kinds) and node.name[0] != "_")
        return [text for node in public if (text := ast.get_docstring(node))]

    @cached_property
    def all_tokens(self) -> dict[str, list[tokenize.TokenInfo]]:
        """Module -> its tokens."""
        return {
            name: list(tokenize.generate_tokens(io.StringIO(text).readline))
            for name, text in self.texts.items()
        }

    @cached_property
    def code_tokens(self) -> dict[str, list[tokenize.TokenInfo]]:
        """Module -> its tokens, without layout, comments and docstrings."""
        found = {}
        for name, tokens in self.all_tokens.items():
            documented: set[int] = set()
            for node in ast.walk(self.trees[name]):
                if isinstance(node, ast.Expr) and isinstance(
                    getattr(node.value, "value", None), str
                ):
                    documented.update(range(node.lineno, (node.end_lineno or 0) + 1))
            found[name] = [
                token
                for token in tokens
                if token.type not in LAYOUT and token.start[0] not in documented
            ]
        return found

    @cached_property
    def tokens(self) -> dict[str, int]:
        """Package below the root -> the number of its tokens of code; `.` for single modules."""
        counts: dict[str, int] = defaultdict(int)
        for name, tokens in self.code_tokens.items():
            parts = name.split(".")
            folder = len(parts) > 2 or (self.root / parts[-1]).is_dir()
            counts[parts[1] if folder and len(parts) > 1 else "."] += len(tokens)
        return dict(counts)

    @cached_property
    def code_lines(self) -> int:
        """The number of lines of code."""
        return sum(
            len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)})
            for tokens in self.code_tokens.values()
        )

    @cached_property
    def raises(self) -> int:
        """The number of `raise` statements, and of calls of functions that always raise."""
        annotated = [node for node in self.functions if isinstance(node.returns, ast.Name)]
        always = {node.name for node in annotated if getattr(node.returns, "id", "") == "NoReturn"}
        calls = [node.func for node in self.nodes if isinstance(node, ast.Call)]
        names = [getattr(call, "attr", getattr(call, "id", "")) for call in calls]
        raised = sum(isinstance(node, ast.Raise) for node in self.nodes)
        return raised + sum(name in always for name in names)

    @cached_property
    def import_lines(self) -> int:
        """The number of lines of import statements."""
        imports = (n for n in self.nodes if isinstance(n, ast.Import | ast.ImportFrom))
        return sum((node.end_lineno or 0) - node.lineno + 1 for node in imports)

    @cached_property
    def public_names(self) -> dict[str, list[str]]:
        """Public class or function at the top level -> the modules that define the name."""
        found: dict[str, list[str]] = defaultdict(list)
        for name, tree in self.trees.items():
            for node in tree.body:
                if not isinstance(node, ast.ClassDef | ast.FunctionDef):
                    continue
                # an overloaded function is defined several times in its module
                if not node.name.startswith("_") and name not in found[node.name]:
                    found[node.name].append(name)
        return dict(found)

    @cached_property
    def comments(self) -> int:
        """The number of comments for readers, without those for tools."""
        count = 0
        for tokens in self.all_tokens.values():
            for token in tokens:
                tool = re.match(r"#\s*(fmt:|type:|noqa|pragma)", token.string)
                count += token.type == tokenize.COMMENT and tool is None
        return count

    def count(self, pattern: str) -> int:
        """Return how often a regular expression occurs in the source."""
        return sum(len(re.findall(pattern, text)) for text in self.texts.values())


def strays(code: Code) -> list[str]:
    """Return where a docstring begins with a clause or has a word of `WORDS`."""
    words = re.compile(rf"\b({'|'.join(WORDS)})s?\b", re.IGNORECASE)
    found = []
    for place, text in code.docstrings:
        if text.split(maxsplit=1)[0] in CLAUSES or words.search(text):
            found.append(f"{place} {text.splitlines()[0]}")
    return found


def _spread(values: list[int]) -> str:
    ranked = sorted(values)
    nine = ranked[len(ranked) * 9 // 10]
    return f"median {statistics.median(ranked):g}, p90 {nine}, max {ranked[-1]}"


def figures(code: Code) -> Iterator[tuple[str, object]]:
    """Yield the name of each figure and its value."""
    lines = {name: len(text.splitlines()) for name, text in code.texts.items()}
    total = sum(lines.values())
    yield "files", len(lines)
    yield "lines", total
    yield "lines of code", code.code_lines
    yield "tokens of code", sum(code.tokens.values())
    yield "imports, % of lines of code", round(code.import_lines / code.code_lines * 100, 1)
    yield "raise statements", code.raises
    yield "tokens of a package", dict(sorted(code.tokens.items(), key=lambda item: -item[1]))
    yield "lines a file", _spread([*lines.values()])
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in code.functions]
    yield "lines a function", _spread(lengths)
    largest = max(code.folders, key=lambda folder: code.folders[folder])
    yield "largest folder", f"{code.folders[largest]} ({largest.relative_to(code.root)})"
    yield "longest import chain", len(code.longest_chain)
    most = max(code.imports, key=lambda name: len(code.imports[name]))
    yield "most own imports", f"{len(code.imports[most])} ({most})"
    for name in CLOSURES:
        yield f"modules behind {name}", len(code.behind(f"{code.root.name}.{name}"))
    twice = sorted(name for name, where in code.public_names.items() if len(where) > 1)
    yield "public names used twice", f"{len(twice)} {twice}"
    yield "docstrings", len(code.docstrings)
    first = [text.split(maxsplit=1)[0] for _, text in code.docstrings]
    yield "docstrings that begin with a clause", sum(word in CLAUSES for word in first)
    prose = " ".join(text for _, text in code.docstrings)
    for word in WORDS:
        yield f'"{word}" in docstrings', len(re.findall(rf"\b{word}s?\b", prose, re.IGNORECASE))
    words = sum(len(text.split()) for text in code.public_docstrings)
    yield "words a public docstring", round(words / len(code.public_docstrings), 1)
    dense = 0
    for name, kinds in DENSE.items():
        count = sum(isinstance(node, kinds) for node in code.nodes)
        dense += count
        yield f"{name} per 1,000 lines", round(count / total * 1000, 1)
    without_imports = code.code_lines - code.import_lines
    yield "all three per 1,000 lines of code", round(dense / without_imports * 1000, 1)
    yield (
        "longest line",
        max(len(line) for text in code.texts.values() for line in text.split("\n")),
    )
    yield "comments per 100 lines", round(code.comments / total * 100, 1)
    yield "fmt: skip", code.count(r"# fmt: skip")


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[1] / "src" / "vitkit"
    measured = Code(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else here)
    for label, value in figures(measured):
        print(f"{label:40} {value}")
    print("chain:", " > ".join(measured.longest_chain))
    print(*strays(measured), sep="\n")
