"""What `vitkit train` says and draws, as a newcomer meets it: the log, mistakes, `--show-batch`."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitkit
from vitkit import cli

CLASSES = ("cat", "dog", "emu")
TINY = ["--spec.patch-size", "4", "--spec.width", "8", "--spec.depth", "1", "--spec.num-heads",
        "1", "--batch-size", "6", "--device", "cpu", "--no-plots", "--no-report"]  # fmt: skip


def write_images(folder: Path, classes: tuple[str, ...], count: int, *, seed: int) -> None:
    generator = np.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A working folder with `photos`: three classes, train and val."""
    monkeypatch.chdir(tmp_path)
    write_images(Path("photos/train"), CLASSES, 4, seed=0)
    write_images(Path("photos/val"), CLASSES, 2, seed=1)
    return tmp_path


def train(capsys, *words: str, code: int = 0) -> str:
    """What a run prints, on both streams."""
    assert cli.run(["train", *words]) == code
    return "".join(capsys.readouterr())


def test_the_log_names_what_was_measured_and_nothing_else(place, capsys):
    text = train(capsys, "photos", *TINY, "--epochs", "60", "--max-steps", "4", "--output", "a")
    (settings,) = re.findall("^settings: (.*)$", text, flags=re.MULTILINE)
    # what has a line of its own is not said twice
    assert re.search("^model: .* patches of 4 x 4, width 8, MLP width .*, 1 block, ", text, re.M)
    assert "training: 60 epochs of " in text
    for name in ("spec.width", "spec.depth", "spec.patch_size", "epochs", "batch_size", "lr"):
        assert not re.search(rf"(^| ){name} ", settings)
    assert "spec.image_size 8, " in settings
    # the model was chosen by the data, so it is none of the named ones
    assert "vit_tiny" not in text
    assert "img_size" not in settings
    assert "epochs shown below: 1 of 2 and the best ones; train.log has all\n" in text
    assert "  best" in text
    shutil.rmtree("photos/val")
    words = ["--val-fraction", "0", "--epochs", "23", "--warmup-epochs", "2.3000000000000003"]
    text = train(capsys, "photos", *TINY, *words, "--max-steps", "4", "--output", "b")
    assert "warmup_epochs 2.3," in text
    assert re.search(r"^epoch +2/23  loss [\d.]+  [\d,]+ images/s$", text, flags=re.MULTILINE)
    assert "epochs shown" not in text
    # there is no split to evaluate on
    assert text.endswith("results: b\nnext: vitkit predict b photos\n")


def test_more_epochs_of_a_finished_run_say_what_the_rate_does(place, capsys):
    train(capsys, "photos", *TINY, "--epochs", "2", "--output", "a")
    text = train(capsys, "--resume", "a", "--epochs", "4")
    found = re.search(
        r"the learning rate rises from ([\d.e-]+) to ([\d.e-]+): the cosine schedule now spans "
        "4 epochs",
        text,
    )
    assert found is not None
    rates = [float(row.split(",")[2]) for row in Path("a/metrics.csv").read_text().split()[1:]]
    assert float(found[1]) == pytest.approx(rates[1], rel=1e-2)
    assert rates[1] < float(found[2])
    assert float(found[2]) > rates[2]
    # a run that ends earlier, and one whose rate does not rise, say nothing
    train(capsys, "photos", *TINY, "--epochs", "3", "--max-steps", "2", "--output", "b")
    assert "learning rate rises" not in train(capsys, "--resume", "b", "--max-steps", "4")


def test_show_batch_draws_the_first_batch_and_trains_nothing(place, capsys):
    before = {path for path in place.rglob("*") if path.is_file()}
    text = train(capsys, "photos", *TINY, "--show-batch")
    after = {path for path in place.rglob("*") if path.is_file()}
    assert after - before == {place / "show-batch.png"}
    first, second, last = text.splitlines()[-3:]
    assert first == "photos: first training batch, 6 images"
    figure = vitkit.show_batch("photos", spec={"patch_size": 4, "width": 8, "depth": 1,
                                               "num_heads": 1}, batch_size=6)  # fmt: skip
    assert figure.texts[0].get_text() == f"{first}\n{second}"
    words = ["photos", *TINY, "--show-batch"]
    text = train(capsys, *words, "--grad-accum-steps", "2", "--overwrite")
    assert "photos: first training batch, part 1 of 2, 3 images" in text
    # pixels of 0 to 255 are normalised with mean and standard deviation 0.5
    found = re.fullmatch(
        r"3 x 8 x 8, values (-[\d.]+) to ([\d.]+), mean (-?[\d.]+), standard deviation ([\d.]+)",
        second,
    )
    assert found is not None
    shown = np.concatenate([axes.images[0].get_array().ravel() for axes in figure.axes]) / 127.5 - 1
    expected = [shown.min(), shown.max(), shown.mean(), shown.std()]
    assert [float(number) for number in found.groups()] == pytest.approx(expected, abs=0.01)
    assert last == f"images: {place / 'show-batch.png'}"
    with Image.open("show-batch.png") as image:
        assert image.width > 500
    assert "show-batch.png: this file exists; choose" in train(capsys, *words, code=2)


def test_images_of_one_class_that_are_mixed_have_one_label(place):
    captions = []
    for seed in range(4):
        figure = vitkit.show_batch("photos", batch_size=12, mixup=0.4, img_size=8, seed=seed)
        captions += [axes.texts[0].get_text().split("\n") for axes in figure.axes]
    assert {len(caption) for caption in captions} == {1, 2}
    for caption in captions:
        classes = [line.split(" ")[0] for line in caption]
        assert len(set(classes)) == len(classes)
        shares = [float(share) for line in caption for share in re.findall(r"\((.*) %\)", line)]
        assert sum(shares) in (0, pytest.approx(100))


@pytest.mark.parametrize("fails", [False, True])
def test_training_leaves_torchs_state_as_it_was(place, fails):
    def fail() -> None:
        raise ValueError

    threads = torch.get_num_threads()
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    settings = {"epochs": 1, "batch_size": 6, "max_steps": 1, "threads": threads + 1}
    metrics = [lambda logits, labels: fail()] if fails else None
    try:
        result = vitkit.train(
            "photos", **settings, quiet=True, plots=False, report=False, output="run",
            callbacks=None, metrics=metrics, test=False,
        )  # fmt: skip
        assert result.last.exists()
    except vitkit.VitkitError:
        assert fails
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.rand(3), expected)
