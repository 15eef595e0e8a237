"""Pages of the site for a keyboard, a screen reader and weak eyes; tables that filter and sort."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import wait_until
from reporting.browser import NEEDS_BROWSER, Browser
from reporting.page_checks import RATIOS
from tutorial.digit_pages import DOCS

pytestmark = NEEDS_BROWSER
COPIED = ("models", "weights", "formats", "guides/names")
CODE = """# Code

A long signature, code in two languages, a drawing and an animation.

```{eval-rst}
.. autofunction:: vitkit.create_model
```

## In Python

```python
@decorated(1.5)  # a comment
class Model(nn.Module):
    '''Docstring.'''
    def forward(self, x: int = 3) -> str: return f"{x:>9} of {'a long line':<60}" + str(None is x)
```

```console
$ vitkit train digits --epochs 3   # a comment
```

```yaml
model:  # a comment
  depth: 12
```

| part | cost |
|---|---|
| a | +6.6 (+0.4 to +9.7) |
| b | 1,234 |
| c | none |
| d | +59.9 |
| e | \N{MINUS SIGN}3.5 |
| f | -2.2 (-3.0 to +1.0) |

```{drawing} patches
A drawing.
```

```{drawing} patches-to-tokens
An animation.
```
"""
FAULTS = """
const found = [];
const say = (what, element) => found.push(`${what}: ${element.outerHTML.slice(0, 90)}`);
let before = 0;
for (const heading of document.querySelectorAll("article :is(h1, h2, h3, h4, h5, h6)")) {
  const level = Number(heading.tagName[1]);
  if (level > before + 1) say("a level is left out", heading);
  before = level;
}
for (const one of document.querySelectorAll("[role=heading]:not([aria-level])"))
  say("no level", one);
for (const one of document.querySelectorAll("article dl"))
  if (one.firstElementChild?.tagName !== "DT") say("no term", one);
for (const one of document.querySelectorAll("article img"))
  if (!one.alt) say("no text", one);
for (const one of document.querySelectorAll("article svg:not(a svg, button svg)")) {
  const names = (one.getAttribute("aria-labelledby") ?? "").split(" ");
  const text = names.map((name) => document.getElementById(name)?.textContent ?? "").join("");
  if (!one.ariaLabel && !text) say("no text", one);
  if (one.getAttribute("role") === "img" && one.querySelector("a")) say("hidden links", one);
}
for (const one of document.querySelectorAll("article :is(a[href], button)"))
  if (!one.ariaLabel && !one.textContent.trim() && !one.title) say("no name", one);
for (const one of document.querySelectorAll("article *")) {
  const scrolls = /auto|scroll/.test(getComputedStyle(one).overflowX);
  if (scrolls && one.scrollWidth > one.clientWidth && one.tabIndex !== 0) say("no focus", one);
}
return found;
"""
ROWS = """
return [...document.querySelectorAll("article tbody tr")].filter((row) => !row.hidden)
  .map((row) => row.textContent.replace(/\\s+/g, " ").trim());
"""
FILTER = """
const box = document.querySelector(".filter-rows input");
box.value = WORDS;
box.dispatchEvent(new Event("input"));
return document.querySelector(".filter-rows output").textContent;
"""
SORT = """
const table = document.querySelector("article table");
const headings = [...table.tHead.rows[0].cells];
const column = headings.findIndex((cell) => cell.textContent.trim().startsWith(NAME));
headings[column].querySelector("button").click();
const cells = [...table.tBodies[0].rows].map((row) => row.cells[column].textContent.trim());
return [headings[column].getAttribute("aria-sort"), cells];
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    source, out = folder / "docs", folder / "out"
    for name in ("_static", "_extensions", "tutorial/checkpoints"):
        shutil.copytree(DOCS / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in COPIED:
        page = source / f"{name}.md"
        page.parent.mkdir(exist_ok=True)
        shutil.copy(DOCS / f"{name}.md", page)
    (source / "code.md").write_text(CODE, encoding="utf-8")
    names = "\n".join((*COPIED, "code"))
    (source / "index.md").write_text(
        f"# Site\n\n```{{toctree}}\n:caption: Pages\n\n{names}\n```\n", encoding="utf-8"
    )
    # the site's own configuration: its theme and its colours of code; no chapter is copied
    configuration = (DOCS / "conf.py").read_text(encoding="utf-8")
    (source / "conf.py").write_text(
        configuration + '\nextensions.remove("notebooks")\nnb_execution_mode = "off"\n'
        'suppress_warnings = ["ref"]  # pages that are not copied are linked\n',
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", str(source), str(out)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return out


@pytest.mark.parametrize("page", [*COPIED, "code", "index"])
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_can_be_read_aloud_and_reached_by_keyboard(browser: Browser, site, page, width):
    for scheme in ("light", "dark"):
        browser.show(width, scheme)
        browser.open(site / f"{page}.html")
        assert browser.run(FAULTS) == []
        lowest, texts = browser.run(RATIOS)
        assert texts > 10
        assert lowest >= 4.5


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_code_is_legible_in_the_theme_that_a_reader_has_chosen(browser: Browser, site, theme):
    browser.show(1280, "dark" if theme == "light" else "light")  # the system has the other one
    browser.open(site / "code.html")
    browser.run(f"document.body.dataset.theme = '{theme}'")
    lowest, texts = browser.run(RATIOS.replace('"body *"', '"article pre, article pre *"'))
    assert texts > 30
    assert lowest >= 4.5
    red = "return Number(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    assert (browser.run(red) > 127) == (theme == "light")


def test_long_code_scrolls_and_is_the_next_stop_of_the_keyboard(browser: Browser, site):
    browser.show(390)
    browser.open(site / "code.html")
    scrolled = browser.run(
        "window.wide = [...document.querySelectorAll('article pre')]"
        ".find((one) => one.scrollWidth > one.clientWidth);"
        "const before = document.createElement('button');"
        "wide.before(before); before.focus(); return wide.scrollLeft;"
    )
    browser.press("tab")
    assert browser.run("return document.activeElement === wide")
    browser.press("right")
    wait_until(lambda: browser.run("return wide.scrollLeft") > scrolled)


def test_the_parameters_of_a_long_signature_stand_in_lines(browser: Browser, site):
    browser.show(1280)
    browser.open(site / "code.html")
    tops = browser.run(
        "return [...document.querySelectorAll('.sig-line')].map(e => e.getBoundingClientRect().top)"
    )
    assert len(tops) > 4
    assert tops == sorted(set(tops))


@pytest.mark.parametrize("page", ["models", "weights"])
def test_rows_can_be_filtered_and_stand_without_javascript(browser: Browser, site, page):
    browser.show(1280)
    browser.open(site / f"{page}.html")
    rows = browser.run(ROWS)
    written = (site / f"{page}.html").read_text(encoding="utf-8")
    assert len(rows) == len(re.findall("<tr", written)) - len(re.findall("<thead>", written))
    wanted = [row for row in rows if "base" in row.lower() and "16" in row]
    assert 0 < len(wanted) < len(rows)
    assert browser.run(FILTER.replace("WORDS", '"BASE 16"')) == f"{len(wanted)} rows"
    assert browser.run(ROWS) == wanted
    only = next(row for row in rows if sum(row.lower() in other.lower() for other in rows) == 1)
    assert browser.run(FILTER.replace("WORDS", json.dumps(only))) == "1 row"
    assert browser.run(ROWS) == [only]
    assert browser.run(FILTER.replace("WORDS", '"no such words"')) == "0 rows"
    assert browser.run(ROWS) == []
    assert browser.run(FILTER.replace("WORDS", '""')) == ""
    assert browser.run(ROWS) == rows


def test_models_are_sorted_by_number(browser: Browser, site):
    browser.show(1280)
    browser.open(site / "models.html")
    for direction in ("ascending", "descending"):
        state, cells = browser.run(SORT.replace("NAME", '"parameters"'))
        numbers = [float(cell.replace(",", "").split()[0]) for cell in cells]
        assert state == direction
        assert numbers == sorted(numbers, reverse=direction == "descending")
        assert len(set(numbers)) > 2


def test_numbers_with_signs_and_commas_are_sorted_and_words_come_last(browser: Browser, site):
    browser.show(1280)
    browser.open(site / "code.html")
    state, cells = browser.run(SORT.replace("NAME", '"cost"'))
    firsts = [cell.split()[0] for cell in cells]
    assert state == "ascending"
    assert firsts == ["\N{MINUS SIGN}3.5", "-2.2", "+6.6", "+59.9", "1,234", "none"]
