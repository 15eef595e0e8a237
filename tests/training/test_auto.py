"""`--auto`: the candidates, the end of the search, its files, and the budgets that it accepts."""

import json
import re
import signal

import numpy as np
import pytest
from PIL import Image
from training.starts import SHORT, SPEC, a_checkpoint
from training.tiny_runs import settings_of

import vitkit
from vitkit import Interrupted, NonFiniteError, SettingError, TrainConfig
from vitkit.training import auto as search
from vitkit.training.train import train as train_config


class Ticks:
    """A clock that advances by a constant time whenever it is read."""

    def __init__(self, tick: float) -> None:
        self.now, self.tick = 0.0, tick

    def __call__(self) -> float:
        self.now += self.tick
        return self.now


def auto(data, output, tick=0.01, clock=None, **settings):
    asked = {"device": "cpu", "amp": "off", "threads": 1, "quiet": True, "report": False}
    asked |= {"plots": False} | settings
    config = TrainConfig(data=str(data), auto=True, output=str(output), **asked)
    return search.run_search(config, clock or Ticks(tick))


def report_of(folder):
    return json.loads((folder / "search.json").read_bytes())


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Write 200 colour images of two classes, bright and dark, all different."""
    root, rng = tmp_path_factory.mktemp("auto") / "images", np.random.default_rng(0)
    for name, low in (("dark", 0), ("light", 130)):
        (root / name).mkdir(parents=True)
        for number in range(100):
            pixels = rng.integers(low, low + 120, (12, 10, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.png")
    return root


def failing_after_linear(monkeypatch, error):
    """Let the third candidate, fine-tuning, end with an error."""

    def train_until(config, **kwargs):
        if config.probe is None:
            raise error
        return train_config(config, **kwargs)

    monkeypatch.setattr(search, "train", train_until)


def test_divergence_ends_the_search_and_keeps_what_there_is(monkeypatch, tmp_path):
    a_checkpoint(tmp_path / "start.safetensors")
    failing_after_linear(monkeypatch, NonFiniteError("the loss is nan"))
    done = auto("digits", tmp_path / "run", budget="50s", pretrained=tmp_path / "start.safetensors")
    assert done.stopped == "finetune diverged: the loss is nan"
    assert report_of(done.run)["winner"] == "linear"
    with pytest.raises(NonFiniteError):  # nothing to fall back to
        auto("digits", tmp_path / "noise", budget="50s")


def test_a_signal_keeps_what_is_done(monkeypatch, tmp_path):
    a_checkpoint(tmp_path / "start.safetensors")
    failing_after_linear(monkeypatch, Interrupted(signal.SIGTERM, "stopped at step 3"))
    with pytest.raises(Interrupted, match="stopped at step 3") as caught:
        auto("digits", tmp_path / "run", budget="50s", pretrained=tmp_path / "start.safetensors")
    assert caught.value.signum == signal.SIGTERM
    report = report_of(tmp_path / "run")
    assert (report["stopped"], report["winner"]) == ("SIGTERM", "linear")
    assert vitkit.load(tmp_path / "run" / "weights" / "best.safetensors")
    assert "linear (linear head" in (tmp_path / "run" / "train.log").read_text()


def test_a_candidate_that_does_not_fit_is_not_begun(monkeypatch, tmp_path):
    a_checkpoint(tmp_path / "start.safetensors")
    clock = Ticks(0.01)

    def slow_train(config, **kwargs):
        clock.now += 99
        return train_config(config, **kwargs)

    monkeypatch.setattr(search, "train", slow_train)
    settings = {"budget": "98.2s", "pretrained": tmp_path / "start.safetensors"}
    done = auto("digits", tmp_path / "run", clock=clock, **settings)
    assert done.stopped == "the budget was used up before finetune"
    assert not (done.run / "finetune").exists()


def test_digits_from_noise(tmp_path):
    done = auto("digits", tmp_path / "run", tick=0.02, budget="0.4s")
    report = report_of(done.run)
    assert [row["name"] for row in report["candidates"]] == ["neighbours", "scratch"]
    assert report["candidates"][0]["validation"]["top1"] > 0.9
    assert done.best == done.run / "weights" / "best.safetensors"
    model = vitkit.load(done.best)
    trained = sum(p.numel() for p in model.model.parameters())
    assert [row["trained"] for row in report["candidates"]] == [0, trained]
    for split, row in (("val", report["candidates"][1]["validation"]), ("test", report["test"])):
        found = vitkit.evaluate(done.best, "digits", split=split, device="cpu")
        kept = {name: row[name] for name in ("top1", "top1_low", "top1_high", "images")}
        assert kept == pytest.approx({name: found[name] for name in kept})
    assert done.metrics["test"] == model.metadata["metrics"]["test"] == report["test"]
    candidate = vitkit.load(done.run / "scratch" / "weights" / "best.safetensors")
    assert "test" not in candidate.metadata["metrics"]  # looked at once, by the winner
    log = (done.run / "train.log").read_text()
    assert f"with scratch: top-1 {report['test']['top1']:.4f} (" in log
    for row in report["candidates"]:
        assert f"{row['name']} ({row['description']}, {row['trained']:,} parameters trained" in log


def test_two_hundred_images_with_weights(images, tmp_path):
    a_checkpoint(tmp_path / "start.safetensors", in_channels=3)
    start = tmp_path / "start.safetensors"
    how = {"tick": 0.001, "budget": "0.5s", "pretrained": start, "compile": True}
    done = auto(images, tmp_path / "run", **how)
    report = report_of(done.run)
    assert [row["name"] for row in report["candidates"]][:2] == ["neighbours", "linear"]
    assert report["candidates"][1]["trained"] == 2 * 17
    assert report["winner"] == "linear"
    assert (
        "more validation images" in done.stopped
    )  # bright and dark are separable without training
    found = vitkit.evaluate(done.best, images, device="cpu")
    assert found["top1"] == pytest.approx(report["test"]["top1"])
    (prediction, *_) = vitkit.Predictor.from_checkpoint(done.best)([images / "dark" / "0.png"])
    assert prediction.label in ("dark", "light")


def test_fine_tuning_follows_where_a_linear_head_is_not_enough(tmp_path):
    a_checkpoint(tmp_path / "start.safetensors")
    start = tmp_path / "start.safetensors"
    done = auto("digits", tmp_path / "run", tick=0.02, budget="0.6s", pretrained=start)
    report = report_of(done.run)
    assert [row["name"] for row in report["candidates"]] == ["neighbours", "linear", "finetune"]
    config = (done.run / "finetune" / "config.yaml").read_text()
    assert "layer_decay: 0.75" in config
    assert re.search(r"flip: 0(\.0)?$", config, re.MULTILINE)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"epochs": 3, "lr": 0.1}, "--epochs, --lr itself; leave them out"),
     ({"resume": "run"}, "--resume itself; leave it out"),
     ({"model": "vit_tiny_patch16_224"}, "--model itself; leave it out"),
     ({"val_fraction": 0.0}, "raise --val-fraction")],
)  # fmt: skip
def test_what_auto_does_not_take(settings, message, tmp_path):
    with pytest.raises(SettingError, match=message):
        auto("digits", tmp_path / "run", **settings)


def timed(output, ends: float, **settings):
    """Run five steps an epoch; each takes a second by the clock."""
    asked = SHORT | {"epochs": 12, "warmup_epochs": 1.0, "spec": SPEC} | settings
    config = TrainConfig(data="digits", output=str(output), **asked)
    clock = Ticks(1.0)
    return train_config(config, time_left=lambda: ends - clock())


def test_a_run_whose_time_is_over_ends_after_the_epoch(tmp_path):
    done = timed(tmp_path / "run", 0.0)
    assert done.stopped == "epoch 1, when the budget was used up"
    assert done.best.exists()


@pytest.mark.parametrize(("ends", "epochs"), [(6.5, 6), (500.0, 12)])
def test_the_schedule_ends_with_the_budget(ends, epochs, tmp_path):
    done = timed(tmp_path / "run", ends)
    assert done.stopped == f"all {epochs} epochs"
    lines = [json.loads(line) for line in (done.run / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if line["kind"] == "epoch"]
    assert len(rows) == epochs
    assert rows[-1]["lr"] < 0.02 * max(row["lr"] for row in rows)
    assert settings_of(done.run)["epochs"] == epochs
    assert f"{epochs}/{epochs}  loss" in (done.run / "train.log").read_text()
    assert vitkit.load(done.last).metadata["recipe"]["epochs"] == epochs


def test_a_schedule_cut_short_keeps_a_warm_up_below_its_length(tmp_path):
    done = timed(tmp_path / "run", 6.5, warmup_epochs=10.0)
    stored = settings_of(done.run)
    assert stored["warmup_epochs"] < stored["epochs"] == 6
    rates = [json.loads(line) for line in (done.run / "metrics.jsonl").read_text().splitlines()]
    rates = [line["lr"] for line in rates if line["kind"] == "epoch"]
    assert rates[-1] < max(rates)
    assert vitkit.train(resume=done.run, epochs=7, quiet=True).stopped == "all 7 epochs"


def test_what_the_user_set_wins_over_a_recipe(tmp_path):
    done = auto("digits", tmp_path / "run", budget="0.05s", workers=0, balance=True)
    config = settings_of(done.run / "scratch")
    assert (config["workers"], config["balance"]) == (0, True)
