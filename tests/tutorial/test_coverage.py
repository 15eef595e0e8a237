"""docs/tutorial/coverage.md: each step of the five notebooks has its place in the tutorial."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIAL = ROOT / "docs" / "tutorial"
STEPS = {"A": 42, "B": 45, "C": 22, "D": 21, "E": 50, "X": 12}
"""Notebook -> its steps; X are the wishes beyond the notebooks."""
NOT_KEPT = "not kept: "
ROW = re.compile(
    r"^\| (?P<step>[A-EX]\d+) \| (?P<what>.+?) \| (?P<place>.+) \| (?P<mark>.+) \|$", re.MULTILINE
)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def heading_anchors(page: Path) -> set[str]:
    """The anchors that the site gives to the headings of a page."""
    before, text = "# " if page.suffix == ".py" else "", page.read_text(encoding="utf-8")
    anchors = set()
    for heading in re.findall(rf"^{before}#{{1,3}} (.+)$", text, flags=re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", re.sub(r"\$[^$]*\$", "", heading).lower())
        anchors.add(words.replace(" ", "-"))
    return anchors


def problems(of: Path) -> list[str]:
    """What is wrong with the links of a page."""
    found = []
    for address in LINK.findall(of.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", address):
            continue
        name, _, anchor = address.partition("#")
        page = of.parent / name if name else of
        if not page.exists():
            found.append(f"no page: {address}")
        elif anchor and anchor not in heading_anchors(page):
            found.append(f"no heading: {address}")
    return found


@pytest.fixture(scope="module")
def page() -> str:
    return (TUTORIAL / "coverage.md").read_text(encoding="utf-8")


def test_every_step_is_there_once(page):
    steps = [row["step"] for row in ROW.finditer(page)]
    assert steps == [f"{letter}{n + 1}" for letter, many in STEPS.items() for n in range(many)]


def test_every_step_leads_to_a_place_and_is_no_worse(page):
    for row in ROW.finditer(page):
        assert LINK.search(row["place"]), row["step"]
        assert row["mark"] in {"better", "as good"} or row["mark"].startswith(NOT_KEPT), row["step"]


def test_few_steps_are_not_kept_and_the_page_counts_right(page):
    marks = [row["mark"] for row in ROW.finditer(page)]
    counts = [marks.count("better"), marks.count("as good")]
    left = len(marks) - sum(counts)
    assert left <= 5
    assert f"{len(marks)} steps: {counts[0]} better, {counts[1]} as good, {left} not kept" in page


@pytest.mark.parametrize("name", ["coverage.md", "glossary.md", "references.md", "index.md"])
def test_links_lead_to_headings(name):
    assert problems(TUTORIAL / name) == []


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "01_a.py").write_text("# %% [markdown]\n# # 1. A\n#\n# ## One matrix: $x$\n")
    right, wrong = "[a](01_a.py#one-matrix-)", "[a](01_a.py#gone) [b](02_b.py)"
    page = tmp_path / "page.md"
    page.write_text(right)
    assert problems(page) == []
    page.write_text(wrong)
    assert problems(page) == ["no heading: 01_a.py#gone", "no page: 02_b.py"]


def test_the_anchors_are_those_of_the_site():
    """Of headings with mathematics, code and marks, as MyST makes them."""
    found = heading_anchors(TUTORIAL / "01_patches.py")
    assert {"one-matrix-for-all-patches-", "why-reshape-does-not-cut-patches"} <= found


def test_a_glossary_has_its_words_in_order():
    text = (TUTORIAL / "glossary.md").read_text(encoding="utf-8")
    (entries,) = re.findall(r"^:::\{glossary\}\n(.*?)^:::$", text, flags=re.MULTILINE | re.DOTALL)
    words = re.findall(r"^(\S.*)$", entries, flags=re.MULTILINE)
    assert len(words) >= 60
    assert words == sorted(words, key=str.lower)
