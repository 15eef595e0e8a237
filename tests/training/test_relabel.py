"""`relabel`: corrected labels of single images, in training, checks and evaluation."""

import csv
import hashlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from training.tiny_runs import QUICK, settings_of

import vitkit
from vitkit import TrainConfig, cli
from vitkit.training.plan import open_training_data

SPEC = {"image_size": 16, "patch_size": 8, "width": 16, "depth": 1, "num_heads": 2, "mlp_width": 32}
SETTINGS = QUICK | {"spec": SPEC, "epochs": 2, "batch_size": 8}
CLASSES = ("cat", "dog")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """20 images of each of two classes, in train and test."""
    generator = np.random.default_rng(0)
    for part, count in (("train", 16), ("test", 4)):
        for label in CLASSES:
            folder = tmp_path / "photos" / part / label
            folder.mkdir(parents=True)
            for index in range(count):
                pixels = generator.integers(0, 255, (16, 16, 3), np.uint8)
                Image.fromarray(pixels).save(folder / f"{index}.png")
    return tmp_path / "photos"


def write(path: Path, *rows: tuple[str, ...], header: str = "path,old_class,new_class") -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"{header}\n")
        csv.writer(file).writerows(rows)
    return path


def labels_of(run: Path) -> dict[str, str]:
    """Return the class of each image of the run."""
    config = TrainConfig(**settings_of(run) | {"resume": str(run)})
    dataset, *_ = open_training_data(config, resumes=True)
    return {
        split.path(index): CLASSES[label]
        for split in dataset.splits.values()
        for index, label in enumerate(split.labels.tolist())
    }


def state_of(folder: Path) -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in folder.rglob("*") if path.is_file()}  # fmt: skip


def test_training_changes_exactly_the_listed_labels_and_no_file(photos, tmp_path):
    before = state_of(photos)
    plain = vitkit.train(photos, output=tmp_path / "plain", **SETTINGS).run
    labels = labels_of(plain)
    moved = [name for name, label in labels.items() if label == "cat"][:3]
    wanted = dict.fromkeys([*moved, "test/dog/1.png"])
    rows = [(name, labels[name], {"cat": "dog", "dog": "cat"}[labels[name]]) for name in wanted]
    file = write(tmp_path / "relabel.csv", *rows)
    run = vitkit.train(photos, output=tmp_path / "run", relabel=file, **SETTINGS).run
    changed = {name: label for name, label in labels_of(run).items() if label != labels[name]}
    assert changed == {name: new for name, _, new in rows}
    assert [*labels_of(run)] == [*labels]  # the same splits, in the same order
    assert state_of(photos) == before
    log = (run / "train.log").read_text(encoding="utf-8")
    assert "relabel.csv: 4 labels corrected (" in log
    assert "1 of test)" in log
    # the score of the run is that of `eval` with the same labels
    scores = vitkit.evaluate(run, photos, relabel=file)
    assert scores["top1"] == vitkit.load(run).metadata["metrics"]["test"]["top1"]
    assert scores.labels.sum() == vitkit.evaluate(run, photos).labels.sum() - 1


def test_a_run_resumes_with_the_labels_that_it_began_with(photos, tmp_path, capsys):
    file = write(tmp_path / "relabel.csv", ("train/cat/1.png", "cat", "dog"))
    asked = SETTINGS | {"relabel": file}
    whole = vitkit.train(photos, output=tmp_path / "whole", **asked).run
    run = vitkit.train(photos, output=tmp_path / "run", **asked | {"max_steps": 2}).run
    write(file, ("train/cat/2.png", "cat", "dog"), ("train/cat/3.png", "cat", "dog"))
    resume = ["train", "--resume", str(run), "--max-steps", "100", "--no-report"]
    assert cli.run(resume) == 0
    assert f"{file} has changed since the run began" in (run / "train.log").read_text()
    weights = [vitkit.load(one).model.state_dict() for one in (run, whole)]
    assert all(np.array_equal(weights[0][name], weights[1][name]) for name in weights[0])
    # another file is another run
    other = write(tmp_path / "other.csv", ("train/dog/1.png", "dog", "cat"))
    assert cli.run([*resume, "--relabel", str(other)]) == 2
    assert "differ from the run's: relabel: " in capsys.readouterr().err
    # a copy that was edited or lost is noticed
    write(run / "relabel.csv", ("train/cat/2.png", "cat", "dog"))
    assert cli.run(resume) == 2
    assert "labels or classes differ from those" in capsys.readouterr().err
    (run / "relabel.csv").unlink()
    assert cli.run(resume) == 2
    assert "relabel.csv: no such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "header", "problem"),
    [
        ([("train/cat/99.png", "cat", "dog")], None, "line 2: photos has no image"),
        ([("train/cat/1.png", "cat", "dgo")], None, "no class 'dgo' (did you mean 'dog'?)"),
        ([("train/cat/1.png", "dog", "cat"), ("train/cat/2.png", "dog", "cat")], None, ""),
        ([("train/cat/1.png", "dog", "dog")], None, "is 'cat' in photos, not 'dog'"),
        ([("train/cat/1.png", "cat", "dog"), ("train/cat/1.png", "cat", "cat")], None,
         "'cat' here and 'dog' in line 2; keep one of the lines"),
        ([("train/cat/1.png", "cat", "")], None, "line 2: expected a path and a new class"),
        ([("train/cat/1.png", "dog")], "image,label", "in the first line, got 'image,label'"),
        ([("cat", "dog")], "old_class,new_class,path", "line 2: expected a path and a new class"),
        ([], None, "lists no image"),
        ([("<script>\n", "cat", "dog")], None, "has no image '<script>\\\\n'"),
    ],
)  # fmt: skip
def test_a_list_that_does_not_fit_is_refused_in_one_line(
    rows, header, problem, photos, tmp_path, capsys
):
    file = write(tmp_path / "fix.csv", *rows, header=header or "path,old_class,new_class")
    code = cli.run(["check", str(photos), "--relabel", str(file)])
    message = capsys.readouterr().err
    if not problem:  # corrected already
        assert code == 0
        return
    assert code == 2
    assert problem in message
    assert "--relabel" in message
    assert message.count("\n") == 1
    words = ["train", str(photos), "--relabel", str(file), "--output", str(tmp_path / "run")]
    assert cli.run(words) == 2
    assert not (tmp_path / "run").exists()


def test_a_file_that_is_not_there_or_no_text(photos, tmp_path, capsys):
    assert cli.run(["check", str(photos), "--relabel", str(tmp_path / "no.csv")]) == 2
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "image.csv").write_bytes(b"\xff\xfe\x00\x00\xff")
    assert cli.run(["check", str(photos), "--relabel", str(tmp_path / "image.csv")]) == 2
    assert "not a CSV file in UTF-8" in capsys.readouterr().err


def test_images_of_lists_arrays_and_named_datasets(photos, tmp_path):
    listed = tmp_path / "list.csv"
    files = sorted((photos / "train").rglob("*.png"))
    rows = [(str(file.relative_to(tmp_path)), file.parent.name) for file in files]
    write(listed, *rows, header="path,label")
    file = write(tmp_path / "fix.csv", ("photos/train/cat/0.png", "cat", "dog"))
    totals = {"cat": 0, "dog": 0}
    for counts in vitkit.check(listed, relabel=file).images.values():
        totals = {name: totals[name] + counts[name] for name in totals}
    assert totals == {"cat": 15, "dog": 17}

    digits = vitkit.check("digits").images
    name = vitkit.open_dataset("digits").splits["train"].name(0)
    label = str(vitkit.open_dataset("digits").splits["train"].labels[0])
    new = "0" if label != "0" else "1"
    for path in (name, name.replace("[", "/").rstrip("]")):  # of messages, and of lists
        fixed = vitkit.check("digits", relabel=write(file, (path, label, new))).images
        assert fixed["train"][label] == digits["train"][label] - 1
        assert fixed["train"][new] == digits["train"][new] + 1
    with pytest.raises(
        vitkit.DataError, match=r"line 3: .* the image of line 2, '.' there and '2'"
    ):
        vitkit.check("digits", relabel=write(file, (name, label, new), (path, label, "2")))

    pixels, labels = np.zeros((4, 8, 8), np.uint8), ["a", "a", "b", "b"]
    data = {"train": (pixels, labels), "val": (pixels, labels)}
    changes = write(file, ("val/1", "a", "b"))
    assert vitkit.check(data, relabel=changes).images == {
        "train": {"a": 2, "b": 2}, "val": {"a": 1, "b": 3}
    }  # fmt: skip


def test_none_on_resume_keeps_the_labels(photos, tmp_path, capsys):
    file = write(tmp_path / "relabel.csv", ("train/cat/1.png", "cat", "dog"))
    asked = SETTINGS | {"relabel": file, "max_steps": 2, "test": False}
    run = vitkit.train(photos, output=tmp_path / "run", **asked).run
    vitkit.train(resume=run, relabel=None, max_steps=4)
    # nor does it matter that the user's file is gone
    file.unlink()
    assert cli.run(["train", "--resume", str(run), "--max-steps", "6", "--no-quiet"]) == 0
    assert f"--relabel {run / 'relabel.csv'}" in " ".join(capsys.readouterr().out.split())
    assert "has changed since" not in (run / "train.log").read_text(encoding="utf-8")


def test_an_image_under_two_names_is_one_image(photos, tmp_path, capsys):
    split = vitkit.open_dataset("digits").splits["train"]
    name, label = split.name(0), str(split.labels[0])
    path = name.replace("[", "/").rstrip("]")
    first = str((int(label) + 1) % 10)
    file = write(tmp_path / "fix.csv", (path, label, first), (name, label, first))
    assert cli.run(["check", "digits", "--relabel", str(file)]) == 0
    assert "1 label corrected" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("separator", [";", "\t"])
def test_files_that_a_spreadsheet_saved(encoding, separator, photos, tmp_path):
    rows = [("path", "old_class", "new_class"), ("train/cat/1.png", "cat", "dog")]
    file = tmp_path / "fix.csv"
    text = "".join(f"{separator.join(row)}\r\n" for row in rows)
    text += 2 * separator + "\r\n"  # an empty row of the table
    file.write_bytes(text.encode(encoding))
    assert vitkit.check(photos, relabel=file).images["train"] == {"cat": 15, "dog": 17}


def test_the_run_keeps_the_labels_that_it_used(photos, tmp_path):
    file = write(tmp_path / "relabel.csv", ("train/cat/1.png", "cat", "dog"))
    before = file.read_text()

    class Edits(vitkit.Callback):
        """Edits the file between the reading of the data and the first step."""

        def __init__(self) -> None:
            write(file, ("train/cat/2.png", "cat", "dog"))

    run = vitkit.train(
        photos, output=tmp_path / "run", relabel=file, callbacks=[Edits], **SETTINGS
    ).run
    assert (run / "relabel.csv").read_text() == before


def test_a_class_that_the_corrections_empty(photos, tmp_path, capsys):
    rows = [(f"train/cat/{index}.png", "cat", "dog") for index in range(16)]
    file = write(tmp_path / "relabel.csv", *rows)
    assert cli.run(["check", str(photos), "--relabel", str(file)]) == 0
    assert "cat" in capsys.readouterr().out
    run = vitkit.train(photos, output=tmp_path / "run", relabel=file, **SETTINGS).run
    assert vitkit.load(run).classes == CLASSES
    assert "cat" in (run / "train.log").read_text(encoding="utf-8")
