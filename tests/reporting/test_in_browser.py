"""The report in a real browser: no error, no request, every image, and the keyboard."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from reporting.browser import IS_INSTALLED, Browser, started_browser
from reporting.small_runs import digits_run, photo_run

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
    return {
        "digits": digits_run(folder / "digits") / "report.html",
        "photos": photo_run(folder) / "report.html",
    }


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
