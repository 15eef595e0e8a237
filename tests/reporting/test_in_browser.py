"""The report in a real browser: no error, no request, every image, and the keyboard."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from processes import wait_until
from reporting.browser import IS_INSTALLED, Browser, started_browser
from reporting.small_runs import digits_run, photo_run

import vitkit
from vitkit import cli
from vitkit.reporting.sections.suspects import SUSPECTS_HEADER

pytestmark = [
    pytest.mark.skipif(not IS_INSTALLED, reason="Chromium and its driver are not installed"),
    pytest.mark.allow_hosts(["127.0.0.1"]),
]
RATIOS = """
const colours = (text) => text.match(/[\\d.]+/g).map(Number);
const light = (parts) => {
  const [r, g, b] = parts.slice(0, 3).map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
const rgb = (text) => {  // also of color(srgb ...), which color-mix gives
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = text;
  canvas.fillRect(0, 0, 1, 1);
  return Array.from(canvas.getImageData(0, 0, 1, 1).data);
};
const ground = (element) => {
  for (let one = element; one; one = one.parentElement) {
    const parts = rgb(getComputedStyle(one).backgroundColor);
    if (parts[3] === 255) return parts;
  }
  return [255, 255, 255];
};
const found = [];
for (const one of document.querySelectorAll("body *")) {
  const own = Array.from(one.childNodes).some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || one.closest("svg, script, .skip")) continue;
  const [a, b] = [light(rgb(getComputedStyle(one).color)), light(ground(one))];
  found.push((Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05));
}
return [Math.min(...found), found.length];
"""
"""The lowest contrast of the texts of a page (WCAG 2.2, 1.4.3), and how many texts there are."""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    photos = photo_run(folder, report=False)
    write_suspects(photos, folder / "images")
    return {
        "digits": digits_run(folder / "digits") / "report.html",
        "photos": vitkit.report(photos),
    }


def write_suspects(run: Path, images: Path) -> None:
    """Write a list as `--suspects` does, of two training images of each class."""
    data = vitkit.open_dataset(images)
    split = data.splits["train"]
    rows = []
    for number in range(0, len(split), len(split) // 6):
        label = int(split.labels[number])
        names = (data.classes[label], data.classes[(label + 1) % 3])
        rows.append((split.path(number), "train", number, *names, 0.8, 0.1))
    with (run / "suspects.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([SUSPECTS_HEADER, *rows])


def labels_of(run: Path) -> dict[str, int]:
    """Return the class number of each image, as the run's list of images has it."""
    found = {}
    with np.load(run / "images.npz") as stored:
        for part in ("train", "val", "test"):
            names = stored[f"{part}/names"].tobytes().decode().split("\0")
            found |= dict(zip(names, stored[f"{part}/labels"].tolist(), strict=True))
    return found


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile")


@pytest.fixture
def browser(profile: Path) -> Iterator[Browser]:
    with started_browser(profile) as browser:
        yield browser
    shutil.rmtree(profile, ignore_errors=True)


def first_column(browser: Browser) -> list[str]:
    return browser.run(
        "return Array.from(document.querySelector('.sortable').tBodies[0].rows)"
        ".map(row => row.cells[0].textContent)"
    )


def column(browser: Browser, number: int) -> list[str]:
    return browser.run(
        "return Array.from(document.querySelector('.sortable').tBodies[0].rows)"
        f".map(row => row.cells[{number}].dataset.value)"
    )


def sorting(browser: Browser) -> list[str]:
    return browser.run(
        "return Array.from(document.querySelectorAll('.sortable [aria-sort]'))"
        ".map(head => head.getAttribute('aria-sort'))"
    )


def test_no_error_no_request_every_image_and_legible_on_small_and_dark_screens(browser, pages):
    for page in pages.values():
        for width in (390, 1280):
            for scheme in ("light", "dark"):
                browser.show(width, scheme)
                browser.open(page)
                assert browser.requests() == [page.resolve().as_uri()]
                assert browser.console() == []
                images, drawn = browser.run(
                    "const all = Array.from(document.images);"
                    "return [all.length, all.filter(one => one.naturalWidth).length]"
                )
                assert images == drawn > 5
                # what is wider scrolls inside its own box
                assert browser.run("return document.documentElement.scrollWidth") <= width
                lowest, texts = browser.run(RATIOS)
                assert texts > 100
                assert lowest >= 4.5


def test_names_stay_text(browser, pages):
    browser.open(pages["photos"])
    assert browser.run("return document.scripts.length") == 1
    assert any("<script>" in name for name in first_column(browser))


def test_the_table_is_sorted_by_click_and_by_keyboard(browser, pages):
    browser.open(pages["digits"])
    before = first_column(browser)
    browser.click(".sortable th:nth-child(3) button")
    accuracy = [float(value) for value in column(browser, 2)]
    assert accuracy == sorted(accuracy)
    assert sorting(browser) == ["none", "none", "ascending", "none", "none"]
    browser.press("enter")  # the button has the focus
    accuracy = [float(value) for value in column(browser, 2)]
    assert accuracy == sorted(accuracy, reverse=True)
    assert sorting(browser)[2] == "descending"
    assert sorted(first_column(browser)) == sorted(before)
    # from the accuracy to the precision with the keyboard alone
    browser.press("tab", "space")
    precision = column(browser, 4)
    numbers = [float(value) for value in precision if value]
    assert numbers == sorted(numbers)
    assert precision[: len(numbers)] == [value for value in precision if value]  # others are last
    assert sorting(browser) == ["none", "none", "none", "ascending", "none"]


def test_a_confusion_leads_to_its_images(browser, pages):
    browser.open(pages["digits"])
    browser.click(".confusion .wrong a")
    target = browser.run("return document.querySelector(':target')?.className")
    assert target == "pair"
    seen = browser.run(
        "const box = document.querySelector(':target').getBoundingClientRect();"
        "return document.querySelector(':target').querySelectorAll('img').length"
    )
    assert seen >= 1


def test_on_paper_nothing_is_cut(browser, pages):
    browser.show(700, "dark", media="print")
    browser.open(pages["digits"])
    assert browser.run("return getComputedStyle(document.querySelector('nav')).display") == "none"
    assert browser.run("return getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    assert browser.run(
        "return Array.from(document.querySelectorAll('.scroll'))"
        ".every(one => getComputedStyle(one).overflowY === 'visible')"
    )


def test_ticked_labels_are_saved_by_keyboard_and_train_reads_them(browser, pages, tmp_path):
    page = pages["photos"]
    browser.devtools("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.open(page)
    assert browser.run("return document.getElementById('save-labels').disabled")
    boxes = browser.run(
        "return Array.from(document.querySelectorAll('.suspects [type=checkbox]'),"
        " one => [one.dataset.path, one.dataset.old,"
        " one.closest('li').querySelector('[type=text]').value])"
    )
    assert len(boxes) >= 6
    for number in (0, 3):
        browser.run(f"document.querySelectorAll('.suspects [type=checkbox]')[{number}].focus()")
        browser.press("space")
    assert browser.run("return document.getElementById('ticked').value") == "2 ticked"
    # a class that does not exist is refused in the page
    browser.press("tab")
    assert browser.run("return document.activeElement.type") == "text"
    name = browser.run("return document.activeElement.value")
    browser.run("document.activeElement.value = 'no class'")
    browser.run("document.getElementById('save-labels').focus()")
    browser.press("enter")
    assert browser.run("return document.activeElement.validationMessage") == (
        "no class is not a class of the data"
    )
    browser.run(f"document.activeElement.value = {json.dumps(name)}")
    browser.run("document.activeElement.dispatchEvent(new Event('input'))")
    browser.run("document.getElementById('save-labels').focus()")
    browser.press("enter")
    file = tmp_path / "relabel.csv"
    wait_until(file.exists)
    with file.open(encoding="utf-8", newline="") as opened:
        header, *rows = csv.reader(opened)
    assert header == ["path", "old_class", "new_class"]
    assert rows == [boxes[0], boxes[3]]
    assert browser.console() == []

    run = page.parent
    before = labels_of(run)
    again = {"recipe": run / "config.yaml", "quiet": True, "max_steps": 1, "report": False}
    data = run.parent / "images"
    after = labels_of(vitkit.train(data, output=tmp_path / "run", relabel=file, **again).run)
    classes = vitkit.load(run).classes
    changed = {path: label for path, label in after.items() if label != before[path]}
    assert changed == {path: classes.index(new) for path, _, new in rows}


def test_a_confusion_is_opened_and_left_by_keyboard(browser, pages):
    browser.open(pages["digits"])
    browser.run("document.querySelector('.confusion .wrong a').focus()")
    browser.press("enter")
    assert browser.run("return document.querySelector(':target')?.className") == "pair"
    browser.press("tab")  # the next link is the one back
    assert browser.run("return document.activeElement.textContent") == "back to the matrix"
    browser.press("enter")
    assert browser.run("return document.querySelector(':target')?.id") == "confusion"


def test_runs_side_by_side(browser, pages, tmp_path):
    run = pages["digits"].parent
    other = digits_run(tmp_path / "other", lr=1e-3, report=False)
    path = tmp_path / "side.html"
    assert cli.run(["compare", str(run), str(other), "--report", str(path)]) == 0
    for width, scheme in ((390, "dark"), (1280, "light")):
        browser.show(width, scheme)
        browser.open(path)
        assert browser.requests() == [path.resolve().as_uri()]
        assert browser.console() == []
        assert browser.run("return document.documentElement.scrollWidth") <= width
        lowest, texts = browser.run(RATIOS)
        assert texts > 50
        assert lowest >= 4.5
    browser.run("document.querySelectorAll('.sortable button')[4].focus()")  # the difference
    browser.press("enter")
    numbers = [float(value) for value in column(browser, 4)]
    assert numbers == sorted(numbers)
    settings = browser.run(
        "return Array.from(document.querySelectorAll('#settings ~ div tbody tr'),"
        " row => Array.from(row.cells, cell => cell.textContent))"
    )
    assert ["lr", "0.004", "0.001"] in settings
    # an earlier comparison is replaced, another file is not
    path.write_text("<p>mine</p>", encoding="utf-8")
    assert cli.run(["compare", str(run), str(other), "--report", str(path)]) == 2
    assert path.read_text(encoding="utf-8") == "<p>mine</p>"
