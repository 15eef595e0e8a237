"""`vitkit predict` and `vitkit embed` on what a shell gives them, and the drawings of predict."""

import csv
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from local_server import listening
from PIL import Image
from processes import forked
from tiny_checkpoint import save_tiny

import vitkit
from vitkit import cli

CLASSES = ("cat", "dog")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("checkpoint") / "m.safetensors", CLASSES)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A working folder with six images in `photos`, and a list of them with labels."""
    generator = np.random.default_rng(0)
    rows = ["path,label,split"]
    for number in range(6):
        path = tmp_path / "photos" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(generator.integers(0, 256, (9, 9), dtype=np.uint8)).save(path)
        rows.append(f"photos/{number}.png,{CLASSES[number % 2]},{'train' if number else 'test'}")
    (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextmanager
def stdin_of(content: bytes, monkeypatch) -> Iterator[None]:
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    with os.fdopen(reading) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        yield


def printed(capsys) -> list[str]:
    """The names of the predicted images."""
    return [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()]


def test_a_pattern_a_file_twice_and_the_standard_input(root, checkpoint, capsys, monkeypatch):
    words = ["predict", checkpoint, "photos/[01].png", "-", "photos/0.png"]
    with stdin_of(b"photos/3.png\nphotos/2.png\n", monkeypatch):
        assert cli.run(words) == 0
    assert printed(capsys) == [f"photos/{number}.png" for number in (0, 1, 3, 2, 0)]


def test_a_missing_image_among_others_is_one_that_cannot_be_used(root, checkpoint, capsys):
    words = [checkpoint, "photos/0.png", "photos/gone.png", "photos/1.png"]
    assert cli.run(["predict", *words]) == 2
    out, err = capsys.readouterr()
    assert [line.split(": ")[0] for line in out.splitlines()] == ["photos/0.png", "photos/1.png"]
    missing, end = err.splitlines()
    assert missing.startswith("vitkit: photos/gone.png: missing: no such image; the nearest folder")
    assert end == (
        "vitkit: 1 of 3 images could not be used, for the reasons above; the others were processed"
    )
    assert cli.run(["embed", *words, "--out", "f.npz"]) == 2
    assert np.load("f.npz")["images"].tolist() == ["photos/0.png", "photos/1.png"]
    capsys.readouterr()
    for refused in ([*words, "--strict"], [checkpoint, "photos/gone.png", "photos/gone-2.png"]):
        assert cli.run(["predict", *refused]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert "photos/gone.png: no such image; the nearest folder that exists is" in err
    # a missing folder stands for many images
    assert cli.run(["predict", *words[:2], "photo"]) == 2
    assert "photo: no such image; the nearest folder" in capsys.readouterr().err


def test_other_files_that_a_pattern_of_the_shell_matches_are_named_and_the_rest_goes_on(
    root, checkpoint, capsys
):
    Path("photos", "notes.txt").write_text("words")
    Path("photos", "labels.csv").write_text("file;class\n")
    Path("photos", "none").mkdir()
    Path("photos", "readme.md").write_text("words")
    names = sorted(map(str, Path("photos").iterdir()))
    images = [name for name in names if name.endswith(".png")]
    for verb in ("predict", "explain"):
        assert cli.run([verb, checkpoint, *names]) == 2
        out, err = capsys.readouterr()
        lines = [line for line in out.splitlines() if line.startswith("photos/")]
        assert [line.split(": ")[0] for line in lines] == images
        lines = err.splitlines()
        assert [line.split(": ")[1] for line in lines[:-1]] == [
            name for name in names if name not in images
        ]
        assert f"4 of {len(names)} images could not be used" in lines[-1]
    assert cli.run(["predict", checkpoint, *names, "--strict"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    others = ["photos/notes.txt", "photos/none"]
    assert cli.run(["predict", checkpoint, *others]) == 2
    assert capsys.readouterr().err.startswith("vitkit: photos/notes.txt: not an image; if it is a")


def test_on_a_terminal_predictions_are_a_table_with_bars(root, checkpoint, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("COLUMNS", "80")
    long = Path("photos", "n" * 60 + ".png")
    Path("photos/5.png").rename(long)
    assert cli.run(["predict", checkpoint, "photos/0.png", "photos/1.png", str(long)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert max(map(len, lines)) <= 80
    assert [lines[0], lines[3], lines[6]] == ["photos/0.png", "photos/1.png", str(long)]
    predictor = vitkit.Predictor.from_checkpoint(checkpoint)
    rows = [lines[1:3], lines[4:6], lines[7:9]]
    for row, prediction in zip(
        rows, predictor(["photos/0.png", "photos/1.png", long]), strict=True
    ):
        for line, (label, probability) in zip(row, prediction.top, strict=True):
            assert f" {label} " in line
            assert f" {100 * probability:.1f} %" in line
            # the bar is a fifth of the terminal, filled like the probability
            assert abs(line.count("█") - 16 * probability) <= 1


def test_a_standard_input_that_sends_nothing(root, checkpoint, capsys, monkeypatch):
    def refused(*words: str) -> str:
        assert cli.run(["predict", checkpoint, "-", *words]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return err

    with stdin_of(b"\n\n", monkeypatch):
        assert "-: no paths came on the standard input; expected one per line" in refused()
    monkeypatch.setattr("sys.stdin", None)
    assert "-: the standard input is closed or a terminal; send paths to it" in refused()
    main, terminal = os.openpty()
    with os.fdopen(terminal) as stream:
        monkeypatch.setattr("sys.stdin", stream)
        assert "-: the standard input is closed or a terminal; send paths" in refused()
    os.close(main)
    with stdin_of(b"gone.png\nlost.png\n", monkeypatch):
        assert cli.run(["predict", checkpoint, "-"]) == 2
    assert "none of the images could be used" in capsys.readouterr().err


@pytest.mark.allow_hosts(["127.0.0.1"])
def test_addresses_among_files(root, checkpoint, capsys, tmp_path):
    def answer(request) -> None:
        found = request.path == "/a%20b.png"
        request.send_response(200 if found else 404)
        request.end_headers()
        asked.append(request.path)
        if found:
            request.wfile.write((root / "photos" / "1.png").read_bytes())

    asked: list[str] = []
    with listening(answer) as server:
        images = [f"{server}/a%20b.png", "photos/1.png", f"{server}/gone.png"]
        assert cli.run(["predict", checkpoint, *images, "--save-images", "drawn"]) == 2
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    assert first.removeprefix(images[0]) == second.removeprefix(images[1])
    assert "gone.png: missing: the server answered 404 Not Found" in err
    assert sorted(path.name for path in Path("drawn").iterdir()) == ["1.png", "a b.png"]
    assert asked.count("/a%20b.png") == 1, "the drawing is of the bytes that were predicted"


def test_a_list_gives_labels_and_the_number_that_is_right(root, checkpoint, capsys):
    assert cli.run(["predict", checkpoint, "list.csv", "--csv", "rows.csv", "--json"]) == 0
    out, err = capsys.readouterr()
    with Path("rows.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["rank"] == "1"]
    assert [row["true_label"] for row in rows] == ["cat", "dog"] * 3
    assert [row["image"] for row in rows] == [f"photos/{number}.png" for number in range(6)]
    parsed = json.loads(out)
    assert [(row["label"], row["true_label"]) for row in parsed] == [
        (row["label"], row["true_label"]) for row in rows
    ]
    right = [row["label"] == row["true_label"] for row in rows]
    assert err.splitlines() == [
        f"right: {sum(right)} of 6 ({sum(right) / 6:.1%})".replace("%", " %"),
        f"right in test: {right[0]:d} of 1 ({right[0]:.1%})".replace("%", " %"),
        f"right in train: {sum(right[1:])} of 5 ({sum(right[1:]) / 5:.1%})".replace("%", " %"),
        "wrote rows.csv: 6 images",
    ]


def test_classes_that_the_checkpoint_lacks_are_not_counted(root, checkpoint, capsys):
    text = (root / "list.csv").read_text().replace("dog", "cow")
    (root / "cows.csv").write_text(text)
    assert cli.run(["predict", checkpoint, "cows.csv"]) == 0
    err = capsys.readouterr().err
    assert "of 3 (" in err.splitlines()[0]
    assert err.splitlines()[-1] == "not counted: 3 images of classes that the checkpoint lacks"


def test_classes_without_names_are_those_of_the_data_in_order(root, capsys, tmp_path):
    path = save_tiny(tmp_path / "named.safetensors", CLASSES)
    model, preprocess = vitkit.load(path).model, vitkit.load(path).preprocess
    nameless = vitkit.save(tmp_path / "nameless.safetensors", model, preprocess=preprocess)
    assert cli.run(["predict", path, "list.csv", "--split", "train"]) == 0
    first = capsys.readouterr().err
    assert cli.run(["predict", str(nameless), "list.csv", "--split", "train"]) == 0
    assert capsys.readouterr().err == first
    assert "of 5 (" in first


def test_embed_stores_labels_and_exact_names(root, checkpoint, capsys):
    odd = os.fsdecode(b"photos/caf\xe9.png")
    Path("photos/1.png").rename(odd)
    assert cli.run(["embed", checkpoint, "photos", "--out", "f.npz"]) == 0
    stored = np.load("f.npz")
    assert set(stored) == {"features", "images"}
    assert odd in stored["images"].tolist()
    Path(odd).rename("photos/1.png")
    words = ["embed", checkpoint, "list.csv", "photos/0.png", "--out", "f.npz", "--overwrite"]
    assert cli.run(words) == 0
    stored = np.load("f.npz")
    assert stored["labels"].tolist() == ["cat", "dog"] * 3 + [""]
    np.testing.assert_array_equal(stored["features"][0], stored["features"][6])
    images = [*(f"photos/{number}.png" for number in range(6)), "photos/0.png"]
    features = vitkit.embed(checkpoint, images)
    np.testing.assert_allclose(stored["features"], features, atol=1e-6)


def test_json_keeps_a_name_that_is_not_utf8(root, checkpoint, capsys):
    odd = os.fsdecode(b"photos/caf\xe9.png")
    Path("photos/1.png").rename(odd)
    assert cli.run(["predict", checkpoint, odd, "--json", "--csv", "rows.csv"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert os.fsencode(row["image"]) == b"photos/caf\xe9.png"
    assert "caf\\udce9" in Path("rows.csv").read_text(encoding="utf-8")


def test_drawings_show_the_image_and_keep_its_folders(root, checkpoint, capsys):
    Path("photos/old").mkdir()
    photo = np.zeros((30, 20, 3), np.uint8)
    photo[:15] = 255, 0, 0
    turned = Image.fromarray(photo)
    exif = turned.getexif()
    exif[0x0112] = 6  # to be turned clockwise
    turned.save("photos/old/0.png", exif=exif)
    turned.save("photos/0.jpg")
    assert cli.run(["predict", checkpoint, "photos", "--save-images", "drawn"]) == 0
    assert capsys.readouterr().err == "wrote 8 images to drawn\n"
    names = sorted(str(path.relative_to("drawn")) for path in Path("drawn").rglob("*.png"))
    assert names == ["0-2.png", "0.png", *(f"{n}.png" for n in range(1, 6)), "old/0.png"]
    with Image.open("drawn/old/0.png") as drawn:
        pixels = np.asarray(drawn)
    # 30 x 20 becomes 20 x 30 upright, enlarged 8 times without new colours: the right half is red
    assert pixels.shape[1] == 240
    assert {tuple(colour) for colour in pixels[:160].reshape(-1, 3)} == {(255, 0, 0), (0, 0, 0)}
    assert (pixels[:160, 120:] == (255, 0, 0)).all()
    assert (pixels[160:] == 255).mean() > 0.5, "the caption is below"


def test_long_names_are_wrapped_in_drawings(root, tmp_path):
    heights = []
    for name in ("cat", "a cat " * 20, "c" * 120):
        path = save_tiny(tmp_path / "long.safetensors", (name, f"{name}2"))
        words = ["predict", path, "photos/0.png", "--save-images", "drawn", "--overwrite"]
        assert cli.run([*words, "--top-k", "1"]) == 0
        with Image.open("drawn/0.png") as drawn:
            assert drawn.width == 240
            heights.append(drawn.height)
            # the margins are free of ink
            assert np.asarray(drawn)[230:, -8:].min() == 255
    assert heights[0] < min(heights[1:])


def test_drawings_replace_nothing(root, checkpoint, capsys, monkeypatch):
    words = ["predict", checkpoint, "photos", "--save-images"]

    def refused(*more: str) -> str:
        before = {path: path.read_bytes() for path in root.rglob("*.png")}
        capsys.readouterr()
        assert cli.run([*words, *more]) == 2
        assert {path: path.read_bytes() for path in root.rglob("*.png")} == before
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        return err

    assert "photos/0.png: this file exists; choose another place, or" in refused("photos")
    assert "one of the inputs, which are never replaced" in refused("photos", "--overwrite")
    assert cli.run([*words, "drawn"]) == 0
    assert "drawn/0.png: this file exists" in refused("drawn")
    Path("drawn/0.png").write_bytes(b"mine")
    assert cli.run([*words, "drawn", "--overwrite"]) == 0
    assert Path("drawn/0.png").read_bytes() != b"mine"
    Path("drawn/3.png").unlink()
    Path("drawn/3.png").hardlink_to("photos/3.png")
    assert "drawn/3.png: this file is one of the inputs" in refused("drawn", "--overwrite")
    words[2] = "-"
    for folder, code in ((".", 2), ("drawn", 0)):
        with stdin_of(b"photos/1.png\nphotos/2.png\n", monkeypatch):
            assert cli.run([*words, folder, "--overwrite"]) == code
    assert "photos/1.png: this file is one of the inputs" in capsys.readouterr().err


def test_files_are_complete_though_the_reader_of_the_lines_has_left(root, checkpoint, tmp_path):
    words = ["predict", checkpoint, "photos", "--batch-size", "1", "--save-images"]
    for number, more in enumerate(([], ["--json"], ["--csv", "rows.csv", "--json"])):

        def leave() -> None:
            reading, writing = os.pipe()
            os.close(reading)
            os.dup2(writing, 1)

        with forked([*words, f"drawn-{number}", *more], tmp_path, before=leave) as child:
            assert child.wait() == 0
        assert "wrote 6 images to drawn" in child.stderr
        assert len(list(Path(f"drawn-{number}").iterdir())) == 6
