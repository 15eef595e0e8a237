"""The report in a real browser: no error, no request, every image, and the keyboard."""

import csv
from pathlib import Path

import pytest
from reporting.browser import NEEDS_BROWSER
from reporting.page_checks import (
    RATIOS,
    assert_sorts_its_classes,
    assert_whole_and_legible,
    column,
    save_two_labels,
)
from reporting.small_runs import SUSPECTS_HEADER, digits_run, photo_run

import vitkit
from vitkit import cli

pytestmark = NEEDS_BROWSER


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


def test_no_error_no_request_every_image_and_legible_on_small_and_dark_screens(browser, pages):
    for page in pages.values():
        assert_whole_and_legible(browser, page)


def test_the_table_is_sorted_by_click_and_by_keyboard(browser, pages):
    browser.open(pages["digits"])
    assert_sorts_its_classes(browser)


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
    file, rows = save_two_labels(browser, page, tmp_path)
    again = {"recipe": page.parent / "config.yaml", "quiet": True, "max_steps": 1, "report": False}
    data = page.parent.parent / "images"
    run = vitkit.train(data, output=tmp_path / "run", relabel=file, **again).run
    assert (run / "relabel.csv").read_bytes() == file.read_bytes()
    assert f"{len(rows)} labels corrected" in (run / "train.log").read_text(encoding="utf-8")


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
