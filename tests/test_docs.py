"""The site of docs/ as far as it can be known without building it: pages, links, formulas."""

import io
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from docutils import nodes
from docutils.utils import new_document
from sphinx.application import Sphinx

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
CHAPTERS = sorted((DOCS / "tutorial").glob("[0-9]*.py"))
PAGES = sorted(DOCS.rglob("*.md"))
KINDS = (".md", ".py")
MATHML = "{http://www.w3.org/1998/Math/MathML}"


def loaded(path: Path) -> ModuleType:
    found = spec_from_file_location(path.stem, path)
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


mathml = loaded(DOCS / "_extensions/mathml.py")
chapters = loaded(DOCS / "_extensions/chapters.py")
check_site = loaded(ROOT / "scripts/check_site.py")


def markdown(path: Path) -> str:
    """The text of a page; of a chapter, that of its cells of text."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    cells = chapters.read(text).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def quote_list(page: Path) -> set[Path]:
    """The pages that the toctrees of a page name."""
    found: set[Path] = set()
    for tree in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), flags=re.DOTALL):
        for name in (line.strip() for line in tree.splitlines()):
            if name and not name.startswith(":"):
                found |= {path for path in page.parent.glob(f"{name}.*") if path.suffix in KINDS}
    return found


def test_every_page_is_reached_from_the_first():
    reached, new = set(), {DOCS / "index.md"}
    while new:
        reached |= new
        new = {path for page in new if page.suffix == ".md" for path in quote_list(page)} - reached
    assert reached == {*PAGES, *CHAPTERS}


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *PAGES, *CHAPTERS], ids=lambda path: path.name
)
def test_every_link_to_a_file_leads_to_one(page):
    for address in re.findall(r"\]\(([^)\s]+)\)", markdown(page)):
        if not re.match(r"[a-z]+:|#", address):
            assert (page.parent / address.partition("#")[0]).exists(), address


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda path: path.name)
def test_a_file_that_a_chapter_names_can_be_downloaded(page):
    text = markdown(page)
    named = {name for name in re.findall(r"`(\w+\.py)`", text) if (page.parent / name).is_file()}
    offered = set(re.findall(r"\{download\}`[^`<]*<([^`>]+)>`", text))
    assert named <= offered


def elements(latex: str) -> list[str]:
    made, _ = mathml.to_mathml(latex, display=True)
    assert 'display="block"' in made
    return [
        element.tag.removeprefix(MATHML) for element in mathml.ElementTree.fromstring(made).iter()
    ]


def test_formulas_become_the_right_elements():
    assert elements(r"x_p^1 E + E_\text{pos}").count("msubsup") == 1
    assert {"mfrac", "msqrt"} <= set(elements(r"\frac{QK^\top}{\sqrt{d}}"))
    assert elements(r"\begin{aligned} a &= b \\ c &= d \end{aligned}").count("mtr") == 2
    made, number = mathml.to_mathml(r"z' = \operatorname{MSA}(\operatorname{LN}(z)) + z \tag{2}")
    assert number == "2"
    assert "<mi>MSA</mi>" in made
    assert "(2)" not in made
    assert elements("a;\\\nb").count("mtext") == 1
    assert "negative" not in mathml.to_mathml(r"\sin\!\big(n\big)")[0]


@pytest.mark.parametrize(
    ("latex", "why"),
    [(r"\frac{1}{2", "unmatched brace"), ("}{", "unmatched brace"), (r"\foo x", "unknown command"),
     (r"\operatorname{a", "unmatched"), ("x^2^3", "Double"), ("a & b", "no formula"),
     (r"\left( x", "no formula"), (r"x \tag{1} \tag{2}", "2 numbers")],
)  # fmt: skip
def test_broken_formulas_are_refused(latex, why):
    with pytest.raises(mathml.FormulaError, match=why):
        mathml.to_mathml(latex)


def built(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, Path]:
    """A site of one page: its HTML, the warnings, and where it is."""
    monkeypatch.syspath_prepend(DOCS / "_extensions")
    (folder / "index.md").write_text(text, encoding="utf-8")
    out, warnings = folder / "out", io.StringIO()
    app = Sphinx(
        folder, None, out, folder / "trees", "html", status=None, warning=warnings,
        confoverrides={
            "extensions": ["myst_parser", "mathml"], "myst_enable_extensions": ["dollarmath"],
            "html_math_renderer": "mathml", "html_theme": "basic", "html_copy_source": False,
        },
    )  # fmt: skip
    app.build()
    return (out / "index.html").read_text(encoding="utf-8"), warnings.getvalue(), out


def test_a_page_has_its_formulas_and_loads_them_from_no_server(tmp_path, monkeypatch):
    page, warnings, out = built(
        tmp_path, "# A\n\nLet $x_1$.\n\n$$ y = x \\tag{4} $$\n", monkeypatch
    )
    assert warnings == ""
    assert page.count("<math") == 2
    assert '<div class="formula" id="equation-4">' in page
    assert '<span class="formula-number">(4)</span>' in page
    assert "mathjax@" not in page
    assert list(check_site.problems(out)) == []


def test_a_broken_formula_is_reported_with_page_and_line(tmp_path, monkeypatch):
    _, warnings, _ = built(tmp_path, "# A\n\nRight: $x$.\n\n$$ \\foo y $$\n", monkeypatch)
    assert re.search(r"index\.md:5: WARNING: unknown command \\foo", warnings)


def test_a_chapter_knows_its_lines_and_shows_no_comments_for_ruff():
    notebook = chapters.read("# %% [markdown]\n# # A\n\n# %%\nx = 1  # fmt: skip\ny = 2  # why\n")
    assert notebook.metadata["source_map"] == [1, 4]
    assert notebook.cells[1].source == "x = 1\ny = 2  # why"


def test_a_file_that_a_page_includes_is_shown_without_comments_for_tools():
    text = "def f():\n    # fmt: off\n    x = 1  # noqa: E1\n    # fmt: on\n    return x  # why\n"
    document = new_document("page")
    document += nodes.literal_block(text, text, source="/a/plain.py")
    document += nodes.literal_block(text, text)
    chapters.without_comments_for_tools(None, document)
    included, written = document.children
    assert included.astext() == "def f():\n    x = 1\n    return x  # why\n"
    assert included.rawsource == included.astext(), "or it is not coloured"
    assert written.astext() == text


IMPORTS = '# %%\nimport os\n\n# %% tags=["written-out"]\nfrom made import Twice\n'


def test_a_written_out_cell_shows_and_runs_the_file_that_it_imports_from(tmp_path):
    text = "class Twice:\n    two = 2  # fmt: skip\n"
    (tmp_path / "made.py").write_text(text, encoding="utf-8")
    plain, whole = chapters.read(IMPORTS, tmp_path).cells
    assert plain.source == "import os"
    assert whole.source == "class Twice:\n    two = 2"
    assert whole.metadata["tags"] == ["written-out"]


@pytest.mark.parametrize(
    "cell", ["import made", "from made import Twice\nx = 1", "from absent import Twice",
             "from made import Twice as Two", "from made import Thrice"],
)  # fmt: skip
def test_a_written_out_cell_that_does_anything_else_is_refused(tmp_path, cell):
    (tmp_path / "made.py").write_text("class Twice:\n    pass\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"written-out|does not define"):
        chapters.read(IMPORTS.replace("from made import Twice", cell), tmp_path)


def test_a_chapter_that_writes_out_the_plain_model_runs_without_its_file():
    (cell,) = chapters.read('# %% tags=["written-out"]\nfrom plain_vit import PlainViT\n').cells
    assert "class PlainViT(nn.Module):" in cell.source
    names: dict[str, object] = {"__name__": "__main__"}
    exec(cell.source, names)
    assert "PlainViT" in names


SITE = {
    "index.html": """<a href="other.html#there">1</a><a href="none.html">2</a>
        <a href="other.html#gone">3</a><a href="https://example.org/x">4</a>
        <article><figure><img src="a.png"><figcaption>A.</figcaption></figure>
        <img src="b.png"></article>""",
    "other.html": """<h1 id="there"></h1><script src="https://cdn.example.org/x.js"></script>
        <link rel="stylesheet" href="style.css"><style>@import "//fonts.example.org/f";</style>""",
    "style.css": "a { background: url(https://example.org/b.png) } b { background: url(a.png) }",
    "a.png": "",
    "b.png": "",
}


def test_what_is_wrong_with_a_site_is_found(tmp_path):
    for name, text in SITE.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert sorted(check_site.problems(tmp_path)) == [
        "index.html: dead anchor: other.html#gone",
        "index.html: dead link: none.html",
        "index.html: image without a caption: b.png",
        "other.html: fetched from another host: //fonts.example.org/f",
        "other.html: fetched from another host: https://cdn.example.org/x.js",
        "style.css: fetched from another host: https://example.org/b.png",
    ]


def test_the_check_ends_with_1_where_something_is_wrong(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["check_site.py", str(tmp_path)])
    assert check_site.main() == 1
    (tmp_path / "index.html").write_text("<p>", encoding="utf-8")
    assert check_site.main() == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("1 pages, nothing wrong")
