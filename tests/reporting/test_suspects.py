"""Suspected wrong labels: which are found, where they are shown, and what the page exports."""

import csv
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from reporting.small_runs import HOSTILE, photo_run
from reporting.test_report import page

import vitkit
from vitkit import cli
from vitkit.evaluation.features import out_of_fold_probabilities, rank_suspects

CHANGED = 6


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A run in whose training images six labels are wrong, and the paths of these."""
    folder = tmp_path_factory.mktemp("noisy")
    plain = photo_run(folder, report=False, epochs=1)
    split = vitkit.open_dataset(folder / "images").splits["train"]
    classes = vitkit.open_dataset(folder / "images").classes
    places = np.linspace(0, len(split) - 1, CHANGED).round().astype(int).tolist()
    rows = []
    for place in places:
        old = int(split.labels[place])
        rows.append((split.path(place), classes[old], classes[(old + 1) % 3]))
    with (folder / "wrong.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("path", "old_class", "new_class"), *rows])
    settings = {"recipe": plain / "config.yaml", "relabel": folder / "wrong.csv", "quiet": True}
    run = vitkit.train(folder / "images", output=folder / "noisy", epochs=8, **settings).run
    vitkit.report(run, suspects="train")
    return run, {path for path, *_ in rows}


@pytest.fixture
def run(noisy: tuple[Path, set[str]], tmp_path: Path) -> Path:
    return shutil.copytree(noisy[0], tmp_path / "run")


@pytest.fixture
def unweighted(run: Path) -> Path:
    """A run without its weights: half the time of a report goes into the sheet of the model."""
    shutil.rmtree(run / "weights")
    return run


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "suspects.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_labels_that_were_changed_are_the_first_suspects(noisy):
    run, changed = noisy
    found = rows_of(run)
    first = {row["path"] for row in found[: CHANGED + 2]}
    assert len(first & changed) >= CHANGED - 1
    assert all(row["split"] == "train" for row in found)
    ranks = [float(row["label_probability"]) for row in found]
    assert ranks == sorted(ranks)
    text = re.sub(r"\s+", " ", page(run / "report.html").sections["suspects"])
    assert "Searched are the training images" in text
    assert f"{len(found)} labels are suspected" in text
    assert f"--relabel {run / 'relabel.csv'}" in page(run / "report.html").sections["repetition"]


def test_names_are_escaped_in_every_attribute(noisy):
    run, changed = noisy
    text = (run / "report.html").read_text(encoding="utf-8")
    assert HOSTILE not in text
    boxes = [a for a in page(run / "report.html").all("input") if a.get("type") == "checkbox"]
    assert [box["data-path"] for box in boxes] == [row["path"] for row in rows_of(run)]
    options = {a["value"] for a in page(run / "report.html").all("option")}
    assert options == {*vitkit.load(run).classes}
    earlier = [a for a in page(run / "report.html").all("li") if "data-new" in a]
    assert {a["data-path"] for a in earlier} == changed


def test_a_list_of_another_program_is_not_replaced(unweighted, capsys):
    other = unweighted / "suspects.csv"
    other.write_text("name\nAda\n")
    assert cli.run(["report", str(unweighted), "--suspects"]) == 2
    assert f"--suspects {other}: this file exists" in capsys.readouterr().err
    assert other.read_text() == "name\nAda\n"


def test_without_the_list_the_predictions_are_searched(run):
    (run / "suspects.csv").unlink()
    text = page(vitkit.report(run)).sections["suspects"]
    assert f"vitkit report {run} --suspects train" in text
    assert "by the predictions of the run" in text
    shutil.rmtree(run / "weights")
    (run / "predictions.csv").unlink()
    (run / "state" / "validation.safetensors").unlink()
    text = page(vitkit.report(run)).sections["suspects"]
    assert "neither suspects.csv nor predictions" in text
    assert "suspects train" in text


def test_images_that_are_shown_are_not_called_missing(run):
    with (run / "predictions.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    with (run / "predictions.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows[:-1])
    found = page(vitkit.report(run))
    assert "the data have changed" in found.sections["mistakes"]
    assert found.all("input")
    assert "images are not shown" not in found.sections["suspects"]


def test_without_the_images_nothing_can_be_ticked(run, noisy):
    images = noisy[0].parent / "images"
    hidden = images.rename(images.with_name("hidden"))
    try:
        found = page(vitkit.report(run))
        assert "The images are not shown" in found.sections["suspects"]
        assert not found.all("input")
        assert "relabel as" not in found.sections["suspects"]
        # the command needs them
        assert cli.run(["report", str(run), "--suspects"]) == 2
    finally:
        hidden.rename(images)


def test_as_many_of_each_class_as_are_confused():
    labels = np.array([0, 0, 0, 1, 1, 1, 2])
    predicted = np.array([0, 1, 1, 1, 1, 0, 0])
    probability = np.array([0.9, 0.4, 0.9, 0.8, 0.8, 0.3, np.nan])
    own = np.array([0.9, 0.05, 0.1, 0.8, 0.8, 0.25, np.nan])
    # one image of class 0 reaches 0.617, the mean of class 1; the least probable label is taken
    assert rank_suspects(labels, predicted, probability, own).tolist() == [1]


def test_a_label_has_no_part_in_its_own_probability():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(60, 4, generator=generator)
    labels = torch.arange(60) % 3
    features[torch.arange(60), labels] += 4
    labels[-1] = 3  # the only image of its class
    found = out_of_fold_probabilities(features, labels, 4)
    assert found[-1].isnan().all()
    assert torch.allclose(found[:-1].sum(1), torch.ones(59))
    assert (found[:-1].argmax(1) == labels[:-1]).float().mean() > 0.9
    changed = labels.clone()
    changed[0] = 1
    again = out_of_fold_probabilities(features, changed, 4)
    assert again[0].argmax() == 0  # of class 0, whatever its label


def test_a_single_image_of_the_second_class_hides_its_own_fold_alone():
    features = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(50, dtype=torch.long)
    labels[7] = 1
    found = out_of_fold_probabilities(features, labels, 2)
    assert found[7].isnan().all()
    # no classifier can be fitted on the others of its fold's images, which are of one class
    assert found[:, 0].isnan().sum() == 10
    with pytest.raises(vitkit.DataError, match="the same class"):
        out_of_fold_probabilities(features, labels * 0, 2)
