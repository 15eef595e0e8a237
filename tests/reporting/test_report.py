"""`report.html`: what it shows, what it says is missing, and which files it may replace."""

import base64
import csv
import json
import re
import shutil
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from reporting.small_runs import HOSTILE, digits_run, photo_run
from safetensors.torch import save
from scipy.stats import binomtest

import vitkit
from vitkit import cli
from vitkit.plots.curves import draw_reliability
from vitkit.reporting.sections import SECTIONS, PlainSection


def wilson_interval(right: int, images: int) -> tuple[float, float]:
    found = binomtest(right, images).proportion_ci(method="wilson")
    return found.low, found.high


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_run(tmp_path_factory.mktemp("runs") / "digits")


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photo_run(tmp_path_factory.mktemp("photos"))


@pytest.fixture
def run(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits, tmp_path / "run")


@pytest.fixture
def unweighted(run: Path) -> Path:
    """A run without its weights: half the time of a report goes into the sheet of the model."""
    shutil.rmtree(run / "weights")
    return run


class Elements(HTMLParser):
    """The elements of a page: start tags with their attributes, and the text of each section."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self._section = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self._section = dict(attrs).get("id") or ""
            self.sections[self._section] = ""

    def handle_data(self, data):
        if self._section:
            self.sections[self._section] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page(path: Path) -> Elements:
    found = Elements()
    found.feed(path.read_text(encoding="utf-8"))
    return found


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "predictions.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_rows(run: Path, rows: list[tuple]) -> None:
    header = [*rows_of(run)[0]]
    with (run / "predictions.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def test_the_page_has_the_score_its_interval_and_the_numbers_of_the_run(digits):
    text = {name: re.sub(r"\s+", " ", part) for name, part in
            page(digits / "report.html").sections.items()}  # fmt: skip
    rows = rows_of(digits)
    right = sum(row["label"] == row["predicted"] for row in rows)
    low, high = wilson_interval(right, len(rows))
    # not the named model, whose size the spec replaces
    assert "ViT of width 32 with 1 block on digits" in (digits / "report.html").read_text()
    assert f"{100 * right / len(rows):.1f} %" in text["headline"]
    assert f"95 % interval {100 * low:.1f} % to {100 * high:.1f} %" in text["headline"]
    assert f"on {len(rows)} test images; ended after all 2 epochs." in text["headline"]
    assert f"{len(rows) - right} of {len(rows)} test images are wrong" in text["mistakes"]
    assert "parameters" in text["costs"]
    assert "MB" in text["costs"]
    assert f"vitkit (training){vitkit.__version__}" in text["environment"]
    mean = 100 * np.mean([float(row["probability"]) for row in rows])
    assert f"mean confidence {mean:.1f} %" in text["calibration"]


def test_the_command_repeats_the_run_to_the_bit(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vitkit.report("run")
    found = re.search(r"vitkit (train digits --recipe \S+ --output \S+)",
                      page(run / "report.html").sections["repetition"])  # fmt: skip
    assert cli.run([*found[1].split(), "--no-report"]) == 0
    weights = [vitkit.load(tmp_path / name).model.state_dict() for name in ("run", "run-again")]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_each_class_has_its_numbers_and_each_confusion_leads_to_its_images(digits):
    rows, found = rows_of(digits), page(digits / "report.html")
    text = re.sub(r"\s+", " ", found.sections["classes"])
    for name in "0123456789":
        of_class = [row for row in rows if row["label"] == name]
        right = sum(row["predicted"] == name for row in of_class)
        low, high = wilson_interval(right, len(of_class))
        share = f"{100 * right / len(of_class):.1f} % {100 * low:.1f} % to {100 * high:.1f} %"
        assert f"{name} {len(of_class)} {share}" in text
    pairs = {(row["label"], row["predicted"]) for row in rows}
    keys = {f"pair-{label}-{predicted}" for label, predicted in pairs if label != predicted}
    targets = {a["id"] for a in found.all("div") if a.get("class") == "pair"}
    links = {a["href"][1:] for a in found.all("a") if a["href"].startswith("#pair-")}
    assert keys == targets == links


def test_the_first_mistake_is_the_most_confident_one_with_its_own_pixels(digits):
    rows = rows_of(digits)
    wrong = [(float(row["probability"]), -place, row) for place, row in enumerate(rows)
             if row["label"] != row["predicted"]]  # fmt: skip
    worst = max(wrong)[2]
    first = next(a for a in page(digits / "report.html").all("img") if a.get("class") == "small")
    assert first["alt"] == f"{worst['image']}: {worst['label']}, predicted {worst['predicted']}"
    split = vitkit.open_dataset("digits").splits["test"]
    names = [split.name(index) for index in range(len(split))]
    pixels = np.asarray(Image.open(BytesIO(base64.b64decode(first["src"].partition(",")[2]))))
    assert np.array_equal(pixels, split.read(names.index(worst["image"]))[..., 0])


def test_nothing_is_loaded_and_every_name_is_escaped(photos):
    text = (photos / "report.html").read_text(encoding="utf-8")
    found = page(photos / "report.html")
    assert len(found.all("script")) == 1
    addresses = [a.get("src") or a.get("href") for _, a in found.tags if {"src", "href"} & {*a}]
    assert all(one.startswith(("data:", "#")) for one in addresses if one)
    assert not re.search(r"@import|url\((?!#)", text)
    assert HOSTILE not in text
    assert HOSTILE in found.sections["classes"]
    assert "default-src 'none'" in found.all("meta")[2]["content"]


def test_a_part_that_is_missing_names_the_command_that_makes_it(run):
    (run / "predictions.csv").unlink()
    (run / "state" / "validation.safetensors").unlink()
    (run / "metrics.csv").unlink()
    text = page(vitkit.report(run)).sections
    command = f"vitkit eval {run} digits --predictions {run / 'predictions.csv'}"
    for part in ("classes", "confusion", "mistakes", "calibration"):
        assert command in text[part]
    assert f"vitkit check digits --output {run / 'check.json'}" in text["check"]
    assert "There are no curves" in text["curves"]
    # what they name is what the page takes
    assert cli.run(command.split()[1:]) == 0
    assert cli.run(["check", "digits", "--output", str(run / "check.json")]) == 0
    text = page(vitkit.report(run)).sections
    assert "test images" in text["classes"]
    assert "1,797 images checked" in text["check"]


def test_without_a_test_split_the_validation_logits_are_shown(run):
    (run / "predictions.csv").unlink()
    found = page(vitkit.report(run))
    assert "validation images" in found.sections["classes"]
    assert "validation logits" in found.sections["classes"]
    split = vitkit.open_dataset("digits").splits["train"]
    names = {split.name(index) for index in range(len(split))}
    names |= {split.path(index) for index in range(len(split))}  # of suspected labels
    shown = [a["alt"].partition(":")[0] for a in found.all("img") if a.get("class") == "small"]
    assert shown
    assert {*shown} <= names


def test_predictions_of_another_split_keep_its_name(run):
    words = ["eval", str(run), "digits", "--split", "val", "--predictions"]
    assert cli.run([*words, str(run / "predictions.csv"), "--overwrite"]) == 0
    count = len(rows_of(run))
    found = page(vitkit.report(run))
    assert f"10 classes, {count} validation images" in found.sections["classes"]
    assert "test images" not in found.sections["mistakes"]
    assert [a for a in found.all("img") if a.get("class") == "small"]


@pytest.mark.parametrize("count", [2, 1000, 3000])
def test_two_and_a_thousand_classes_and_one_without_an_image(count, run):
    names = [f"class {number}" for number in range(count)]
    generator = np.random.default_rng(0)
    (run / "weights" / "best.safetensors").unlink()
    (run / "weights" / "last.safetensors").unlink()
    rows = []
    for index in range(3 * count):
        label = 0 if count == 2 else index % (count - 1)  # the last class has no image
        predicted = int(generator.integers(count)) if index % 3 else label
        row = (f"{index}.png", names[label], names[predicted], "0.5", "0.25", "1.386294", index + 1)
        rows.append(row)
    write_rows(run, rows)
    path = vitkit.report(run)
    found = page(path)
    assert path.stat().st_size < 5e6
    assert "no image" in found.sections["classes"]
    assert f"{count:,} classes" in found.sections["classes"]
    assert "1 of the classes has no image here" in found.sections["classes"]
    assert ("Confusion matrix of 1,000 classes" in str(found.all("img"))) == (count == 1000)
    assert ("matrix is drawn of up to" in found.sections["confusion"]) == (count == 3000)


def test_a_foreign_file_is_never_replaced_without_the_flag(unweighted, tmp_path, capsys):
    mine = tmp_path / "mine.html"
    mine.write_text("<p>my own page</p>", encoding="utf-8")
    words = ["report", str(unweighted), "--output", str(mine)]
    assert cli.run(words) == 2
    assert "mine.html: this file exists; choose" in capsys.readouterr().err
    assert mine.read_text(encoding="utf-8") == "<p>my own page</p>"
    assert cli.run([*words, "--overwrite"]) == 0
    words[3] = str(unweighted / "config.yaml")
    assert cli.run([*words, "--overwrite"]) == 2


def test_a_search_is_no_run_and_its_candidates_are_named(tmp_path, capsys):
    (tmp_path / "search" / "2-scratch").mkdir(parents=True)
    (tmp_path / "search" / "2-scratch" / "config.yaml").touch()
    assert cli.run(["report", str(tmp_path / "search")]) == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert "name one of them, such as" in message


class TakesThePlace(vitkit.Callback):
    """Makes a folder in the place of files of a run."""

    run = Path()
    names: tuple[str, ...] = ()

    def on_end(self, trainer):
        for name in self.names:
            (self.run / name).unlink(missing_ok=True)
            (self.run / name).mkdir()


def test_a_report_that_cannot_be_written_is_a_line_in_the_log(tmp_path):
    TakesThePlace.run, TakesThePlace.names = tmp_path / "run", ("report.html",)
    run = digits_run(tmp_path / "run", callbacks=[TakesThePlace()])
    *_, before, last = (run / "train.log").read_text(encoding="utf-8").splitlines()
    assert "ended after all 2 epochs" in before
    assert "warning: report.html is not written" in last
    assert last.endswith("the results are complete without it")
    assert not any((run / "report.html").iterdir())


GARBAGE = b"\xff\x00 not what it was: {"


@pytest.mark.parametrize(
    ("name", "content"),
    [("check.json", b"[" * 100_000),
     ("metrics.jsonl", b"[" * 100_000 + b"\n"),
     ("state/validation.safetensors",
      save({"logits": torch.zeros(200, 10), "labels": torch.full((200,), 10)})),
     ("config.yaml", GARBAGE), ("predictions.csv", GARBAGE),
     ("weights/best.safetensors", GARBAGE), ("train.log", GARBAGE)],
)  # fmt: skip
def test_a_damaged_file_costs_its_part_alone(name, content, run):
    if name.endswith(("json", "jsonl", "log")):  # what needs no weights, whose sheet is slow
        shutil.rmtree(run / "weights")
    (run / "predictions.csv").unlink()
    (run / name).write_bytes(content)
    sections = page(vitkit.report(run)).sections
    assert [*sections] == [*SECTIONS]
    assert "2 epochs" in sections["curves"]


def test_findings_of_the_check_are_listed(unweighted):
    finding = {"kind": "leak", "severity": "warning", "message": "2 images <b>leak</b>", "count": 2,
               "images": [["a.png", "b.png"]], "split": ""}  # fmt: skip
    document = {"findings": [finding], "images": {"train": {"0": 5, "1": 3}}}
    (unweighted / "check.json").write_text(json.dumps(document), encoding="utf-8")
    text = page(vitkit.report(unweighted)).sections["check"]
    assert "8 images checked." in text
    assert "warning 2 images <b>leak</b>" in re.sub(r"\s+", " ", text)
    assert "a.png = b.png" in text


def test_a_section_of_text_figures_and_a_table_needs_no_template(unweighted, monkeypatch):
    figure = draw_reliability(np.array([0.75, 1.0]), np.array([True, False]), "of two")
    plain = PlainSection("<b> & text", [("half are <right>", figure)], rows=[("<name>", "&lt;")])
    monkeypatch.setitem(SECTIONS, "halves", ("Halves", lambda run: plain))
    found = page(vitkit.report(unweighted))
    text = re.sub(r"\s+", " ", found.sections["halves"])
    assert text.startswith(" Halves <b> & text")
    assert "right predictions (%)" in text
    assert "half are <right> <name>&lt; " in text
    assert "half are <right>" in [a.get("aria-label") for a in found.all("div")]


def test_compared_runs_without_validation_have_one_panel(run, tmp_path):
    path = run / "metrics.csv"
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    with path.open("w", encoding="utf-8", newline="") as file:
        names = [name for name in rows[0] if not name.startswith("val_")]
        writer = csv.DictWriter(file, names, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    other = shutil.copytree(run, tmp_path / "other")
    page_file = tmp_path / "both.html"
    assert cli.run(["compare", str(run), str(other), "--report", str(page_file)]) == 0
    text = page_file.read_text(encoding="utf-8")
    assert "training loss (nats)" in text
    assert "validation" not in text
    assert "validation" not in page(vitkit.report(run)).sections["curves"]


def test_a_long_report_is_folded_and_names_an_image_in_one_way(digits):
    text = vitkit.report(digits).read_text(encoding="utf-8")
    folded = "".join(re.findall(r'<details class="fold">.*?</details>', text, re.DOTALL))
    pairs = re.findall(r'id="pair-', text)
    assert len(pairs) > 12
    assert len(re.findall(r'id="pair-', folded)) == len(pairs) - 9
    suspects = text[text.index('<section id="suspects"') : text.index('<section id="calibration"')]
    with (digits / "predictions.csv").open(encoding="utf-8") as file:
        names = {row["image"] for row in csv.DictReader(file)}
    shown = re.findall(r'<span class="file">(digits[^<:]*)', text)
    assert len(shown) > 100
    assert set(shown) <= names
    # relabel.csv has the names that do not depend on the folder
    paths = re.findall(r'data-path="([^"]*)"', suspects)
    assert paths
    assert {re.sub(r"digits/(\d+)", r"digits[\1]", path) for path in paths} <= names
    assert "wrong prediction. Red patches speak for the predicted class" in text
