"""The commands as a person types them: what they print, what they leave, how they end."""

import csv
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from processes import forked, wait_until
from ruamel.yaml import YAML

import vitkit
from vitkit import cli, open_dataset

TRAIN = ["--recipe", "digits", "--epochs", "2", "--warmup-epochs", "1", "--amp", "off", "--quiet",
         "--spec.depth", "1", "--spec.width=32", "--device", "cpu", "--no-plots",
         "--no-report"]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A trained run, and three test images beside it."""
    root = tmp_path_factory.mktemp("cli") / "run"
    assert cli.run(["train", "digits", "--output", str(root), *TRAIN]) == 0
    test = open_dataset("digits").splits["test"]
    for number in range(3):
        Image.fromarray(test.read(number)[..., 0]).save(root / f"image-{number}.png")
    return root


@pytest.fixture(scope="module")
def best(run) -> str:
    return str(run / "weights" / "best.safetensors")


def test_eval_prints_the_metrics_plainly_and_as_json(best, capsys):
    assert cli.run(["eval", best, "digits"]) == 0
    plain = capsys.readouterr().out
    assert cli.run(["eval", best, "digits", "--json", "--split", "test"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert {"top1", "top5", "loss", "images"} <= set(metrics)
    assert f"{metrics['top1']:.4f}" in plain
    assert (metrics["images"], metrics["split"]) == (359, "test")
    assert re.search(r"^images +359 +test split$", plain, flags=re.MULTILINE)
    assert cli.run(["eval", best, "digits", "--split", "val"]) == 0
    assert re.search(r"^images +\d+ +val split$", capsys.readouterr().out, flags=re.MULTILINE)


def test_predict_plain_json_and_csv_agree(run, best, tmp_path, capsys):
    images = [str(run / f"image-{n}.png") for n in (2, 0)]
    assert cli.run(["predict", best, *images, "--top-k", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines] == images
    assert cli.run(["predict", best, *images, "--top-k", "3", "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert [entry["image"] for entry in parsed] == images
    assert len(parsed[0]["top"]) == 3
    assert lines[0].startswith(f"{images[0]}: {parsed[0]['label']} {parsed[0]['probability']:.3f}")
    table = tmp_path / "out.csv"
    assert cli.run(["predict", best, *images, "--top-k", "3", "--csv", str(table)]) == 0
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["rank"] for row in rows] == ["1", "2", "3"] * 2
    assert rows[3]["label"] == parsed[1]["label"]


def test_broken_images_are_named_and_the_others_predicted(run, best, tmp_path, capsys):
    for number in range(3):
        shutil.copy(run / f"image-{number}.png", tmp_path)
    (tmp_path / "image-1b.png").write_bytes(b"words")
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "gone.jpg").symlink_to("nowhere.jpg")
    (tmp_path / "camera.heic").touch()
    good = [str(tmp_path / f"image-{number}.png") for number in range(3)]
    assert cli.run(["predict", best, str(tmp_path), "--batch-size", "2"]) == 2
    out, err = capsys.readouterr()
    assert [line.split(": ")[0] for line in out.splitlines()] == good
    assert [
        part in err
        for part in (
            "gone.jpg: missing", "pipe.jpg: not a file", "b.png: not a", "1 .heic",
            "3 of 6 images could not be used",
        )
    ] == [True] * 5  # fmt: skip
    table, features = tmp_path / "rows.csv", tmp_path / "f.npz"
    command = ["predict", best, str(tmp_path), "--json", "--csv", str(table), "--top-k", "1"]
    assert cli.run(command) == 2
    assert [row["image"] for row in json.loads(capsys.readouterr().out)] == good
    assert [line.split(",")[0] for line in table.read_text().splitlines()] == ["image", *good]
    assert cli.run(["embed", best, str(tmp_path), "--out", str(features)]) == 2
    stored = np.load(features)
    assert (stored["features"].shape, stored["images"].tolist()) == ((3, 32), good)
    before = table.read_text()
    assert cli.run([*command, "--strict", "--overwrite"]) == 2
    assert "gone.jpg: missing" in capsys.readouterr().err
    assert table.read_text() == before
    assert (
        cli.run(["embed", best, str(tmp_path), "--out", str(tmp_path / "s.npz"), "--strict"]) == 2
    )
    assert not (tmp_path / "s.npz").exists()
    broken = [str(tmp_path / name) for name in ("image-1b.png", "pipe.jpg")]
    features_before = features.read_bytes()
    for words in (["predict", "--json", "--csv", str(table)], ["embed", "--out", str(features)]):
        capsys.readouterr()
        assert cli.run([words[0], best, *broken, *words[1:], "--overwrite"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.splitlines()[-1]) == (
            "", "vitkit: none of the images could be used; the reasons are above")  # fmt: skip
    assert (table.read_text(), features.read_bytes()) == (before, features_before)


def test_summary_and_models(best, capsys):
    assert cli.run(["summary", "vit_base_patch16_224", "--depth", "1"]) == 0
    text = capsys.readouterr().out
    assert "86,567,656" in text
    assert "17,563.83 M" in text
    assert cli.run(["summary", best]) == 0
    assert "1 x 10 " in capsys.readouterr().out
    assert cli.run(["models", "vit_base_patch16_?84"]) == 0
    assert capsys.readouterr().out.split() == [
        "vit_base_patch16_384", "86.86", "M", "384x384", "ViT",
    ]  # fmt: skip


def test_published_weights_are_listed_by_their_licence(capsys):
    def licences(*arguments: str) -> set[str]:
        assert cli.run(["models", "--pretrained", "--licence", *arguments]) == 0
        found = set(re.findall(r"(\S+) +(?:timm|Google|DeiT)\b", capsys.readouterr().out))
        return found & {"apache-2.0", "mit", "cc-by-nc-4.0", "dinov3-license"}

    assert licences("permissive", "vit_*") == {"apache-2.0", "mit"}
    assert licences("non-commercial", "vit_*") == {"cc-by-nc-4.0"}
    assert licences("dinov3-license") == {"dinov3-license"}


def test_help_and_version(capsys):
    assert cli.run([]) == 0
    assert "train a ViT on your images" in capsys.readouterr().out
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == f"vitkit {vitkit.__version__}\n"


def test_yaml_sits_between_a_recipe_and_the_flags(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "recipe: digits\nepochs: 1\nwarmup_epochs: 0.5\nlr: 3e-3\nbatch_size: 64\n"
        "amp: 'off'\nquiet: true\nplots: false\nreport: false\nspec: {width: 32, depth: 1}\n"
    )
    output = tmp_path / "run"
    arguments = [
        "train", "digits", "--recipe", str(recipe), "--lr", "4e-3", "--output", str(output),
    ]  # fmt: skip
    assert cli.run([*arguments, "--spec.patch-size", "2"]) == 0
    stored = YAML(typ="safe").load(output / "config.yaml")
    assert (stored["lr"], stored["batch_size"]) == (4e-3, 64)
    spec = stored["spec"]
    assert (spec["patch_size"], spec["width"], spec["num_heads"]) == (2, 32, 4)
    assert (stored["shift"], stored["flip"]) == (1, 0.0)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_and_sigterm_save_and_say_how_to_go_on(tmp_path, signum, code):
    output = tmp_path / "run"
    endless = [flag if flag != "2" else "500" for flag in TRAIN]
    with forked(["train", "digits", "--output", str(output), *endless], tmp_path) as child:
        wait_until(lambda: child.poll() is not None or list(output.glob("state/step-*")))
        child.send_signal(signum)
        assert child.wait() == code
    message = child.stderr
    assert message.startswith("vitkit: stopped at step ")
    assert f"vitkit train --resume {output}" in message
    assert "Traceback" not in message
    assert vitkit.load(output / "weights" / "last.safetensors").model.spec.depth == 1
    assert not list(output.glob("state/.tmp*"))


def test_a_reader_that_leaves_early_is_no_error():
    child = subprocess.Popen(
        [sys.executable, "-m", "vitkit", "models"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr is not None
    with child.stderr:
        assert child.stderr.read() == ""
    assert child.wait() == 0


def test_a_full_disk_ends_a_run_and_leaves_what_was_saved(tmp_path):
    """A fork that may write 20 kB a file: the kernel refuses in the middle of a checkpoint."""
    output = tmp_path / "run"
    assert cli.run(["train", "digits", "--output", str(output), *TRAIN]) == 0
    before = {path: path.read_bytes() for path in output.rglob("*") if path.suffix != ".log"
              and path.is_file() and "tensorboard" not in path.parts}  # fmt: skip

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    words = ["train", "--resume", str(output), "--epochs", "9"]
    with forked(words, tmp_path, before=limit) as child:
        assert child.wait() == 2, child.stderr
    message = child.stderr
    assert "the file would be larger than the limit allows" in message
    assert message.count("\n") == 1
    for path, content in before.items():
        if path.name not in ("config.yaml", "metrics.csv", "metrics.jsonl"):
            assert path.read_bytes() == content, path
    assert not [path for path in output.rglob("*") if "tmp" in path.name]
    assert cli.run(["train", "--resume", str(output), "--epochs", "3"]) == 0


def test_flags_win_over_what_a_recipe_has_in_its_spec(tmp_path):
    words = ["train", "digits", "--recipe", "digits", "--img-size", "16", "--drop-path", "0.2"]
    words += ["--spec.depth", "1", "--max-steps", "1", "--amp", "off", "--quiet", "--no-report"]
    assert cli.run([*words, "--output", str(tmp_path / "run")]) == 0
    spec = vitkit.load(tmp_path / "run" / "weights" / "last.safetensors").model.spec
    assert (spec.image_size, spec.drop_path, spec.width) == ((16, 16), 0.2, 64)
    assert cli.run([*words, "--spec.image-size", "8", "--output", str(tmp_path / "no")]) == 2


def test_the_usual_short_flags_mean_the_long_ones(tmp_path):
    words = ["train", "digits", "-c", "digits", "-b", "64", "--wd", "0.2", "--smoothing", "0.0"]
    words += ["-j", "0", "--spec.depth", "1", "--amp", "off", "--quiet", "--no-report"]
    run = tmp_path / "run"
    assert cli.run([*words, "--max-steps", "1", "--output-dir", str(run)]) == 0
    kept = YAML(typ="safe").load(run / "config.yaml")
    names = ("recipe", "epochs", "batch_size", "weight_decay", "label_smoothing", "workers")
    assert [kept[name] for name in names] == ["digits", 160, 64, 0.2, 0.0, 0]
    on = ["train", "digits", "--resume", "auto", "--output-dir", str(run), "--max-steps", "2"]
    assert cli.run(on) == 0
    assert "resuming from step 1" in (run / "train.log").read_text()
