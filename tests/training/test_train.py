"""Whole runs through the public door, on the embedded digits."""

import csv
import dataclasses
import hashlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from training.faulty import at, stopping_at
from training.tiny_runs import trained

import vitkit
from vitkit import Callback, DataError, Interrupted, NonFiniteError, open_dataset

TINY = {
    "recipe": "digits",
    "epochs": 3,
    "save_every": 10,
    "warmup_epochs": 1.0,
    "amp": "off",
    "plots": False,
    "report": False,
    "batch_size": 128,
    "quiet": True,
    "device": "cpu",
    "spec": {"depth": 1, "width": 32, "patch_size": 4, "mlp_dropout": 0.1, "drop_path": 0.1},
}
"""10 steps an epoch, 30 of the whole run."""
TIMES = ("images_per_s", "data_wait", "seconds")
"""Columns of metrics.csv that no two runs have alike."""


def train(output: Path, **settings) -> vitkit.TrainResult:
    return vitkit.train("digits", output=str(output), **TINY | settings)


def train_with(callback: Callable[[], Callback], output: Path, **settings) -> vitkit.TrainResult:
    """The same run with one more callback."""
    asked = {"data": "digits", "output": str(output)} | TINY | settings
    return trained(asked, callback)


def fingerprint(path: Path) -> str:
    """A hash over the tensors of a checkpoint, name by name."""
    total = hashlib.sha256()
    for name, value in sorted(vitkit.load(path).model.state_dict().items()):
        total.update(name.encode() + value.numpy().tobytes())
    return total.hexdigest()


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> vitkit.TrainResult:
    return train(tmp_path_factory.mktemp("runs") / "one", log_interval=5, plots=True)


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_run_leaves_everything_a_reader_looks_for(result):
    names = {path.relative_to(result.run).as_posix() for path in result.run.rglob("*")}
    assert {"config.yaml", "metrics.csv", "train.log", "tensorboard", "state",
            "confusion_matrix.png", "weights/best.safetensors",
            "weights/last.safetensors"} <= names  # fmt: skip
    table = rows(result.run)
    assert list(table[0]) == ["epoch", "step", "lr", "train_loss", "val_top1", "val_top5",
                              "val_loss", "val_balanced_accuracy", "val_brier", "val_ece",
                              "images_per_s", "data_wait", "seconds"]  # fmt: skip
    assert [int(row["epoch"]) for row in table] == [1, 2, 3]
    assert float(table[-1]["train_loss"]) < float(table[0]["train_loss"])
    assert "test split, 359 images, evaluated once" in (result.run / "train.log").read_text()
    assert result.stopped == "all 3 epochs"


def test_the_best_weights_are_the_best_epoch_s_and_describe_themselves(result):
    best = vitkit.load(result.best)
    top = max(rows(result.run), key=lambda row: float(row["val_top1"]))
    assert best.metadata["epoch"] == int(top["epoch"])
    assert best.metadata["metrics"]["val"]["top1"] == pytest.approx(
        float(top["val_top1"]), rel=1e-5
    )
    assert best.metadata["metrics"]["test"] == result.metrics["test"]
    assert best.metadata["recipe"]["spec"]["width"] == 32
    assert best.metadata["data"]["images"] == {"train": 1294, "val": 144, "test": 359}
    assert best.classes == tuple("0123456789")
    assert best.preprocess.image_size == (8, 8)


def test_a_run_in_bfloat16_is_judged_as_eval_judges_its_file(tmp_path):
    made = train(tmp_path / "run", epochs=1, warmup_epochs=0.5, amp="bfloat16")
    again = vitkit.evaluate(made.best, "digits")
    assert dict(again) == made.metrics["test"]
    again = vitkit.evaluate(made.best, "digits", split="val")
    for name, value in made.metrics["val"].items():  # of the run's own kernel of attention
        assert again[name] == pytest.approx(value, rel=1e-5)


def test_the_temperature_is_of_the_validation_images_and_helps_them(tmp_path):
    quick = {"depth": 1, "width": 32, "patch_size": 4}
    result = train(tmp_path / "run", lr=1e-2, warmup_epochs=0.2, epochs=6, label_smoothing=0.5,
                   spec=quick)  # fmt: skip
    best = vitkit.load(result.best)
    assert "best weights: temperature 0." in (result.run / "train.log").read_text()
    found = vitkit.evaluate(best, "digits", split="val")
    assert best.metadata["temperature"] == found["temperature"] == best.temperature != 1
    assert (
        found["calibrated_loss"]
        < found["loss"]
        == pytest.approx(result.metrics["val"]["loss"], rel=1e-5)
    )
    for factor in (0.8, 1.25):  # fitted on logits of several epochs, so not to the last digit
        metadata = best.metadata | {"temperature": best.temperature * factor}
        moved = vitkit.evaluate(dataclasses.replace(best, metadata=metadata), "digits", split="val")
        assert found["calibrated_loss"] < moved["calibrated_loss"]
    assert "temperature" not in vitkit.load(result.last).metadata


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(result, tmp_path):
    assert fingerprint(train(tmp_path / "again").last) == fingerprint(result.last)
    assert fingerprint(train(tmp_path / "other", seed=1).last) != fingerprint(result.last)


def test_loader_workers_do_not_change_a_bit(result, tmp_path):
    assert fingerprint(train(tmp_path / "two", workers=2).last) == fingerprint(result.last)


def test_a_run_stopped_and_resumed_leaves_what_a_straight_one_leaves(result, tmp_path):
    run = tmp_path / "run"
    with pytest.raises(Interrupted, match="stopped at step 10 of 30; everything is saved") as stop:
        train_with(stopping_at(10), run)
    assert stop.value.signum == signal.SIGTERM
    resumed = train(run, resume=str(run))
    assert fingerprint(resumed.last) == fingerprint(result.last)
    assert fingerprint(resumed.best) == fingerprint(result.best)
    assert resumed.metrics == result.metrics
    same = [name for name in rows(run)[0] if name not in TIMES]
    assert [[row[n] for n in same] for row in rows(run)] == [
        [row[n] for n in same] for row in rows(result.run)
    ]


def test_muon_resumes_with_the_same_bits(tmp_path):
    straight = train(tmp_path / "straight", opt="muon")
    with pytest.raises(Interrupted):
        train_with(stopping_at(13), tmp_path / "stopped", opt="muon")
    resumed = train(tmp_path / "stopped", opt="muon", resume=str(tmp_path / "stopped"))
    assert fingerprint(resumed.last) == fingerprint(straight.last)


def test_resume_refuses_other_images_and_takes_the_same_ones_from_another_place(tmp_path):
    def images(place: Path, first_label: str) -> Path:
        digits = open_dataset("digits").splits["train"]
        for number in range(60):
            label = first_label if number == 0 else ("low", "high")[number % 2]
            (place / "train" / label).mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(digits.read(number)[..., 0])
            image.save(place / "train" / label / f"{number}.png")
        return place

    def start(data: Path, **settings):
        config = {"data": str(data), "output": str(tmp_path / "run")} | TINY
        config |= {"epochs": 2, "batch_size": 16, "warmup_epochs": 0.5} | settings
        return trained(config)

    start(images(tmp_path / "here", "low"))
    resume = {"resume": str(tmp_path / "run"), "epochs": 3}
    with pytest.raises(DataError, match="labels or classes differ from those that the run"):
        start(images(tmp_path / "relabelled", "high"), **resume)
    (tmp_path / "here").rename(tmp_path / "there")
    assert start(tmp_path / "there", **resume).stopped == "all 3 epochs"


@pytest.mark.parametrize(
    ("seconds", "states"),
    [(1e9, ["step-00000010", "step-00000030"]), (0.0, ["step-00000020", "step-00000030"])],
    ids=["short", "long"],
)
def test_short_epochs_share_a_state(tmp_path, monkeypatch, seconds, states):
    """Without `save_every`, the first and the last epoch save, and all that are long."""
    monkeypatch.setattr("vitkit.training.saving.SAVED_EVERY", seconds)
    train(tmp_path / "run", save_every=None)
    assert sorted(path.name for path in (tmp_path / "run" / "state").glob("step-*")) == states


@pytest.mark.parametrize("epoch", [1, 2])
def test_the_same_command_goes_on_after_a_kill_behind_the_best_weights(result, tmp_path, epoch):
    """Epochs shorter than some seconds: weights are there before the second state is."""
    run = tmp_path / "run"

    def killed_behind_weights() -> None:
        kill = at(10 * epoch, lambda trainer: os.kill(os.getpid(), signal.SIGKILL))
        train_with(kill, run, save_every=None, resume="auto")

    process = multiprocessing.get_context("fork").Process(target=killed_behind_weights)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    resumed = train(run, save_every=None, resume="auto")
    assert "resuming from step 10" in (run / "train.log").read_text()
    assert fingerprint(resumed.last) == fingerprint(result.last)
    assert fingerprint(resumed.best) == fingerprint(result.best)


def test_patience_ends_a_run_that_does_not_get_better(tmp_path):
    run = tmp_path / "run"
    ended = train(run, epochs=30, lr=1e-12, min_lr=0.0, patience=2)
    assert ended.stopped == "2 epochs without a higher validation top-1"
    scores = [float(row["val_top1"]) for row in rows(run)]
    assert len(scores) == scores.index(max(scores)) + 1 + 2
    assert train(run, resume=str(run), epochs=30, lr=1e-12, min_lr=0.0, patience=2).stopped == (
        ended.stopped
    )


def test_a_loss_that_is_not_finite_stops_before_the_weights_take_it_in(tmp_path):
    with pytest.raises(NonFiniteError, match=r"at step \d+ \(lr .*images digits\[\d+\]"):
        train(tmp_path / "run", lr=1e20, clip_grad=None)
    state = tmp_path / "run" / "state"
    for path in [*state.rglob("*.safetensors"), *(tmp_path / "run" / "weights").glob("*")]:
        from safetensors.torch import load_file

        assert all(torch.isfinite(value).all() for value in load_file(path).values()), path


@pytest.mark.parametrize("until", [{"epochs": 1}, {"max_steps": 1}])
def test_weights_that_are_not_finite_are_not_saved(tmp_path, until):
    """A step with a finite loss may overflow them, and no validation shows it."""
    few = {"batch_size": 800, "val_fraction": 0.0, "warmup_epochs": 0.0, "min_lr": 0.0}
    with pytest.raises(NonFiniteError, match=r"weights are not finite after step 1 \(lr 1e\+300\)"):
        train(tmp_path / "run", lr=1e300, **few | until)
    assert not list((tmp_path / "run").rglob("*.safetensors"))


def test_a_loss_that_grows_without_end_is_a_divergence(tmp_path):
    with pytest.raises(NonFiniteError, match=r"after epoch \d; guessing gives 2.3;.* a lower --lr"):
        train(tmp_path / "run", lr=3.0, opt="adam", warmup_epochs=0.1, clip_grad=None)


def test_a_run_goes_on_without_the_file_its_recipe_was_in(tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("recipe: digits\nlr: 0.002\n")
    first = train(tmp_path / "run", recipe=str(recipe), max_steps=2)
    recipe.unlink()
    again = vitkit.train("digits", resume=str(first.run), max_steps=4, quiet=True)
    assert again.stopped == "4 steps"
