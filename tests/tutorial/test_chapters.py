"""The tutorial: every chapter runs from top to bottom, says its numbers, and has its exercises.

A chapter is run once, in this process and from its own folder, for all the tests of its output.
"""

import ast
import contextlib
import io
import json
import logging
import re
import runpy
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import matplotlib
import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))

import notebooks  # noqa: E402

sys.path.pop(0)
pytestmark = [pytest.mark.timeout(600), pytest.mark.allow_hosts(["127.0.0.1"])]
TUTORIAL = ROOT / "docs" / "tutorial"
CHAPTERS = sorted(TUTORIAL.glob("[0-9]*.py"))
TEACHING = [path for path in CHAPTERS if "bugs" not in path.stem]
"""The chapters proper; the lists of bugs have no exercises."""
DRAWS = {"subplots", "grid_of", "heat"}
"""Functions that make an image."""
SOLUTION = "Show the solution"
NUMBERS = {
    "00": ["1438 images", "359 images", "(1438, 1, 8, 8)", "102,666 parameters, 480 steps",
           "B, D, H/P, W/P (1, 64, 4, 4)", "z_0: B, T, D (1, 17, 64)", "B, T, 3D (1, 17, 192)",
           "B, h, T, T (1, 8, 17, 17)", "B, classes (1, 10)", "All keys matched",
           "(8, 8) pixels, classes 0 1 2 3 4 5 6 7 8 9"],
    "01": [
        "196 patches of 768 values", "(1, 3, 224, 224) -> (1, 196, 768)", "(5, 49, 16)", "590,592",
        "115.76 M", "input 0.60 MB", "activations forward and backward 1.20 MB",
        "parameters 2.36 MB", "together 4.17 MB", "(4, 3, 32, 32) -> (4, 64, 48)",
        "patches 225, positions 244", "table (197, 768)", "Xavier 0.003",
    ],
    "02": [
        "weights row 0: 0.3726 0.2091 0.2091 0.2091", "weights row 1: 0.3202 0.1798 0.3202 0.1798",
        "output row 0: 16.9410 21.4410 25.9410", "output row 1: 18.3538 22.8538 27.3538",
        "output row 3: 20.2500 24.7500 29.2500", "output row 4: 20.2500 24.7500 29.2500",
        "z U_qkv (197, 2304)", "split (197, 3, 12, 64)", "A (12, 197, 197)", "MSA(z) (197, 768)",
        "2,362,368", "all three at once 0.022, each by itself 0.031", "510 of 512",
    ],
    "03": ["7,087,872", "1,454 M", "12 blocks differ by", "(16, 128, 512) -> (16, 128, 512)",
           "18,915,328"],
    "04": ["86.6 M", "306.5 M", "304.3 M", "632.0 M", "86,567,656", "86,540,008", "304,330,216",
           "8,470,026", "54,630,376", "(1, 3, 256, 256) -> (1, 1000)", "17,564 M", "346.27 MB",
           "173.23 M", "232 MB", "class token (32, 1024)", "patches (32, 196, 1024)",
           "logits (32, 1000)", "lowest possible loss: 1.461", "784 positions for 196 patches",
           "160 px, notebook D: kernel 0", "15359 instead of 15360"],
    "05": ["168 training losses by hand and by Ignite are equal: True",
           "TensorBoard: lr/group_0 training/loss validation/loss validation/accuracy",
           "320 losses by hand and by vitkit", "64 parts of 4 images", "4,990", "(64, 49, 16)",
           "(64, 50, 20)"],
    "06": [],
    "07": [],
    "08": [],
    "09": ["42,047,464"],
    "10": [
        "(64, 32, 512), (64, 16, 512) -> (64, 16, 512)", "44,140,544", "44,401,152", "44,327,316",
    ],
    "13": ["810,890 parameters, 3.26 MB", "test accuracy 77.1%, 95 % interval 76.3% to 77.9%",
           "cat cat 72.3%", "1,000 names: tabby, tiger cat, Persian cat"],
    "14": ["the same bits: True", "364.58 x 16 / 3750 = 1.5555", "60.45 x 16 / 625 = 1.5475",
           "ln(e + 9) - 1 = 1.4612"],
}  # fmt: skip
"""Chapter -> what it prints of the figures that the notebooks and pages give."""


@dataclass(frozen=True)
class Cell:
    """One cell of a chapter in the percent format.

    Attributes:
        markdown: whether it is text.
        metadata: what its first line says of it, by key.
        source: its lines, without the first.
    """

    markdown: bool
    metadata: dict[str, Any]
    source: str

    @property
    def caption(self) -> str:
        return self.metadata.get("mystnb", {}).get("figure", {}).get("caption", "")

    @property
    def is_removed(self) -> bool:
        """Whether the page leaves it out; it cleans up."""
        return "remove-cell" in self.metadata.get("tags", [])

    @property
    def is_solution(self) -> bool:
        shown = self.metadata.get("mystnb", {}).get("code_prompt_show")
        return shown == SOLUTION and "hide-cell" in self.metadata.get("tags", [])


def metadata_of(line: str) -> dict[str, Any]:
    """`tags=["a"] mystnb={"b": 1}` as a dictionary."""
    found = {}
    for start in re.finditer(r"(?:^|\s)(\w+)=(?=[\[{])", line):
        if not any(start.start() < end for _, end in found.values()):
            value, length = json.JSONDecoder().raw_decode(line[start.end() :])
            found[start[1]] = (value, start.end() + length)
    return {key: value for key, (value, _) in found.items()}


def cells_of(path: Path) -> list[Cell]:
    _, *parts = re.split(r"^# %%(.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [
        Cell("[markdown]" in first, metadata_of(first), source)
        for first, source in zip(parts[::2], parts[1::2], strict=True)
    ]


def calls(node: ast.AST) -> set[str]:
    """Names of what is called in it, without what only a function in it would call."""
    found = set()
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            found |= calls(child)
    if isinstance(node, ast.Call):
        called = node.func
        found.add(called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", ""))
    return found


def cells_that_draw(path: Path) -> list[Cell]:
    """Those that call one of `DRAWS`, or a function of the chapter that does."""
    drawing, cells = set(DRAWS), []
    for cell in cells_of(path):
        if cell.markdown:
            continue
        tree = ast.parse(cell.source)
        if calls(tree) & drawing:
            cells.append(cell)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        drawing |= {f.name for f in functions if calls(ast.Module(f.body, [])) & drawing}
    return cells


@contextlib.contextmanager
def as_it_was() -> Iterator[None]:
    """Puts back what a chapter may set for the whole process, and closes its images."""
    threads, modules = torch.get_num_threads(), set(sys.modules)
    log = logging.getLogger("vitkit")
    level = log.level
    with (
        torch.random.fork_rng(devices=[]),
        torch._tensor_str.printoptions(),
        np.printoptions(),
        warnings.catch_warnings(),
        matplotlib.rc_context(),
        pytest.MonkeyPatch.context() as patch,
    ):
        # torch's tensors hand their values to matplotlib by the protocol of an older NumPy.
        warnings.filterwarnings("ignore", "__array_", DeprecationWarning)
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        patch.syspath_prepend(TUTORIAL)
        patch.chdir(TUTORIAL)
        plt.switch_backend("Agg")
        try:
            yield
        finally:
            plt.close("all")
            torch.set_num_threads(threads)
            log.setLevel(level)
            for name in set(sys.modules) - modules:
                if is_of_the_tutorial(sys.modules[name]):
                    del sys.modules[name]


def is_of_the_tutorial(module: types.ModuleType) -> bool:
    return Path(getattr(module, "__file__", None) or "/").parent == TUTORIAL


INCLUDED = re.compile(r"^# ```\{literalinclude\} (\S+)\n((?:# :.*\n)*)", re.MULTILINE)
COLUMNS = 88
"""Characters of a line of code, or of a printed line, that a page shows without scrolling."""


def run(path: Path) -> str:
    """What a chapter prints."""
    with as_it_was(), contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def in_one_line(text: str) -> str:
    """The text with every run of white space as one blank."""
    return " ".join(text.split())


LONG = {"00", "01", "03", "04", "05", "06", "07", "07b", "08", "09", "10", "13", "14"}
"""Chapters that train for long: `make docs`, as for every change, and `make soak` run them."""
RUN = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.soak] * (path.stem.split("_")[0] in LONG))
    for path in CHAPTERS
]


@pytest.fixture(scope="module", params=RUN)
def printed(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A chapter's name and what it prints; an assertion in a solution of it fails here."""
    return request.param.stem, run(request.param)


def test_a_chapter_runs_and_prints_the_notebooks_numbers(printed):
    name, text = printed[0], in_one_line(printed[1])
    assert text
    assert [number for number in NUMBERS.get(name[:2], []) if number not in text] == []


def test_no_printed_line_is_wider_than_the_page(printed):
    assert [line for line in printed[1].splitlines() if len(line) > COLUMNS] == []


REPEATED = {"03": {"2,362,368"}}
"""Chapter -> numbers of others that it prints again: the layer table of a block has attention's."""


def test_a_long_number_belongs_to_one_chapter(printed):
    """The lists of bugs, which are in no table, may come back to what the chapters say."""
    name, text = printed[0], in_one_line(printed[1])
    mine = NUMBERS.get(name[:2])
    listed = {number for numbers in NUMBERS.values() if numbers is not mine for number in numbers}
    long = {number for number in listed if re.fullmatch(r"\d+(,\d{3}){2,}", number)}
    repeated = {number for number in long if number in text}
    assert mine is None or repeated == REPEATED.get(name[:2], set())


@pytest.mark.parametrize("path", TEACHING, ids=lambda path: path.stem)
def test_a_chapter_ends_with_exercises_whose_solutions_are_tests(path):
    cells = cells_of(path)
    start = next(n for n, cell in enumerate(cells) if "# ## Exercises" in cell.source)
    exercises = [cell for cell in cells[start:] if not cell.markdown and not cell.is_removed]
    assert len(exercises) >= 2
    assert all(cell.is_solution for cell in exercises), "nothing but solutions comes after"
    for cell in exercises:
        assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(cell.source)))


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_an_image_says_what_to_see_in_it(path):
    for cell in cells_that_draw(path):
        assert len(cell.caption) >= 40, cell.source


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_cells_fit_the_page(path):
    """MyST takes a line that begins with % for a comment; a generator is shown with an address."""
    assert "plt.show" not in path.read_text(encoding="utf-8"), "it opens a window"
    for cell in cells_of(path):
        if cell.markdown:
            assert not re.search(r"^# *%(?!%)", cell.source, flags=re.MULTILINE)
            continue
        lines = cell.source.rstrip().splitlines()
        shown = [line.partition("  # fmt: skip")[0] for line in lines]
        assert [line for line in shown if len(line) > COLUMNS] == []
        assert not any(line.startswith("torch.manual_seed(") for line in lines[-1:])


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_no_line_of_an_included_file_is_wider_than_the_page(path):
    for found in INCLUDED.finditer(path.read_text(encoding="utf-8")):
        options = dict(re.findall(r":([\w-]+): ?(.*)", found[2]))
        lines = notebooks.included(found[1], options).splitlines()
        shown = [re.sub(r"  # (fmt|type|noqa).*", "", line) for line in lines]
        widest = COLUMNS + int(options.get("dedent", 0))
        assert [line for line in shown if len(line) > widest] == []


def test_the_checks_see_what_they_are_for(tmp_path):
    chapter = tmp_path / "13_made.py"
    chapter.write_text(
        "# ---\n# ---\n# %% [markdown]\n# text\n# %%\ndef drawn():\n    heat([[1]])\n"
        '# %% mystnb={"figure": {"caption": "a=[1] in a caption"}}\ndrawn()\n'
        '# %% tags=["hide-cell"] mystnb={"code_prompt_show": "Show the solution"}\nassert True\n'
    )
    text, function, image, solution = cells_of(chapter)
    assert text.markdown
    assert not function.metadata
    assert cells_that_draw(chapter) == [image]
    assert image.caption == "a=[1] in a caption"
    assert solution.is_solution
    assert not image.is_solution
