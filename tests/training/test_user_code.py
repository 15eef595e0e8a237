"""A user's own losses, metrics, transforms and callbacks: by name, and as objects of a call."""

import random
import sys

import numpy as np
import pytest
import torch
from training.tiny_runs import QUICK, end_of, last_state

import vitkit
from vitkit import SettingError, UserCodeError, cli

SPEC = {"image_size": 8, "patch_size": 4, "width": 8, "num_heads": 1, "mlp_width": 8, "depth": 1}
SMALL = QUICK | {"spec": SPEC, "epochs": 1, "batch_size": 128}

MODULE = """
import os
import random

import torch
import vitkit

SEEN = []


def double(logits, targets):
    return 2 * torch.nn.functional.cross_entropy(logits, targets)


def worst(logits, labels):
    return (logits.argmax(1) == labels).float().mean()


def shaken(image):
    return image.rotate(random.uniform(-20, 20) + torch.rand(()).item())


class Epochs(vitkit.Callback):
    def after_epoch(self, trainer):
        SEEN.append(trainer.epoch)
        os.write(1, f"epoch {trainer.epoch} ended\\n".encode())  # one call: processes do not mix
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's, that every process can import."""
    (tmp_path / "own_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import own_code

    yield own_code
    del sys.modules["own_code"]


def settings_of(run):
    return (run / "config.yaml").read_text()


def test_importable_objects_are_stored_by_name_and_need_not_be_passed_again(tmp_path, own):
    passed = {
        "loss": own.double, "metrics": [own.worst], "transform": own.shaken,
        "callbacks": [own.Epochs],
    }  # fmt: skip
    straight = vitkit.train("digits", output=tmp_path / "a", **SMALL | passed | {"epochs": 2})
    assert own.SEEN == [1, 2]
    stopped = vitkit.train(
        "digits", output=tmp_path / "b", max_steps=5, **SMALL | passed | {"epochs": 2}
    )
    stored = settings_of(stopped.run)
    for name in ("double", "worst", "shaken", "Epochs"):
        assert f"own_code:{name}" in stored
    own.SEEN.clear()
    resumed = vitkit.train(resume=stopped.run, max_steps=20)
    assert end_of(resumed.run) == end_of(straight.run)
    assert own.SEEN == [1, 2]
    for split in ("val", "test"):
        scores = resumed.metrics[split]
        assert scores["worst"] == pytest.approx(scores["top1"])
    assert "val_worst" in (resumed.run / "metrics.csv").read_text().splitlines()[0]


def test_names_are_flags(tmp_path, own, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", "--output", "run", "--epochs", "1", "--quiet", "--workers", "0"]
    words += [f"--spec.{name}={value}" for name, value in SPEC.items()]
    words += ["--metrics", "own_code:worst", "--transform", "own_code:shaken"]
    words += ["--no-plots", "--no-report"]
    assert cli.run([*words, "--callbacks", "own_code:Epochs"]) == 0
    assert own.SEEN == [1]
    assert "worst" in vitkit.load("run").metadata["metrics"]["test"]


def test_objects_of_a_notebook_must_be_passed_again(tmp_path, capsys):
    def loss(logits, targets):
        return torch.nn.functional.cross_entropy(logits, targets)

    def shaken(image):
        return np.roll(np.asarray(image), random.randrange(3))

    class Counts(vitkit.Callback):
        steps = 0

        def after_step(self, trainer, result):
            self.steps += 1

    counts = Counts()
    passed = {"loss": loss, "transform": shaken, "callbacks": [counts]}
    run = vitkit.train("digits", output=tmp_path / "run", **SMALL | passed).run
    assert counts.steps == 10
    with pytest.raises(SettingError) as error:
        vitkit.train(resume=run, epochs=2, loss=loss)
    message = str(error.value)
    assert "<locals>.shaken, callbacks " in message
    assert message.endswith(f"vitkit.train(data, resume='{run}', transform=..., callbacks=...)")
    assert cli.run(["train", "--resume", str(run), "--epochs", "2"]) == 2
    assert "loss=..., transform=..., callbacks=..." in capsys.readouterr().err
    resumed = vitkit.train(resume=run, epochs=2, quiet=True, **passed)
    assert counts.steps == 20
    straight = vitkit.train("digits", output=tmp_path / "again", **SMALL | passed | {"epochs": 2})
    assert resumed.stopped == straight.stopped == "all 2 epochs"


def test_a_transform_has_the_random_numbers_of_its_image_and_epoch(tmp_path):
    drawn = []

    def shaken(image):
        drawn.append((random.random(), np.random.random(), torch.rand(()).item()))
        return image

    vitkit.train("digits", output=tmp_path / "a", transform=shaken, **SMALL)
    first = [*drawn]
    drawn.clear()
    vitkit.train("digits", output=tmp_path / "b", transform=shaken, **SMALL)
    assert drawn[: len(first)] == first
    assert len({*first}) == len(first) >= 1280
    drawn.clear()
    vitkit.train("digits", output=tmp_path / "c", transform=shaken, seed=1, **SMALL)
    assert not {*drawn} & {*first}


@pytest.mark.parametrize(
    "event", ["on_start", "before_epoch", "before_step", "after_epoch", "on_end"]
)
def test_a_callback_that_raises_is_named_at_every_event(tmp_path, event):
    class Fails(vitkit.Callback):
        pass

    def fail(self, *arguments):
        raise ValueError("no")

    setattr(Fails, event, fail)
    words = (
        rf"the callback .*Fails raised ValueError in {event}: no; the run stopped at step \d+, ever"
    )
    with pytest.raises(UserCodeError, match=words):
        vitkit.train("digits", output=tmp_path / "run", callbacks=[Fails()], **SMALL)
    mended = vitkit.train("digits", resume=tmp_path / "run", callbacks=[], quiet=True)
    straight = vitkit.train("digits", output=tmp_path / "straight", **SMALL)
    assert end_of(mended.run) == end_of(straight.run)


def broken_loss(logits, targets):
    return logits


def two_values(logits, labels):
    return logits.sum(0)


def top1(logits, labels):
    return 1.0


def raises(*arguments):
    raise RuntimeError("not today")


def test_wrong_objects_are_refused_before_the_first_step(tmp_path):
    def inner(logits, targets):
        return torch.nn.functional.cross_entropy(logits, targets)

    cases = [
        ({"loss": broken_loss}, r"broken_loss must return one number .* Tensor \[2, 10\]"),
        ({"metrics": [two_values]}, r"metric two_values returned Tensor of the shape \(10,\); exp"),
        ({"metrics": [raises]}, "the metric raises raised RuntimeError: not today"),
        ({"metrics": [top1]}, "there is a score top1 already; rename it"),
        ({"metrics": [lambda a, b: 1.0]}, "has no name for its column; define it with def"),
        ({"metrics": ["nowhere:f"]}, "--metrics nowhere:f cannot be imported: No module named"),
        ({"transform": "math:nothing"}, "--transform math:nothing cannot be imported"),
        ({"transform": 3}, "transform 3: expected a function, an object or its name"),
        ({"callbacks": [4]}, "callbacks 4: expected a function"),
        ({"callbacks": [dict]}, "--callbacks builtins:dict must be a vitkit.Callback, or a class"),
        ({"callbacks": ["nowhere:C"]}, "--callbacks nowhere:C cannot be imported"),
        ({"loss": inner, "devices": 2}, "devices 2 starts .* loss .*inner exists in this process"),
        ({"metrics": [inner], "loss": lambda a, b: a.sum(), "transform": lambda image: image},
         "two objects have the name .*<lambda>; define them"),
    ]  # fmt: skip
    for wrong, words in cases:
        with pytest.raises(vitkit.VitkitError, match=words):
            vitkit.train("digits", output=tmp_path / "run", **SMALL | wrong)
        assert not (tmp_path / "run").exists()  # so that the mended call may use it


def test_a_loss_that_fails_is_named_and_saves_the_run(tmp_path):
    calls = []

    def fails(logits, targets):
        calls.append(len(targets))
        if len(calls) == 5:
            raise KeyError("no such class")
        return torch.nn.functional.cross_entropy(logits, targets)

    words = (
        r"the loss .*fails raised KeyError in a step: 'no such class'; the run stopped at step 3, "
        "everything is saved: fix it and resume with the same objects: "
    )
    with pytest.raises(UserCodeError, match=words) as error:
        vitkit.train("digits", output=tmp_path / "run", loss=fails, **SMALL)
    assert isinstance(error.value.__cause__, KeyError)
    resumed = vitkit.train("digits", resume=tmp_path / "run", loss=fails, quiet=True)
    assert resumed.stopped == "1 epoch"


def test_a_loss_that_runs_out_of_memory_gets_the_advice_of_any_step(tmp_path):
    def greedy(logits, targets):
        if len(targets) > 32:
            raise torch.OutOfMemoryError("out of memory")
        return torch.nn.functional.cross_entropy(logits, targets)

    with pytest.raises(SettingError, match="out of memory with 128 images at once; pass"):
        vitkit.train("digits", output=tmp_path / "run", loss=greedy, **SMALL)


def test_instances_of_one_class_are_callbacks_of_their_own(tmp_path):
    class Counts(vitkit.Callback):
        steps = 0

        def after_step(self, trainer, result):
            self.steps += 1

    counters = [Counts(), Counts(), Counts()]
    run = vitkit.train("digits", output=tmp_path / "run", callbacks=counters, **SMALL).run
    assert [counter.steps for counter in counters] == [10, 10, 10]
    vitkit.train("digits", resume=run, callbacks=counters, epochs=2, quiet=True)
    assert [counter.steps for counter in counters] == [20, 20, 20]


def test_a_new_run_needs_data_where_there_is_none_to_resume(tmp_path):
    for settings in ({}, {"resume": "auto"}):
        with pytest.raises(SettingError, match=r"data is missing; it comes first: vitkit\.train\("):
            vitkit.train(output=tmp_path / "run", **settings)


def test_a_transform_that_fails_names_the_image_and_saves_the_run(tmp_path):
    calls = []

    def fails(image):
        calls.append(image)
        if len(calls) == 300:
            return np.zeros((3, 8, 8, 1), np.uint8)
        return image

    with pytest.raises(UserCodeError, match=r"result of the transform .*fails: digits\[\d+\]: the"):
        vitkit.train("digits", output=tmp_path / "run", transform=fails, **SMALL)
    assert last_state(tmp_path / "run").name == "step-00000002"
    resumed = vitkit.train("digits", resume=tmp_path / "run", transform=fails, quiet=True)
    assert resumed.stopped == "1 epoch"


def test_a_metric_that_is_not_finite_is_left_out_of_the_weights(tmp_path):
    def undefined(logits, labels):
        return float("nan")

    run = vitkit.train("digits", output=tmp_path / "run", metrics=[undefined], **SMALL)
    assert "nan" in (run.run / "metrics.csv").read_text()
    assert "undefined" not in vitkit.load(run.best).metadata["metrics"]["val"]


def test_evaluate_has_the_users_metrics(tmp_path):
    def shares(logits, labels):
        assert logits.shape == (359, 10)
        return np.float64((logits.argmax(1) == labels).double().mean())

    run = vitkit.train("digits", output=tmp_path / "run", **SMALL)
    result = vitkit.evaluate(run.best, "digits", metrics=[shares])
    assert result["shares"] == pytest.approx(result["top1"])


def test_a_teacher_may_be_a_module(tmp_path):
    from vitkit.training.distillation import Teacher

    teacher = Teacher(
        torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64, 10)),
        vitkit.Preprocess(image_size=8),
        tuple("0123456789"),
    )
    run = vitkit.train("digits", output=tmp_path / "run", teacher=teacher, **SMALL)
    assert ":Teacher()" in settings_of(run.run)
    with pytest.raises(SettingError, match=r"teacher=\.\.\."):
        vitkit.train(resume=run.run, epochs=2)


@pytest.mark.parametrize("flag", ["loss", "metrics", "transform", "callbacks"])
@pytest.mark.parametrize("fault", ["1 +", "open('nowhere')", "{}['x']", "int.x"])
def test_a_module_that_fails_while_it_is_imported_is_one_line(
    tmp_path, monkeypatch, capsys, flag, fault
):
    (tmp_path / "faulty_code.py").write_text(fault)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["train", "digits", "--output", "run", "--epochs", "1", f"--{flag}"]
    assert cli.run([*words, "faulty_code:thing"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--{flag} faulty_code:thing cannot be imported: " in line
    assert not (tmp_path / "run").exists()
