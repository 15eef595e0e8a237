"""Files that the verbs write: what they may replace, and what they never do."""

import csv
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import forked
from tiny_checkpoint import save_tiny

from vitkit import cli


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """An untrained checkpoint of the classes cat and dog."""
    return save_tiny(tmp_path_factory.mktemp("checkpoint") / "m.safetensors", ("cat", "dog"))


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A working folder with a dataset `pets`, images `photos`, and files of the user."""
    generator = np.random.default_rng(0)
    for place in ("pets/test/cat", "pets/test/dog", "pets/train/cat", "pets/train/dog", "photos"):
        (tmp_path / place).mkdir(parents=True)
        for name in ("a", "b", "c"):
            pixels = generator.integers(0, 256, (9, 9), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / place / f"{name}.png")
    lines = ["path,label,split"]
    for path in sorted(tmp_path.glob("pets/*/*/*.png")):
        lines.append(f"{path},{path.parent.name},{path.parent.parent.name}")
    (tmp_path / "list.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "notes.csv").write_text("day,note\n1,precious\n")
    (tmp_path / "notes.json").write_text('{"precious": true}')
    np.savez(tmp_path / "mine.npz", precious=np.zeros(3))
    shutil.copy(tmp_path / "photos" / "a.png", tmp_path / "mine.png")
    (tmp_path / "mine.svg").write_text("<svg/>")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def digests(root: Path) -> dict[str, str]:
    """File -> hash of its content; links are followed."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in root.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def refused(root, checkpoint, capsys):
    """Run a command that must be refused before it reads an image; give its one line."""

    def run(*words: str) -> str:
        before = digests(root)
        capsys.readouterr()
        assert cli.run([checkpoint if word == "CKPT" else word for word in words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert digests(root) == before
        return err

    return run


COMMANDS = {
    "--output": ["explain", "CKPT", "photos", "--output", "results"],
    "--csv": ["predict", "CKPT", "photos", "--csv", "FILE"],
    "--out": ["embed", "CKPT", "photos", "--out", "FILE"],
    "--predictions": ["eval", "CKPT", "pets", "--predictions", "FILE"],
    "--confusion": ["eval", "CKPT", "pets", "--confusion", "FILE"],
    "check": ["check", "pets", "--output", "FILE"],
}


def test_explain_never_writes_over_its_images(root, refused):
    (root / "album").symlink_to("photos")
    (root / "linked").mkdir()
    (root / "linked" / "c.png").hardlink_to(root / "photos" / "c.png")
    for output in ("photos", "./photos/../photos", str(root / "photos"), "album", "linked"):
        message = refused("explain", "CKPT", "photos", "--overwrite", "--output", output)
        assert "c.png" in message or "a.png" in message
        assert ".png: this file is one of the inputs, which are never replaced" in message


@pytest.mark.parametrize(
    ("command", "file"),
    [("--csv", "notes.csv"), ("--out", "mine.npz"), ("--predictions", "notes.csv"),
     ("--confusion", "mine.png"), ("--confusion", "mine.svg"), ("--output", "results/b.png"),
     ("check", "notes.json")],
)  # fmt: skip
def test_an_existing_file_is_replaced_only_with_the_flag(root, refused, checkpoint, command, file):
    (root / "results").mkdir()
    shutil.copy("mine.png", "results/b.png")
    words = [file if word == "FILE" else word for word in COMMANDS[command]]
    message = refused(*words)
    assert f"{file}: this file exists; choose another place, or replace it with --over" in message
    before = (root / file).read_bytes()
    given = [checkpoint if word == "CKPT" else word for word in words]
    assert cli.run([*given, "--overwrite"]) == 0
    assert (root / file).read_bytes() != before
    # an earlier result, and a link, whatever it leads to
    refused(*words)
    if file in words:
        link = root / f"link{Path(file).suffix}"
        link.symlink_to(file)
        refused(*[str(link) if word == file else word for word in words])
        assert link.is_symlink()


@pytest.mark.parametrize(
    "words",
    [["eval", "CKPT", "list.csv", "--predictions", "list.csv"],
     ["eval", "CKPT", "list.csv", "--confusion", "pets/test/cat/a.png"],
     ["eval", "CKPT", "list.csv", "--confusion", "pets/../photos/../pets/train/dog/a.png"],
     ["eval", "CKPT", "pets", "--confusion", "pets/test/cat/a.png"],
     ["eval", "CKPT", "pets", "--confusion", "pets/train/.kept.png"],
     ["check", "saved", "--output", "saved/state.json"],
     ["eval", "CKPT", "links", "--confusion", "photos/a.png"],
     ["eval", "CKPT", "pets", "--relabel", "notes.csv", "--predictions", "notes.csv"],
     ["check", "pets", "--relabel", "notes.json", "--output", "notes.json"],
     ["predict", "CKPT", "photos", "odd.csv", "--csv", "odd.csv"],
     ["embed", "model.npz", "photos", "--out", "model.npz"]],
)  # fmt: skip
def test_an_input_is_never_an_output(root, refused, words):
    shutil.copy("mine.png", "odd.csv")
    shutil.copy("mine.png", "pets/train/.kept.png")
    (root / "saved").mkdir()
    for name in ("state.json", "data.arrow"):  # as `save_to_disk` of `datasets` writes them
        (root / "saved" / name).write_text("{}")
    np.savez("model.npz", precious=np.zeros(3))
    for name in ("cat", "dog"):
        (root / "links" / "test" / name).mkdir(parents=True)
        (root / "links" / "train" / name).mkdir(parents=True)
        (root / "links" / "train" / name / "a.png").symlink_to(root / "mine.png")
    (root / "links" / "test" / "cat" / "1.png").symlink_to(root / "photos" / "a.png")
    assert "this file is one of the inputs, which are never" in refused(*words, "--overwrite")


def test_a_report_beside_the_images_is_no_image(root):
    for more in ([], ["--overwrite"]):
        assert cli.run(["check", "pets", "--output", "pets/report.json", *more]) == 0
    assert json.loads(Path("pets/report.json").read_text())["refused"] is False


def test_a_pipe_and_a_dangling_link_are_not_replaced(root, refused):
    os.mkfifo("pipe.csv")
    assert "pipe.csv: this file exists" in refused("predict", "CKPT", "photos", "--csv", "pipe.csv")
    (root / "gone.csv").symlink_to("nowhere.csv")
    assert "gone.csv: this file exists" in refused("predict", "CKPT", "photos", "--csv", "gone.csv")


def test_predict_prints_nothing_beside_a_csv_but_the_json_asked_for(root, checkpoint, capsys):
    words = ["predict", checkpoint, "photos", "--csv", "rows.csv"]
    assert cli.run(words) == 0
    assert capsys.readouterr().out == ""
    assert cli.run([*words, "--json", "--overwrite"]) == 0
    labels = [entry["label"] for entry in json.loads(capsys.readouterr().out)]
    with Path("rows.csv").open() as file:
        assert [row["label"] for row in csv.DictReader(file) if row["rank"] == "1"] == labels
    assert cli.run(["predict", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "without --json, nothing is printed then" in shown


def test_predictions_are_kept_where_the_matrix_has_too_many_classes(root, tmp_path, capsys):
    path = save_tiny(tmp_path / "many.safetensors", ["cat", "dog", *map(str, range(2000))])
    words = ["eval", path, "pets", "--confusion", "c.png", "--predictions", "p.csv"]
    assert cli.run(words) == 2
    assert "classes, and there are 2002; name a .csv file" in capsys.readouterr().err
    assert len(Path("p.csv").read_text().splitlines()) == 7
    assert not Path("c.png").exists()


def fill() -> None:
    """Let the standard output be a full disk."""
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["help", "predict"], ["models"]])
def test_a_full_disk_behind_the_standard_output(words, tmp_path):
    with forked(words, tmp_path, before=fill) as child:
        assert child.wait() == 2
    assert "cannot write to the standard output" in child.stderr
    assert child.stderr.count("\n") == 1


def test_an_error_counts_more_than_a_full_disk(root, checkpoint, tmp_path):
    Path("photos/d.png").write_bytes(b"words")

    def embed() -> int:
        code = cli.run(["embed", checkpoint, "photos", "--out", "f.npz"])
        sys.stdout.flush()  # as the interpreter does at its end
        return code

    with forked(embed, tmp_path, before=fill) as child:
        assert child.wait() == 2
    first, second = child.stderr.splitlines()
    assert "d.png: not an image" in first
    assert "1 of 4 images could not be used" in second
