"""Everything a person can get wrong: exit code 2, one line, what to do, and nothing lost."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_checkpoint import save_tiny

import vitkit
from vitkit import cli

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


def test_data_without_a_split_to_evaluate_on_names_what_it_has(complaint, tmp_path):
    save_tiny(tmp_path / "m.safetensors", ("ant", "bee"))
    root = folder(tmp_path / "d", "train/ant", "train/bee")
    assert complaint("eval", "m.safetensors", str(root)) == (
        "vitkit: split = None: d has neither test nor val; name one by --split: train\n"
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
    [(["predict", "CKPT", "photos"], "lower --batch-size, or pass --device cpu"),
     (["explain", "CKPT", "photos"], "pass --device cpu, or end other programs")],
)  # fmt: skip
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


def test_names_that_would_move_a_cursor_are_printed_escaped(headed, tmp_path, capsys):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    assert cli.run(["predict", headed, str(tmp_path / "a.png"), "--top-k", "10"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b[2J 0." in printed
