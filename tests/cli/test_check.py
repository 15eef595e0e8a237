"""`vitkit check DATA`: what it prints and writes, and how it ends."""

import json
from pathlib import Path

import numpy as np
import pytest
from bad_images import photo

from vitkit import check, cli


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for name in ("cat", "dog"):
            place = tmp_path / "pets" / split / name
            place.mkdir(parents=True)
            for number in range(count):
                photo(draw).save(place / f"{number}.png")
    return tmp_path / "pets"


def test_clean_images_end_well(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", str(root)]) == 0
    out, err = capsys.readouterr()
    assert "no problems found" in out
    assert "18 images checked" in out
    assert err == ""
    assert cli.run(["check", str(root)]) == 0
    assert "18 of them unchanged" in capsys.readouterr().out


def test_a_bad_image_ends_with_2_and_is_named_whole(root, capsys):
    name = "[bold]" + "long-" * 40 + ".png"
    (root / "val" / "cat" / name).write_bytes(b"words")
    assert cli.run(["check", str(root)]) == 2
    out, err = capsys.readouterr()
    assert f"val/cat/{name}: not an image: " in out
    assert err.count("\n") == 1
    assert "1 of 19 images cannot be decoded" in err
    assert "--bad-images skip" in err


def test_a_leak_is_a_warning_and_strict_makes_it_an_error(root, capsys):
    (root / "val" / "dog" / "copy.png").write_bytes((root / "train/dog/2.png").read_bytes())
    assert cli.run(["check", str(root)]) == 0
    assert "val/dog/copy.png = train/dog/2.png" in capsys.readouterr().out
    assert cli.run(["check", str(root), "--strict"]) == 2
    assert "1 warning;" in capsys.readouterr().err


def test_json_on_the_terminal_and_in_a_file_agree(root, tmp_path, capsys):
    for number in range(15):
        (root / "train" / "cat" / f"bad-{number:02}.png").write_bytes(b"%d" % number)
    assert cli.run(["check", str(root), "--json", "--output", str(tmp_path / "r" / "a.json")]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads((tmp_path / "r" / "a.json").read_text())
    assert [problem["name"] for problem in report["problems"]] == [
        f"train/cat/bad-{number:02}.png" for number in range(15)
    ]
    assert report["refused"] is True
    again = json.loads(json.dumps(check(root).as_dict()))
    assert {**again, "recalled": 0} == {**report, "recalled": 0}
    assert report["images"] == {"train": {"cat": 21, "dog": 6}, "val": {"cat": 3, "dog": 3}}
    assert cli.run(["check", str(root)]) == 2
    out = capsys.readouterr().out
    assert out.count("bad-") == 10
    assert "more; --output FILE lists all" in out
