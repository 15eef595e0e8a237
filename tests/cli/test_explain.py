"""`vitkit explain`: files of one method and of all, the page, and options that do not fit."""

import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
import torch
from own_methods import METHODS
from PIL import Image
from reporting.test_report import page
from tiny_checkpoint import save_noisy

import vitkit
from vitkit import cli

CLASSES = ("tabby cat", "<script>alert(1)</script>", "dog")
EVIL = '"><script>alert(2)</script> & #1 50%.png'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    return save_noisy(tmp_path_factory.mktemp("model") / "m.safetensors", CLASSES, std=0.6)


@pytest.fixture
def photos(tmp_path, monkeypatch) -> Path:
    """A working folder with images, one of them with a name that is HTML."""
    generator = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for name in ("cat.png", EVIL.replace("/", "∕")):  # noqa: RUF001 - a slash cannot be in a name
        pixels = generator.integers(0, 256, (20, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "photos"


def test_all_methods_make_a_folder_of_each_image_that_opens_and_one_page(
    photos, checkpoint, capsys
):
    (photos / "broken.png").write_bytes(b"words")
    words = ["explain", checkpoint, "photos", "--method", "all", "--class", CLASSES[1]]
    words += ["--option", "steps=2"]
    assert cli.run(words) == 2
    out, err = capsys.readouterr()
    assert "broken.png: not an image" in err
    *lines, last = out.splitlines()
    assert len(lines) == 2
    assert last == "2 images in explanations/index.html"
    refused = set(re.findall(r"^vitkit: (\S+) is left out: ", err, re.MULTILINE))
    drawn = set(METHODS) - refused
    assert "attention" in drawn
    found = page(Path("explanations/index.html"))
    assert not found.all("script")
    assert len(found.all("img")) == 2 * (len(drawn) + 1)
    assert all(image["alt"] for image in found.all("img"))
    links = {a[name] or "" for _, a in found.tags for name in ("src", "href") if name in a}
    for link in links - {"data:,", "#content"}:
        assert not re.match(r"\w+:|//", link), "nothing comes from elsewhere"
        assert Path("explanations", unquote(link)).is_file()
    text = Path("explanations/index.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;: " in text
    assert "prefers-color-scheme: dark" in text
    assert "broken" not in text
    for score in ("deletion", "insertion", "p"):
        assert f"<dt>{score}</dt>" in text
    names = {path.stem for path in Path("explanations/cat").iterdir()}
    assert names == drawn | {"image", "all"}
    words[2] = "photos/cat.png"
    assert cli.run(words) == 2, "the files exist"
    assert cli.run([*words, "--overwrite"]) == 0


def test_vector_files_and_sheets(photos, checkpoint):
    words = ["explain", checkpoint, "photos/cat.png", "--format", "svg", "--sheet"]
    for more in ([], ["--method", "all", "--output", "all"]):
        assert cli.run([*words, *more]) == 0
    for name in ("explanations/cat", "explanations/heads/cat", "all/cat/all", "all/heads/cat"):
        assert "<svg" in Path(f"{name}.svg").read_text(encoding="utf-8")
    assert "head 3" in Path("all/heads/cat.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--class", "tabby catt"], "--class-name tabby catt: .*mean 'tabby cat'"),
     (["--class", "3"], "--class-name 3: is not a class of this model"),
     (["--option", "steps"], "--option steps: expected NAME=VALUE"),
     (["--model", "--layer", "0"], "--layer has no effect with --model"),
     (["--model", "--head", "0"], "--head has no effect with --model"),
     (["--option", "colour=2"], "--option colour=2: [a-z]+ has no such option; its options: "),
     (["--method", "all", "--option", "colour=2"], "--option colour=2: no method has this"),
     (["--method", "atention"], "must be one of .*did you mean 'attention'")],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_what_does(photos, checkpoint, capsys, words, message):
    assert cli.run(["explain", checkpoint, "photos", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(message, err)
    assert not Path("explanations").exists()


@pytest.mark.usefixtures("wrong_types_come_in")
@pytest.mark.parametrize("value", ["abc", "1.5"])
def test_a_patch_that_is_no_number_is_named_with_its_flag(photos, checkpoint, capsys, value):
    assert cli.run(["explain", checkpoint, "photos", "--option", f"query={value}"]) == 2
    assert (
        f"vitkit: --option query={value}: must be a whole number from 0 to 5\n"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("option", ["layer", "head"])
def test_an_option_of_other_methods_is_refused_with_their_names(option, capsys):
    without = [method.name for method in METHODS.values() if option not in method.options]
    having = [method.name for method in METHODS.values() if option in method.options]
    for name in without:
        words = ["explain", "no.safetensors", "no.png", "--method", name, f"--{option}", "0"]
        assert cli.run(words) == 2
        expected = f"--{option} 0: {name} has no such option; methods with it: {', '.join(having)}"
        assert expected in capsys.readouterr().err


def test_a_model_without_a_head_has_maps_without_a_class(photos, tmp_path, capsys):
    path = save_noisy(tmp_path / "headless.safetensors", CLASSES, std=0.6, num_classes=0)
    assert cli.run(["explain", path, "photos/cat.png", "--method", "all"]) == 0
    names = {file.stem for file in Path("explanations/cat").iterdir()}
    assert not names & {method.name for method in METHODS.values() if method.by_class}
    assert "attention" in names
    capsys.readouterr()
    for method in METHODS.values():
        if method.by_class:
            words = ["explain", path, "photos/cat.png", "--method", method.name]
            assert cli.run([*words, "--output", "one"]) == 2
            message = capsys.readouterr().err
            assert f"{method.name} explains a class, and this model has no head" in message
    assert cli.run(["explain", path, "photos/cat.png", "--class", "cat"]) == 2
    assert "this model has no head, so it has no classes" in capsys.readouterr().err


def test_the_class_that_is_asked_for_is_explained(photos, checkpoint):
    loaded = vitkit.load(checkpoint)
    pixels = np.asarray(Image.open(photos / "cat.png"))
    (prediction,) = vitkit.Predictor.from_checkpoint(loaded)([pixels])
    shares = dict(prediction.top)
    for number, name in enumerate(CLASSES):
        for wanted in (name, number, str(number)):
            made = vitkit.explain(loaded, pixels, class_name=wanted)
            assert (made.class_number, made.label) == (number, name)
            assert made.probability == pytest.approx(shares[name], abs=1e-6)
            assert made.predicted == prediction.label
    with pytest.raises(vitkit.SettingError, match="class_name = -1: is not a class"):
        vitkit.explain(loaded, pixels, class_name=-1)


@pytest.mark.usefixtures("wrong_types_come_in")
def test_numbers_of_numpy_are_numbers_and_other_types_are_named(checkpoint):
    loaded, pixels = vitkit.load(checkpoint), np.zeros((20, 30, 3), np.uint8)
    made = vitkit.explain(loaded, pixels, class_name=np.array([0, 1]).argmax(), layer=np.int64(-1))
    assert (made.label, made.options["layer"]) == (CLASSES[1], 1)
    for wrong in (1.0, True, [1]):
        with pytest.raises(vitkit.SettingError, match=r"class_name = .*: is not a class"):
            vitkit.explain(loaded, pixels, class_name=wrong)
    for wrong in (3, ["attention", "rollout"]):
        with pytest.raises(vitkit.SettingError, match=r"method .* does not exist.*; methods are"):
            vitkit.explain(loaded, pixels, method=wrong)


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.by_class])
def test_the_map_of_a_class_is_that_of_the_method_for_it(name, photos, checkpoint):
    loaded = vitkit.load(checkpoint)
    pixels = np.asarray(Image.open(photos / "cat.png"))
    images = loaded.preprocess(pixels)[None]
    for number in range(3):
        made = vitkit.explain(loaded, pixels, method=name, class_name=number)
        expected = METHODS[name].compute(loaded.model, images, classes=torch.tensor([number]))
        np.testing.assert_allclose(made.grid, expected[0].detach().numpy(), atol=1e-6)


@pytest.mark.parametrize("words", [["--help"], ["no.safetensors", "no.png", "--method", "none"]])
def test_help_and_wrong_methods_import_no_torch(words):
    code = (
        "import sys; from vitkit import cli; cli.run(sys.argv[1:]); "
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "explain", *words], capture_output=True, text=True, check=True
    )
    assert done.stderr.endswith("False\n")
