"""`vitkit explain`: where images come from, how their files are named."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from local_server import listening
from PIL import Image
from tiny_checkpoint import save_tiny

from vitkit import cli

CAT = "\N{CAT}"
CLASSES = tuple(f"class {number}" for number in range(10))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model") / "m.safetensors", CLASSES)


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    """A working folder with images of the same names in two folders."""
    generator = np.random.default_rng(0)
    for place in ("cats/1.png", "cats/2.png", "dogs/1.png"):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / place)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder: str = "explanations") -> set[str]:
    return {str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file()}


@pytest.mark.allow_hosts(["127.0.0.1"])
def test_addresses_lists_and_datasets_as_predict_takes_them(root, checkpoint, capsys):
    content = Path("cats/1.png").read_bytes()

    def answer(request) -> None:
        if "gone" in request.path:
            request.send_error(404)
            return
        request.send_response(200)
        request.send_header("Content-Type", "image/png")
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)

    with listening(answer) as server:
        words = ["explain", checkpoint, f"{server}/web.png", f"{server}/gone.png", "cats/2.png"]
        assert cli.run(words) == 2
    out, err = capsys.readouterr()
    assert "gone.png: missing: the server answered 404 Not Found" in err
    assert "web.png: class " in out
    names = {Path(name).name for name in written()}
    assert names == {"web.png", "2.png"}
    rows = [f"{place},{place[:3]},{split}" for place, split in (
        ("cats/1.png", "train"), ("dogs/1.png", "train"), ("cats/2.png", "test"),
    )]  # fmt: skip
    Path("list.csv").write_text("\n".join(["path,label,split", *rows]))
    assert cli.run(["explain", checkpoint, "list.csv", "--output", "all"]) == 0
    assert written("all") == {"cats/1.png", "cats/2.png", "dogs/1.png"}
    words = ["explain", checkpoint, "list.csv", "--split", "test", "--output", "test"]
    assert cli.run(words) == 0
    assert written("test") == {"cats/2.png"}
    capsys.readouterr()
    assert cli.run([*words, "--split", "tests"]) == 2
    assert "--split tests: " in capsys.readouterr().err


def test_paths_on_the_standard_input(root, checkpoint, monkeypatch, capsys):
    with Path("names.txt").open("w+") as names:
        names.write("cats/1.png\ndogs/1.png\nno.png\ncats/1.png\n")
        for more in ([], ["--overwrite"]):
            names.seek(0)
            monkeypatch.setattr("sys.stdin", names)
            assert cli.run(["explain", checkpoint, "-", *more]) == 2
            assert "no.png: missing: no such file" in capsys.readouterr().err
    assert written() == {"cats/1.png", "dogs/1.png", "cats/1-2.png"}


def test_images_of_the_same_name_keep_their_folders(root, checkpoint):
    assert cli.run(["explain", checkpoint, "cats/1.png", "dogs/1.png"]) == 0
    assert written() == {"cats/1.png", "dogs/1.png"}
    words = ["cats/1.png", "dogs/1.png", "--method", "all", "--sheet", "--output", "all"]
    assert cli.run(["explain", checkpoint, *words, "--option", "steps=2"]) == 0
    assert {"cats/1/image.png", "dogs/1/image.png", "heads/dogs/1.png"} <= written("all")


@pytest.mark.parametrize("name", ["\u732b" * 80, f"a{CAT * 60}"], ids=["Chinese", "emoji"])
def test_a_long_name_is_cut_between_its_characters(root, checkpoint, name):
    os.rename("cats/1.png", f"{name}.png")
    words = [checkpoint, f"{name}.png"]
    assert cli.run(["explain", *words, "--method", "attention", "--sheet"]) == 0
    assert cli.run(["predict", *words, "--save-images", "drawn"]) == 0
    whole = {"\u732b": 66, CAT: 49}[name[-1]]  # of 3 and of 4 bytes in 200
    stem = name[: whole + name.count("a")]
    assert written() == {f"{stem}.png", f"heads/{stem}.png"}
    assert written("drawn") == {f"{stem}.png"}


@pytest.mark.parametrize("name", ["x.png", "X.SVG"])
def test_one_explanation_is_written_to_the_file_that_is_named(root, checkpoint, name, capsys):
    words = ["explain", checkpoint, "cats/1.png", "--output", name, "--method", "rollout"]
    assert cli.run(words) == 0
    assert f"1 explanation in {name}" in capsys.readouterr().out
    starts = {"x.png": b"\x89PNG", "X.SVG": b"<?xml"}
    assert Path(name).read_bytes().startswith(starts[name])
    assert cli.run(words) == 2
    assert f"--output {name}: this file exists; choose another" in capsys.readouterr().err
    assert cli.run([*words, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cats"], "--output x.png is one file, and more than one image needs several"),
        (["cats/1.png", "--method", "all"], "is one file, and --method all needs several"),
        (["cats/1.png", "--sheet"], "is one file, and --sheet needs several"),
        (["cats/1.png", "--faithfulness"], "is one file, and --faithfulness needs several"),
        (["cats/1.png", "--format", "svg"], "--output x.png does not end in .svg"),
        (["cats/1.png", "--output", "x.jpg"], "expected a folder, or one file that ends in .png"),
        (["cats/1.png", "--animate"], "no flag --animate; explain one layer by --layer, or draw"),
        (["cats/1.png", "--option", "query=99", "--method", "attention", "--output", "f"],
         "--option query=99: must be a whole number from 0 to 3"),
        (["cats/1.png", "--model", "--sheet"], "--sheet has no effect with --model"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_is_one_line(root, checkpoint, capsys, words, message):
    assert cli.run(["explain", checkpoint, "--output", "x.png", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(message, err)
    assert not Path("x.png").exists()
    assert not Path("f").exists()
