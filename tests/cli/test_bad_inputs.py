"""Everything a person can get wrong: exit code 2, one line, what to do, and nothing lost."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_checkpoint import save_tiny

import vitkit
from vitkit import cli
from vitkit.errors import SettingError

FAST = ["--spec.image-size", "16", "--spec.patch-size", "8", "--spec.width", "32",
        "--spec.depth", "1", "--spec.num-heads", "2", "--spec.mlp-width", "32", "--epochs", "1",
        "--warmup-epochs", "0", "--batch-size", "4", "--amp", "off", "--workers", "0",
        "--no-report", "--no-plots"]  # fmt: skip


def folder(root: Path, *places: str, per_place: int = 6) -> Path:
    """Images of noise in `root/<place>/`."""
    generator = np.random.default_rng(0)
    for place in places:
        (root / place).mkdir(parents=True)
        for number in range(per_place):
            noise = generator.integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / place / f"{number}.png")
    return root


@pytest.fixture
def complaint(capsys, tmp_path, monkeypatch):
    """Run a command that must be refused; give its one line."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 2) -> str:
        assert cli.run([*arguments]) == code
        message = capsys.readouterr().err
        assert message.startswith("vitkit: ")
        assert message.count("\n") == 1
        assert "Traceback" not in message
        assert not Path("runs").exists(), "a refused command leaves nothing behind"
        return message

    return run


def test_no_such_folder_names_the_nearest_and_what_is_in_it(complaint, tmp_path):
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    message = complaint("train", str(tmp_path / "photos" / "cat" / "old"))
    assert f"nearest folder that exists is {tmp_path / 'photos'}, with: cats/" in message


def test_a_folder_without_images_counts_what_it_has(complaint, tmp_path):
    (tmp_path / "d").mkdir()
    for name in ("a.heic", "b.heic", "notes.txt"):
        (tmp_path / "d" / name).write_text("x")
    message = complaint("train", str(tmp_path / "d"))
    assert "2 .heic" in message
    assert "1 .txt" in message


def test_one_class_only(complaint, tmp_path):
    assert "only one class" in complaint("train", str(folder(tmp_path / "d", "train/cat")), *FAST)


def test_images_without_class_folders_show_the_expected_tree(complaint, tmp_path):
    message = complaint("train", str(folder(tmp_path / "d", ".")), *FAST)
    assert "train/<class>/*.jpg" in message


def test_an_empty_class_is_warned_of_and_keeps_its_index(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    root = folder(tmp_path / "d", "train/ant", "train/cat")
    (root / "train" / "bee").mkdir()
    assert cli.run(["train", str(root), "--output", "run", *FAST]) == 0
    assert "bee" in capsys.readouterr().out
    assert vitkit.load("run/weights/last.safetensors").classes == ("ant", "bee", "cat")


def test_a_val_class_unknown_to_train(complaint, tmp_path):
    root = folder(tmp_path / "d", "train/ant", "train/cat", "val/ant", "val/dog")
    message = complaint("train", str(root), *FAST)
    assert "dog" in message
    assert "--ignore-extra-classes" in message


def test_an_undecodable_image_is_named_before_the_first_step(complaint, tmp_path, capsys):
    root = folder(tmp_path / "d", "train/ant", "train/cat")
    broken = root / "train" / "cat" / "3.png"
    broken.write_bytes(broken.read_bytes()[:300])
    message = complaint("train", str(root), *FAST)
    assert "train/cat/3.png: truncated" in message
    assert "--bad-images skip" in message
    arguments = ["train", str(root), *FAST, "--bad-images", "skip", "--output", "run"]
    assert cli.run(arguments) == 0
    assert "skipped 1 image of train" in capsys.readouterr().out
    stored = vitkit.load("run/weights/last.safetensors").metadata["data"]["images"]
    assert stored["train"] + stored["val"] == 11


def test_unknown_words_name_the_nearest(complaint, capsys, tmp_path):
    assert "no verb 'trian' (did you mean 'train'" in complaint("trian", "digits")
    assert "did you mean 'vit_tiny_patch16_224'" in complaint(
        "train", "digits", "--model", "vit_tiny_patch16_24"
    )
    assert "did you mean 'digits'" in complaint("train", "digit")
    assert "no recipe 'digit' (did you mean 'digits'" in complaint(
        "train", "digits", "--recipe", "digit"
    )
    assert "no field 'widht' (did you mean 'width'" in complaint(
        "train", "digits", "--spec.widht", "3"
    )
    recipe = tmp_path / "r.yaml"
    recipe.write_text("lr: 1e-3\nepoch: 3\n")
    assert "r.yaml:2: there is no setting 'epoch' (did you mean 'epochs'" in complaint(
        "train", "digits", "--recipe", str(recipe)
    )


def test_an_unknown_flag_is_answered_with_the_nearest(complaint):
    message = complaint("train", "digits", "--weight-dekay", "1")
    assert "no flag --weight-dekay (did you mean '--weight-decay'?)" in message


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--model", "vit_tiny_patch16_224", "--img-size", "250"],
            "250 (H) is not divisible by patch_size 16; the nearest sizes",
        ),
        (
            ["--model", "vit_tiny_patch16_224", "--spec.width", "500"],
            "width 500 is not divisible by num_heads 3",
        ),
        (["--lr", "-1"], "vitkit: --lr -1.0: must be above 0\n"),
        (["--epochs", "0"], "vitkit: --epochs 0: must be 1 or more\n"),
        (["--smoothing", "2"], "--label-smoothing 2.0: must be from 0 to below 1"),
        (["--progressive", "0", "8"], "--progressive 0: must be 1 or more"),
        (["--spec.width", "-1"], "--spec.width -1: must be 1 or more"),
        (["--learning-rate", "0.1"], "no flag --learning-rate; vitkit calls it --lr"),
        (["--lr", "1", "--num_epochs=3"], "no flag --num_epochs; vitkit calls it --epochs"),
        (["--opt", "Adam-W"], "--opt 'adam-w' does not exist (did you mean 'adamw'"),
        (["--device", "cuda:7"], "--device cuda:7: this machine has no CUDA GPU; pass --dev"),
        (["--device", "gpu"], "--device 'gpu' is not the name of a device"),
        (["--resume", "nowhere"], "--resume nowhere: no such run folder"),
        (["--batch-size", "9999"], "do not fill one batch of 9999"),
        (["--spec.depth"], "--spec.depth needs a value"),
        (["--seed", str(2**70)], "must be below "),
    ],
)
def test_settings_that_cannot_be(complaint, flags, message):
    assert message in complaint("train", "digits", *flags)


def test_data_left_out_or_last(complaint):
    assert "DATA is missing; expected: vitkit train DATA" in complaint("train", "--epochs", "3")
    assert "nowhere: no such folder" in complaint("train", "--recipe=digits", "nowhere")
    assert "'b' is one argument too many" in complaint("train", "a", "--flip", "0", "b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "DATA is missing; expected: vitkit train DATA [flags]"),
        (["check"], "DATA is missing; expected: vitkit check DATA [flags]"),
        (["eval"], "CHECKPOINT and DATA are missing; expected: vitkit eval CHECKPOINT DATA"),
        (["eval", "run", "--json"], "DATA is missing; expected: vitkit eval CHECKPOINT DATA"),
        (["eval", "run", "--cache"], "DATA is missing; expected: vitkit eval CHECKPOINT DATA"),
        (["compare"], "CHECKPOINT and OTHER_CHECKPOINT are missing; expected: vitkit compare"),
        (["predict", "run"], "IMAGES is missing; expected: vitkit predict CHECKPOINT IMAGES"),
    ],
)
def test_a_verb_without_its_arguments_names_them(complaint, words, message):
    assert message in complaint(*words)


def test_a_flag_without_its_value_may_be_the_only_word(complaint):
    assert "DATA is missing; expected:" in complaint("train", "--cache", "--data-root=x")


def test_a_spec_that_is_none(complaint, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("spec: 3\n")
    message = complaint("train", "digits", "--recipe", str(recipe))
    assert "r.yaml:1: spec = 3: must be names with values, such as {width: 64}" in message


def test_numbers_and_names_of_other_commands(complaint, tmp_path):
    model = vitkit.create_model(
        "vit_tiny_patch16_224", depth=1, width=24, num_heads=2, image_size=16, num_classes=10
    )
    path = vitkit.save(
        tmp_path / "m.safetensors", model, preprocess=vitkit.Preprocess(image_size=16)
    )
    (tmp_path / "a.png").write_bytes(b"")
    image = str(tmp_path / "a.png")
    assert "a.png: empty" in complaint("predict", str(path), image)
    assert "no model's name matches 'swin*'" in complaint("models", "swin*")
    assert "no such file" in complaint("summary", "none.pth")
    assert "no model 'vit_bse_patch16_224'" in complaint("summary", "vit_bse_patch16_224")
    message = complaint_for_layer(complaint, path, tmp_path)
    assert "--layer 7: does not exist; layers are 0 to 0" in message


def complaint_for_layer(complaint, path: Path, root: Path) -> str:
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(root / "black.png")
    return complaint("explain", str(path), str(root / "black.png"), "--layer", "7")


def test_a_folder_that_is_no_run_is_left_as_it_is(complaint, tmp_path):
    mine = tmp_path / "run" / "mine.txt"
    mine.parent.mkdir()
    mine.write_text("precious")
    message = complaint("train", "digits", "--recipe", "digits", "--output", str(tmp_path / "run"))
    assert "is not a run of vitkit, so --overwrite does not rename it" in message
    assert mine.read_text() == "precious"


def test_an_output_that_cannot_be_made(complaint, tmp_path):
    (tmp_path / "file").write_text("x")
    message = complaint(
        "train", "digits", "--recipe", "digits", "--output", str(tmp_path / "file" / "run")
    )
    assert "cannot write" in message


@pytest.mark.parametrize("verb", ["predict", "explain", "embed"])
def test_images_and_checkpoints_that_are_not_there(complaint, tmp_path, verb):
    out = ["--out", "f.npz"] if verb == "embed" else []
    (tmp_path / "page.jpg").write_text("<html></html>")
    assert "no such file" in complaint(verb, "none.safetensors", "page.jpg", *out)
    model = vitkit.create_model(
        "vit_tiny_patch16_224", depth=1, width=24, num_heads=2, image_size=16, num_classes=2
    )
    preprocess = vitkit.Preprocess(image_size=16)
    vitkit.save(tmp_path / "m.safetensors", model, preprocess=preprocess, classes=("a", "b"))
    assert "no such image" in complaint(verb, "m.safetensors", "a.png", *out)
    message = complaint(verb, "m.safetensors", str(tmp_path / "page.jpg"), *out)
    assert "page.jpg: not an image" in message
    (tmp_path / "empty").mkdir()
    assert "no images in this folder" in complaint(verb, "m.safetensors", "empty", *out)


def test_a_link_to_no_file_is_a_missing_image(headed, complaint, capsys):
    Image.new("L", (8, 8)).save("a.png")
    Path("b.png").symlink_to("gone.png")
    message = complaint("predict", headed, "b.png")
    assert "b.png: no such image; this link leads to gone.png, which is gone" in message
    assert cli.run(["predict", headed, "b.png", "a.png"]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("a.png: ")
    assert err.startswith("vitkit: b.png: missing: no such file")


def test_eval_refuses_other_classes_and_splits(complaint, tmp_path):
    model = vitkit.create_model(
        "vit_tiny_patch16_224", depth=1, width=24, num_heads=2, image_size=16, num_classes=2
    )
    preprocess = vitkit.Preprocess(image_size=16)
    vitkit.save(tmp_path / "m.safetensors", model, preprocess=preprocess, classes=("ant", "bee"))
    lacks = "lacks: 0, 1, 2, 3, 4 and 5 more; it has ant, bee"
    assert lacks in complaint("eval", "m.safetensors", "digits")
    root = folder(tmp_path / "d", "train/ant", "train/bee")
    message = complaint("eval", "m.safetensors", str(root), "--split", "trian")
    assert "--split trian: d has no split of that name (did you mean 'train'?)" in message
    message = complaint("eval", "m.safetensors", str(root))
    expected = (
        "d has neither test nor val to evaluate on; name a split with --split (split=): train"
    )
    assert message == f"vitkit: {expected}\n"


def test_images_in_the_place_of_the_checkpoint(complaint, tmp_path):
    root = folder(tmp_path / "d", "ant", "bee")
    first = "the checkpoint comes first: vitkit"
    message = complaint("eval", str(root), "m.safetensors")
    assert f"{root} is an image folder; {first} eval CHECKPOINT DATA" in message
    image = next(root.glob("ant/*"))
    for verb in ("predict", "explain"):
        message = complaint(verb, str(image), "m.safetensors")
        assert f"{image} is an image; {first} {verb} CHECKPOINT IMAGES" in message
    assert f"{root} is not a run or checkpoint folder (no model.s" in complaint(
        "inspect", str(root)
    )


def test_a_checkpoint_with_example_images_is_no_image_folder(tmp_path, capsys):
    root = folder(tmp_path / "d", "examples")
    save_tiny(root / "model.safetensors", ("cat", "dog"))
    image = next(root.glob("examples/*"))
    assert cli.run(["predict", str(root), str(image)]) == 0
    assert str(image) in capsys.readouterr().out
    # a folder of folders of runs, which have figures
    sweep = folder(tmp_path / "sweep", "group/run")
    (sweep / "group" / "run" / "config.yaml").write_text("data: digits\n")
    assert cli.run(["predict", str(sweep), str(image)]) == 2
    assert "is not a run or checkpoint folder" in capsys.readouterr().err


def test_names_of_weights_are_suggested_and_no_files(complaint, tmp_path):
    message = complaint("inspect", "vit_tiny_patch16_22")
    assert "no published checkpoint has that name (did you mean 'vit_tiny_patch16_224" in message
    assert "nearest folder" not in message


def test_shards_that_the_shell_expanded_are_recognised(complaint):
    message = complaint("train", "wds:s-0.tar", "wds:s-1.tar", "wds:s-2.tar", "--epochs", "1")
    assert "expanded the name of the shards to 3 names; put it in quotes" in message


def test_pixel_statistics_of_0_to_255_are_refused(complaint):
    message = complaint("train", "digits", "--mean", "128", "128", "128")
    assert "--mean 128 128 128: expected values from 0 to 1; for pixels of 0 to 255 div" in message
    assert message.rstrip().endswith("divide by 255: 0.502 0.502 0.502")
    message = complaint("train", "digits", "--std", "0", "1", "1")
    assert "--std 0 1 1: expected values from above 0 to 1" in message


def test_files_that_are_not_there(complaint):
    assert "vitkit: bad.csv: no such file; the nearest" in complaint("train", "bad.csv")
    message = complaint("train", "digits", "--recipe", "nothere.yaml")
    assert "--recipe nothere.yaml: no such file" in message


def test_debug_shows_where_and_keeps_the_exit_code(tmp_path, capsys):
    words = ["eval", str(tmp_path / "none.safetensors"), "digits"]
    assert cli.run(words) == 2
    line = capsys.readouterr().err
    assert cli.run(["--debug", *words]) == 2
    message = capsys.readouterr().err
    assert message.startswith("Traceback (most recent call last)")
    assert message.endswith(line)


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (["predict", "CKPT", "photos"], "lower --batch-size, or pass --device cpu"),
        (["explain", "CKPT", "photos"], "pass --device cpu, or end other programs"),
    ],
)
def test_out_of_memory_is_no_fault_of_ours(words, mend, tmp_path, monkeypatch, capsys):
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee more")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for name in "ab":
        Image.new("L", (9, 9)).save(tmp_path / "photos" / f"{name}.png")
    checkpoint = save_tiny(tmp_path / "m.safetensors", ("cat", "dog"))
    monkeypatch.setattr("torch.nn.functional.layer_norm", full)
    assert cli.run([checkpoint if word == "CKPT" else word for word in words]) == 2
    message = capsys.readouterr().err
    memory = "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert message == f"vitkit: {memory}; {mend}\n"


@pytest.fixture(scope="module")
def headed(tmp_path_factory) -> str:
    """A checkpoint of ten classes, one of them with a name that would move a cursor."""
    classes = ("\x1b[2J", *"123456789")
    return save_tiny(tmp_path_factory.mktemp("headed") / "m.safetensors", classes)


@pytest.mark.parametrize(
    "words",
    [
        ["eval", "CHECKPOINT", "digits", "--predictions", "PLACE/x.csv"],
        ["eval", "CHECKPOINT", "digits", "--confusion", "PLACE/x.png"],
        ["predict", "CHECKPOINT", "IMAGE", "--csv", "PLACE/x.csv"],
        ["embed", "CHECKPOINT", "IMAGE", "--out", "PLACE/x.npz"],
        ["check", "digits", "--output", "PLACE/x.json"],
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_the_work(words, headed, tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    names = {"CHECKPOINT": headed, "IMAGE": str(tmp_path / "a.png")}
    words = [names.get(w, w).replace("PLACE", str(tmp_path / "file")) for w in words]
    assert cli.run(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"cannot write {tmp_path}/file/x" in captured.err
    assert "choose another place" in captured.err


def test_names_that_would_move_a_cursor_are_printed_escaped(headed, tmp_path, capsys):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    assert cli.run(["predict", headed, str(tmp_path / "a.png"), "--top-k", "10"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b[2J 0." in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["eval", "CHECKPOINT", "digits", "--workers", "-1"], ": --workers -1: must be 0 or more"),
        (["eval", "CHECKPOINT", "digits", "--batch-size", "0"], ": --batch-size 0: must be 1 or"),
        (["compare", "CHECKPOINT", "COPY", "--data", "digits", "--batch-size", "0"],
         ": --batch-size 0: must be 1 or more"),
        (["predict", "CHECKPOINT", "IMAGES", "--batch-size", "-3"], ": --batch-size -3: must"),
        (["predict", "CHECKPOINT", "IMAGES", "--top-k", "0"], ": --top-k 0: must be 1 or more"),
        (["embed", "CHECKPOINT", "IMAGES", "--out", "IMAGES/f.npz", "--batch-size", "0"],
         ": --batch-size 0: must be 1 or more"),
        (["check", "IMAGES", "--workers", "-1"], ": --workers -1: must be 0 or more"),
        (["train", "digits", "--spec.image-size", "[8,8,8]"], "--spec.image-size [8, 8, 8]: must"),
        (["predict", "CHECKPOINT", "x" * 300], "no such image"),
        (["predict", "CHECKPOINT", f"{'x' * 300}/a.jpg"], "no such image"),
        (["predict", "CHECKPOINT", "IMAGES/two\nlines/a.jpg"], r"/two\nlines, with: a\n.jpg"),
        (["summary", "y" * 300], "there is no model 'y"),
        (["summary", "vit_tiny_patch16_224", "--depth", "-1"], ": --depth -1: must be 0 or more"),
        (["summary", "vit_tiny_patch16_224", "--img-size", "0"], ": --img-size 0: must be 1 or"),
        (["inspect", "CHECKPOINT", "--spec.num-heads", "--json"], "--spec.num-heads needs a value"),
        (["check", "wds:IMAGES/{9..0}.tar"], "comes first: {0..9}"),
        (["train", "digits", "--recipe", "digits", "-cmnist", "--recipe=x"], "no recipe 'x'"),
        (["train", "digits", "-cnone"], "there is no recipe 'none'"),
        (["train", "nowhere", "--output_dir", "IMAGES/no", "--resume", "auto"], "nowhere: no"),
        (["train", "digits", "--recipe", "IMAGES/mine.yaml"], "mine.yaml:1: recipe = 5: must"),
        (["train", "digits", "--model-ema-decay", "0.9"], "has no effect without --model-ema"),
        (["train", "nowhere", "--prove-resume"], "nowhere: no such folder"),
        (["train", "digits", "--prove-resume", "--devices", "2"], "leave out --devices 2"),
        (["train", "digits", "--probe", "linear", "--prove-resume"], "needs training steps"),
    ],
)  # fmt: skip
def test_what_is_wrong_ends_with_2_and_one_line(words, message, headed, tmp_path, complaint):
    for name in ("cat", "dog"):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(tmp_path / "train" / name / "a.png")
    (tmp_path / "two\nlines").mkdir()
    (tmp_path / "two\nlines" / "a\n.jpg").touch()
    (tmp_path / "mine.yaml").write_text("recipe: 5\n")
    copied = shutil.copy(headed, tmp_path / "copy.safetensors")
    words = [
        {"CHECKPOINT": headed, "COPY": str(copied)}.get(w, w).replace("IMAGES", str(tmp_path))
        for w in words
    ]
    assert message in complaint(*words)


def test_a_tag_is_that_of_a_published_checkpoint():
    with torch.device("meta"):
        model = vitkit.create_model("vit_tiny_patch16_224.augreg_in21k")
        assert model.spec.num_classes == 21_843
        assert vitkit.create_model("vit_tiny_patch16_224").spec.num_classes == 1000
    with pytest.raises(SettingError, match=r"vit_tiny_patch16_224 has no checkpoint 'nonsense'"):
        vitkit.create_model("vit_tiny_patch16_224.nonsense")
