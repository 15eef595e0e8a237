"""Curves that go to wandb and mlflow, with fakes of both."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from training.faulty import stopping_at
from training.logged_runs import curves, train

import vitkit


class Service:
    """A fake of wandb and mlflow that records its calls, and fails on request."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict, int]] = []
        self.began: list[dict] = []
        self.ended: list[object] = []
        self.fails_after = 10**9

    def tell(self, values: dict, step: int) -> None:
        if len(self.logged) >= self.fails_after:
            raise ConnectionError("no route")
        self.logged.append((values, step))

    def begin(self, **settings) -> SimpleNamespace:
        self.began.append(settings)
        return SimpleNamespace(id="w-1", info=SimpleNamespace(run_id="m-1"))


@pytest.fixture
def service(monkeypatch) -> Service:
    made, wandb, mlflow = Service(), ModuleType("wandb"), ModuleType("mlflow")
    wandb.Error = type("Error", (Exception,), {})
    wandb.init, wandb.log = made.begin, made.tell
    wandb.finish = lambda exit_code: made.ended.append(exit_code)
    mlflow.MlflowException = type("MlflowException", (Exception,), {})
    mlflow.start_run, mlflow.log_metrics = made.begin, made.tell
    mlflow.log_params = lambda settings: made.began.append(settings)
    mlflow.end_run = made.ended.append
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return made


@pytest.mark.parametrize(("name", "end"), [("wandb", 0), ("mlflow", "FINISHED")])
def test_a_service_gets_the_curves(tmp_path, service, name, end):
    run = train(tmp_path / "run", logger=(name,)).run
    events = curves(run)
    logged = {(tag, step): v for values, step in service.logged for tag, v in values.items()}
    drawn = {
        (tag, p.step): p.value for tag in events.Tags()["scalars"] for p in events.Scalars(tag)
    }
    assert logged == pytest.approx(drawn)
    assert ("val/top1", 20) in logged
    assert service.ended == [end]
    assert json.dumps(service.began).count('"batch_size": 128') == 1


@pytest.mark.parametrize(("name", "key", "known"), [("wandb", "id", "w-1"),
                                                    ("mlflow", "run_id", "m-1")])  # fmt: skip
def test_a_resumed_run_is_the_same_run_to_a_service(tmp_path, service, name, key, known):
    with pytest.raises(vitkit.Interrupted):
        train(tmp_path / "run", callback=stopping_at(15), logger=(name,))
    assert service.ended in ([1], ["FAILED"])
    first, *_ = service.began
    train(tmp_path / "run", resume=str(tmp_path / "run"), logger=(name,))
    assert (first[key], service.began[-1][key]) == (None, known)


def test_a_service_that_fails_ends_no_run(tmp_path, service):
    service.fails_after = 4
    ended = train(tmp_path / "run", logger=("wandb",))
    assert ended.stopped == "all 3 epochs"
    assert (ended.run / "train.log").read_text().count(
        "wandb failed: no route; the run continues"
    ) == 1
    assert len(service.logged) == 4


def test_a_service_that_is_not_installed_is_named_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(
        vitkit.MissingExtraError, match="--logger mlflow: mlflow is not installed; pip"
    ):
        train(tmp_path / "run", logger=("mlflow",))
    assert not (tmp_path / "run").exists()


def test_without_tensorboard_a_run_has_its_other_files(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    run = train(tmp_path / "run", epochs=1, warmup_epochs=0.5).run
    assert not (run / "tensorboard").exists()
    assert (run / "metrics.csv").read_text().count("\n") == 2
