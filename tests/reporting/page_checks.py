"""Checks that every report must pass in a real browser."""

import csv
import json
from pathlib import Path

from processes import wait_until
from reporting.browser import Browser

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


def assert_whole_and_legible(browser: Browser, page: Path) -> None:
    """On small and large screens, light and dark: no error, no request, every image, contrast."""
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


def assert_sorts_its_classes(browser: Browser) -> None:
    """The table of classes of an open page is sorted by a click, and by the keyboard alone."""
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


def save_two_labels(browser: Browser, page: Path, folder: Path) -> tuple[Path, list[list[str]]]:
    """Tick two suspects by the keyboard, and save them.

    Args:
        browser: opens the page.
        page: with six suspects or more.
        folder: for downloads.

    Returns:
        relabel.csv, and its rows as the page shows them: path, old class, new class.
    """
    browser.devtools("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
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
    file = folder / "relabel.csv"
    wait_until(file.exists)
    with file.open(encoding="utf-8", newline="") as opened:
        header, *rows = csv.reader(opened)
    assert header == ["path", "old_class", "new_class"]
    assert rows == [boxes[0], boxes[3]]
    assert browser.console() == []
    return file, rows
