"""The log of a run, read back from its files; tiny runs through the public interface."""

import csv
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from processes import wait_until
from tensorboard.summary.writer.record_writer import RecordWriter
from training.faulty import at, on, stopping_at
from training.logged_runs import TINY, curves, lines, train
from training.tiny_runs import end_of

import vitkit
from vitkit.training.monitoring import trackers as metric_files
from vitkit.training.monitoring.run_log import Display
from vitkit.training.run_folder import RunFolder

TIMES = {"images_per_s", "data_wait", "seconds", "memory"}
"""Numbers that no two runs have alike."""


def table(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def without_times(rows: list[dict]) -> list[dict]:
    return [{name: v for name, v in row.items() if name not in TIMES} for row in rows]


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> vitkit.TrainResult:
    return vitkit.train("digits", output=str(tmp_path_factory.mktemp("runs") / "one"), **TINY)


def test_metrics_jsonl_has_every_logged_step_every_epoch_and_the_test(result):
    found = lines(result.run)
    assert [row["step"] for row in found if row["kind"] == "step"] == list(range(5, 31, 5))
    epochs = [row for row in found if row["kind"] == "epoch"]
    for row, cells in zip(epochs, table(result.run), strict=True):
        assert list(row) == ["kind", *cells]
        assert [row[name] for name in cells] == pytest.approx(
            [float(cell) for cell in cells.values()], rel=1e-5
        )
        assert 0 < row["data_wait"] < 1
    assert found[-1]["kind"] == "test"
    assert found[-1]["test_top1"] == result.metrics["test"]["top1"]


def test_tensorboard_has_the_numbers_of_the_file(result):
    events = curves(result.run)
    tags = {"train_loss": "train/loss", "lr": "lr", "images_per_s": "perf/images_per_s",
            "data_wait": "perf/data_wait", "memory": "system/memory"}  # fmt: skip
    steps = [row for row in lines(result.run) if row["kind"] == "step"]
    for name, tag in tags.items():
        assert [p.step for p in events.Scalars(tag)] == [row["step"] for row in steps]
        assert [p.value for p in events.Scalars(tag)] == pytest.approx([r[name] for r in steps])
    assert {"val/loss", "val/top1", "val/top5", "test/top1"} <= set(events.Tags()["scalars"])
    held = events.Scalars("system/memory")[-1].value
    assert 50 < held < 50_000  # MB of a process that has torch in it


def test_histograms_are_of_the_weights_as_they_were(result):
    events, weights = curves(result.run), vitkit.load(result.last).model.state_dict()
    matrices = {f"weights/{n}" for n, w in vitkit.load(result.last).model.named_parameters()
                if w.ndim > 1}  # fmt: skip
    assert set(events.Tags()["histograms"]) == matrices
    first, *_, last = events.Histograms("weights/head.weight")
    head = weights["head.weight"]
    assert last.step == 30
    found = last.histogram_value
    assert (found.min, found.max) == pytest.approx((head.min().item(), head.max().item()))
    assert sum(found.bucket) == found.num == head.numel()
    assert found.sum_squares == pytest.approx(head.square().sum().item(), rel=1e-5)
    assert first.histogram_value.max != found.max  # the control: it was another one before


def test_example_predictions_are_the_model_s(result):
    *_, last = curves(result.run).Images("val/examples")
    shown = np.asarray(Image.open(io.BytesIO(last.encoded_image_string)))
    assert last.step == 30
    scores = vitkit.evaluate(result.last, "digits", split="val")
    indices = np.linspace(0, len(scores.labels) - 1, 8).astype(int)
    dataset, right = scores.split, 0
    for number, index in enumerate(indices):
        top, left = 6 + number // 4 * 148, 6 + number % 4 * 118
        cell = shown[top : top + 112, left : left + 112]
        assert np.array_equal(cell[7::14, 7::14, 0], dataset.read(int(index))[..., 0])
        caption = shown[top + 112 : top + 142, left : left + 112].astype(int)
        assert (caption.sum(2) < 200).any()  # the class, in black
        is_green = (caption[..., 1] - caption[..., 0]).max() > 60
        assert is_green == bool(scores.right[index])
        right += is_green
    assert 0 < right < 8


def stopped_and_torn(run: Path) -> Path:
    """Stop a run at step 23, then append later rows and incomplete lines to its files."""
    with pytest.raises(vitkit.Interrupted):
        train(run, callback=stopping_at(23))
    with (run / "metrics.csv").open("a") as file:
        file.write("3,30,0.001,0.5,0.9,0.9,0.5,1,0.1,9\n3,30,0.0")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "epoch": 3, "step": 25, "lr": 1}\n{"kind": "step", "epo')
    return run


def test_a_torn_line_and_lines_from_beyond_the_state_are_gone_after_resume(result, tmp_path):
    run = stopped_and_torn(tmp_path / "run")
    train(run, resume=str(run))
    assert without_times(lines(run)) == without_times(lines(result.run))
    assert without_times(table(run)) == without_times(table(result.run))
    train(run, resume=str(run))  # a finished run says its test score once, however often it ends
    assert without_times(lines(run)) == without_times(lines(result.run))


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(work: Callable[[], object]) -> None:
    """Run a function in a fork, which is killed."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_no_point_of_a_curve_is_lost_when_the_run_is_killed(result, tmp_path, monkeypatch):
    """TensorBoard writes in a thread with a queue, which is lost with the process."""
    run, written = tmp_path / "run", RecordWriter.write

    def slowly(writer: RecordWriter, data: bytes) -> None:
        time.sleep(0.3 if (run / "state" / "step-00000020").exists() else 0.0)
        written(writer, data)

    monkeypatch.setattr(RecordWriter, "write", slowly)
    # right behind the state of step 25
    killed(lambda: train(run, callback=at(25, kill), save_every=5, threads=1))
    monkeypatch.undo()
    train(run, resume=str(run), save_every=5, threads=1)
    found, straight = curves(run), curves(result.run)
    assert found.Tags() == straight.Tags()
    for tag in straight.Tags()["scalars"]:
        assert [p.step for p in found.Scalars(tag)] == [p.step for p in straight.Scalars(tag)], tag
    assert without_times(lines(run)) == without_times(lines(result.run))


@pytest.mark.parametrize("where", ["validation", "after the row"])
def test_an_epoch_whose_validation_is_killed_is_not_lost_and_has_one_row(
    result, tmp_path, monkeypatch, where
):
    """The last step is saved; the validation is repeated, with the results of a straight run."""
    run = tmp_path / "run"

    def kill_in_the_second(*_: object) -> None:
        if (run / "state" / "step-00000020").exists():
            kill()

    callback = on(after_evaluation_batch=kill_in_the_second)
    if where == "after the row":
        callback = None
        save = "vitkit.training.saving.Save.after_epoch"
        original = resolve_name(save)
        monkeypatch.setattr(save, lambda *asked: (kill_in_the_second(), original(*asked)))
    killed(lambda: train(run, callback=callback))
    monkeypatch.undo()
    second = int(time.time())  # event files are in the order of the second in their names
    wait_until(lambda: int(time.time()) > second)
    train(run, resume=str(run))
    assert "resuming from step 20" in (run / "train.log").read_text()
    assert end_of(run) == end_of(result.run)
    assert without_times(lines(run)) == without_times(lines(result.run))
    assert without_times(table(run)) == without_times(table(result.run))
    found, straight = curves(run), curves(result.run)
    for tag in straight.Tags()["scalars"]:
        # the point of the epoch may be drawn twice, as the same one
        points = {p.step: p.value for p in found.Scalars(tag)}
        wanted = {p.step: p.value for p in straight.Scalars(tag)}
        assert points.keys() == wanted.keys(), tag
        assert points == wanted or tag.startswith(("perf/", "system/")), tag


def test_what_the_end_of_a_run_draws_is_there_once(tmp_path):
    """The end is reached twice, and a longer run follows."""
    short = {"warmup_epochs": 0.5}
    run = train(tmp_path / "run", epochs=1, **short).run
    train(run, resume=str(run), epochs=1, **short)
    assert {p.step for p in curves(run).Scalars("test/top1")} == {10}
    assert [row["step"] for row in lines(run) if row["kind"] == "test"] == [10]
    train(run, resume=str(run), epochs=2, **short)
    assert {p.step for p in curves(run).Scalars("test/top1")} == {10, 20}
    assert [row["step"] for row in lines(run) if row["kind"] == "test"] == [10, 20]
    log = (run / "train.log").read_text()
    assert log.count("evaluated once") == 1
    assert log.count("images, evaluated at an earlier end of this run, best weights") == 1
    assert "images, evaluated again (with other weights after step 10), best weights" in log


def test_a_run_of_many_epochs_prints_some_of_them_and_logs_all(tmp_path, capsys):
    images = np.arange(20 * 64).reshape(20, 8, 8).astype(np.uint8)
    vitkit.train(
        (images, np.arange(20) % 2), output=tmp_path / "run", epochs=60, batch_size=8, workers=0,
        spec={"image_size": 8, "patch_size": 4, "width": 16, "depth": 1, "num_heads": 2},
        save_every=1000, log_histograms=False, log_examples=False, plots=False, report=False,
    )  # fmt: skip
    printed = re.findall(r"^epoch +\d+/60 .*", capsys.readouterr().out, flags=re.MULTILINE)
    logged = re.findall(r" epoch +\d+/60 .*", (tmp_path / "run/train.log").read_text())
    assert len(logged) == 60
    assert 30 <= len(printed) < 60
    assert printed[-1].startswith("epoch  60/60")
    best = [line for line in logged if line.endswith("best")]
    assert len([line for line in printed if line.endswith("best")]) == len(best) > 0


@pytest.mark.parametrize("left", ["", "epoch,st", "epoch,step,lr"])
def test_a_header_that_was_cut_short_is_written_again(tmp_path, left):
    run = RunFolder(tmp_path)
    run.metrics.write_text(left)
    metric_files.drop_rows_after(run, 10)
    metric_files.add_row(run, {"epoch": 1, "step": 20, "lr": 0.5})
    assert run.metrics.read_text() == "epoch,step,lr\n1,20,0.5\n"


def test_what_is_damaged_in_the_files_of_metrics_does_not_hinder_a_resumed_run(tmp_path):
    run = RunFolder(tmp_path)
    test = '{"kind": "test", "step": 8}\n'
    run.lines.write_text(f'{test}{{"kind": "st\x00\n[3]\n{{"kind": "test", "step": null}}\n')
    run.metrics.write_text("epoch,step\n1,5\n2\n3,?\n4,20\n")
    assert metric_files.tested_at(run) == [8]
    metric_files.drop_rows_after(run, 10)
    assert run.lines.read_text() == test
    assert run.metrics.read_text() == "epoch,step\n1,5\n"
    run.metrics.write_text("loss\n1\n")
    with pytest.raises(vitkit.OutputError, match=r"metrics\.csv has no column step"):
        metric_files.drop_rows_after(run, 10)
    with pytest.raises(vitkit.DataError, match=r"metrics\.csv has no column epoch"):
        vitkit.LearningCurves.read(tmp_path)


def test_a_number_that_is_not_finite_is_null(tmp_path):
    run = RunFolder(tmp_path)
    metric_files.add_line(run, "step", {"step": 1, "a": float("nan"), "b": float("inf"), "c": 0.5})
    assert lines(tmp_path) == [{"kind": "step", "step": 1, "a": None, "b": None, "c": 0.5}]


# What a run prints: lines without a terminal, a bar on one.


def test_without_a_terminal_a_line_comes_now_and_then(tmp_path, monkeypatch, capsys):
    train(tmp_path / "rarely", quiet=False)
    assert "  step " not in capsys.readouterr().out  # the run is shorter than `now and then`
    monkeypatch.setattr("vitkit.training.monitoring.run_log.PLAIN", 0.0)
    train(tmp_path / "often", quiet=False)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    printed = [line for line in out.splitlines() if "  step " in line]
    assert len(printed) == 30
    assert printed[14].startswith("epoch 2/3  step 15/30  loss ")
    for word in (" images/s  data wait ", "%  ", " GB  ", " left"):
        assert word in printed[14]
    assert printed[-1].endswith("0:00:00 left")


def test_the_bar_cuts_neither_steps_nor_the_time_left_on_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    bar = Display(total=12_510, done=0, quiet=False)
    status = "loss 1.058  3,265 images/s  data wait 13%  10.4 GB"
    bar.show(1234, "epoch 123/160", status, 7204.0)
    bar.start()
    bar.stop()
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "epoch 123/160" in shown
    assert "1234/12510 2:00:04 left  loss 1.058  3,265 images/s" in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


def test_a_file_name_is_printed_as_it_is(capsys):
    """Colons around a word are not the name of an emoji."""
    Display(total=1, done=0, quiet=False).print("skipped photos/:cat:/[bold]1.jpg")
    assert capsys.readouterr().out == "skipped photos/:cat:/[bold]1.jpg\n"


# Curves that go to wandb and mlflow, with fakes of both.


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


def test_without_tensorboard_a_run_has_its_other_files(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    run = train(tmp_path / "run", epochs=1, warmup_epochs=0.5).run
    assert not (run / "tensorboard").exists()
    assert (run / "metrics.csv").read_text().count("\n") == 2


@pytest.mark.parametrize("name", ["init", "log", "finish"])
def test_a_signal_while_a_service_works_is_no_failure_of_it(tmp_path, service, monkeypatch, name):
    def stopped(*_: object, **__: object) -> None:
        raise vitkit.Interrupted(signal.SIGTERM, "stopped by SIGTERM")

    monkeypatch.setattr(sys.modules["wandb"], name, stopped)
    with pytest.raises(vitkit.Interrupted):
        train(tmp_path / "run", logger=("wandb",), epochs=1, warmup_epochs=0.5)
