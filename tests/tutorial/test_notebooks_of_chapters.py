"""The notebooks that readers download: complete, without marks of the site, and they run."""

import io
import re
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "_extensions"))

import notebooks  # noqa: E402

sys.path.pop(0)
CHAPTERS = notebooks.all_chapters()
MARKS = re.compile(r"^:::|^```\{|\{(?:download|term|ref|doc|numref)\}`", flags=re.MULTILINE)


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_no_marks_of_the_site(path):
    made = notebooks.notebook(path)
    nbformat.validate(made)
    assert made.cells[0].source.startswith("# ")
    assert "%pip install" in made.cells[2].source
    for cell in made.cells:
        if cell.cell_type == "markdown":
            assert not MARKS.search(cell.source), cell.source
            for target in re.findall(r"\]\(([^)\s]+)\)", cell.source):
                assert re.match(r"https?:|attachment:|\d\w+\.ipynb$", target), target
    names = [cell.id for cell in made.cells]
    assert len(set(names)) == len(names)
    assert notebooks.notebook(path) == made, "the same in every build"


@pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem)
def test_a_solution_is_folded_and_has_an_empty_cell_before_it(path):
    cells = notebooks.notebook(path).cells
    text = path.read_text(encoding="utf-8")
    solutions = [n for n, cell in enumerate(cells) if cell.source == notebooks.EMPTY]
    assert len(solutions) == text.count('"Show the solution"')
    for number in solutions:
        assert cells[number + 1].metadata["jupyter"]["source_hidden"] is True
    captions = re.findall(r'"caption": "((?:[^"\\]|\\.)*)"', text)
    shown = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert sum(source.startswith("*") and source.endswith("*") for source in shown) >= len(captions)


def test_drawings_are_in_the_notebook():
    cells = notebooks.notebook(notebooks.TUTORIAL / "00_one_page.py").cells
    (drawn,) = [cell for cell in cells if "attachments" in cell]
    assert "![vit](attachment:vit.svg)" in drawn.source
    assert set(drawn.attachments) == {"vit.svg"}


def code_of(archive: Path, folder: Path) -> tuple[Path, str]:
    """Unpack an archive; return its folder and the code of its notebook, without the install."""
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(folder)
    (found,) = folder.rglob("*.ipynb")
    cells = nbformat.read(found, as_version=4).cells
    return found.parent, "\n\n".join(
        cell.source for cell in cells if cell.cell_type == "code" and "%pip" not in cell.source
    )


@pytest.mark.parametrize("name", ["02_attention", "11_bugs"])
def test_an_archive_runs_outside_of_a_checkout(name, tmp_path, monkeypatch):
    archive = tmp_path / f"{name}.zip"
    notebooks.write_archive(archive, [notebooks.TUTORIAL / f"{name}.py"])
    place, code = code_of(archive, tmp_path / "unpacked")
    assert list(place.glob("vitkit-*.whl"))
    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(place)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    before = set(sys.modules)
    try:
        exec(compile(code, f"{name}.ipynb", "exec"), {"__name__": "__main__"})
        helpers = {Path(getattr(sys.modules[n], "__file__", None) or "/").parent
                   for n in set(sys.modules) - before}  # fmt: skip
        assert place in helpers, "the files beside the notebook are used"
    finally:
        for module in set(sys.modules) - before:
            if Path(getattr(sys.modules[module], "__file__", None) or "/").parent == place:
                del sys.modules[module]


def test_the_wheel_has_the_whole_library(tmp_path):
    name, content = notebooks.wheel()
    with zipfile.ZipFile(io.BytesIO(content)) as wheel:
        inside = set(wheel.namelist())
    sources = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/vitkit").rglob("*")
        if path.is_file() and path.suffix in (".py", ".toml", ".html", ".js", ".css", ".typed")
    }
    assert name.endswith("-py3-none-any.whl")
    assert sources <= inside
