"""The log of a run, read back from its files; tiny runs through the public interface."""

from __future__ import annotations

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
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer.record_writer import RecordWriter
from training.faulty import on, stopping_at

import vitkit
from vitkit.data.sources.open import open_dataset, with_validation
from vitkit.errors import Interrupted, MissingExtraError
from vitkit.training import callbacks
from vitkit.training import train as session
from vitkit.training.callbacks import report
from vitkit.training.config.merging import layered
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.monitoring import metric_files, terminal
from vitkit.training.monitoring.bottleneck import ImageCost, Machine, diagnose
from vitkit.training.monitoring.image_grids import example_predictions
from vitkit.training.monitoring.throughput import TimingSnapshot
from vitkit.training.recipes import recipe_settings
from vitkit.training.state import save
from vitkit.training.state.save import newest_state, run_hash
from vitkit.training.trainer import Callback
from vitkit.weights.formats.vitkit import DESCRIBED

TINY = {
    "recipe": "digits", "epochs": 3, "save_every": 20, "warmup_epochs": 1.0, "amp": "off",
    "batch_size": 64, "quiet": True, "device": "cpu", "log_interval": 5, "threads": 1,
    "spec": {"depth": 1, "width": 32, "patch_size": 2},
}  # fmt: skip
TIMES = {"images_per_s", "data_wait", "seconds", "memory"}
"""Numbers that no two runs have alike."""


def train(
    output: Path, data: str = "digits", callback: Callable[[], Callback] | None = None, **settings
):
    asked = {"data": data, "output": str(output)} | TINY | settings
    config = TrainConfig(**layered(recipe_settings("digits"), asked))
    return session.train(config, [callback] if callback else [])


def lines(run: Path) -> list[dict]:
    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    text = (run / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def table(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def curves(run: Path) -> EventAccumulator:
    everything = {"histograms": 0, "images": 0, "scalars": 0}
    return EventAccumulator(str(run / "tensorboard"), size_guidance=everything).Reload()


def without_times(rows: list[dict]) -> list[dict]:
    return [{name: v for name, v in row.items() if name not in TIMES} for row in rows]


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> session.TrainResult:
    return vitkit.train("digits", output=str(tmp_path_factory.mktemp("runs") / "one"), **TINY)


def test_metrics_jsonl_has_every_logged_step_every_epoch_and_the_test(result):
    found = lines(result.run)
    assert [row["step"] for row in found if row["kind"] == "step"] == list(range(5, 61, 5))
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
    assert last.step == 60
    found = last.histogram_value
    assert (found.min, found.max) == pytest.approx((head.min().item(), head.max().item()))
    assert sum(found.bucket) == found.num == head.numel()
    assert found.sum_squares == pytest.approx(head.square().sum().item(), rel=1e-5)
    assert first.histogram_value.max != found.max  # the control: it was another one before


def test_example_predictions_are_the_model_s(result):
    *_, last = curves(result.run).Images("val/examples")
    best = vitkit.load(result.last)
    dataset = with_validation(open_dataset("digits"), 0.1, 0)
    cpu = torch.device("cpu")
    drawn = example_predictions(best.model, dataset, best.preprocess, cpu)
    shown = np.asarray(Image.open(io.BytesIO(last.encoded_image_string)))
    assert last.step == 60
    assert np.array_equal(shown, drawn)
    with torch.no_grad():
        best.model.head.weight.neg_()  # the control: another model, another image
    other = example_predictions(best.model, dataset, best.preprocess, cpu)
    assert not np.array_equal(shown, other)


def test_both_can_be_left_out(tmp_path):
    run = train(tmp_path / "run", log_histograms=False, log_examples=False, epochs=2).run
    tags = curves(run).Tags()
    assert (tags["histograms"], tags["images"]) == ([], [])


def stopped_and_torn(run: Path) -> Path:
    """Stop a run at step 47, then append later rows and incomplete lines to its files."""
    with pytest.raises(Interrupted):
        train(run, callback=stopping_at(47))
    with (run / "metrics.csv").open("a") as file:
        file.write("3,60,0.001,0.5,0.9,0.9,0.5,1,0.1,9\n3,60,0.0")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "epoch": 3, "step": 50, "lr": 1}\n{"kind": "step", "epo')
    return run


def test_a_torn_line_and_lines_from_beyond_the_state_are_gone_after_resume(result, tmp_path):
    run = stopped_and_torn(tmp_path / "run")
    train(run, resume=str(run))
    assert without_times(lines(run)) == without_times(lines(result.run))
    assert without_times(table(run)) == without_times(table(result.run))
    train(run, resume=str(run))  # a finished run says its test score once, however often it ends
    assert without_times(lines(run)) == without_times(lines(result.run))


def test_without_dropping_them_the_files_would_be_broken(tmp_path, monkeypatch):
    """Check that the test above would notice."""
    run = stopped_and_torn(tmp_path / "run")
    monkeypatch.setattr(session, "drop_rows_after", lambda run, step, **how: None)
    train(run, resume=str(run))
    with pytest.raises(json.JSONDecodeError):
        lines(run)
    assert len(table(run)) > 3


def killed_behind_a_state(output: Path) -> None:
    """Kill a run as soon as the state of step 45 exists; its event writer is slow."""
    written, before = RecordWriter.write, output / "state" / "step-00000040"

    def slowly(writer: RecordWriter, data: bytes) -> None:
        time.sleep(0.3 if before.exists() else 0.0)
        written(writer, data)

    def killed(*asked) -> None:
        save.save_state(*asked)
        if (output / "state" / "step-00000045").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    RecordWriter.write, callbacks.save.save_state = slowly, killed
    train(output, save_every=5, threads=1)


def test_no_point_of_a_curve_is_lost_when_the_run_is_killed(result, tmp_path):
    """TensorBoard writes in a thread with a queue, which is lost with the process."""
    run = tmp_path / "run"
    process = multiprocessing.get_context("fork").Process(target=killed_behind_a_state, args=(run,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    train(run, resume=str(run), save_every=5, threads=1)
    found, straight = curves(run), curves(result.run)
    assert found.Tags() == straight.Tags()
    for tag in straight.Tags()["scalars"]:
        assert [p.step for p in found.Scalars(tag)] == [p.step for p in straight.Scalars(tag)], tag
    assert without_times(lines(run)) == without_times(lines(result.run))


def killed_at_an_epoch_s_end(output: Path, where: str) -> None:
    """Kill a run while it validates the second epoch, or just after its row was written."""

    def kill(split: str) -> None:
        if (output / "state" / "step-00000040").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    def kill_after_the_row(folder, registry, step, world) -> bool:
        if step == 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return save.save_values(folder, registry, step, world)

    if where == "validation":
        train(output, callback=on(after_evaluation_batch=kill))
    else:
        callbacks.save.save_values = kill_after_the_row
        train(output)


@pytest.mark.parametrize("where", ["validation", "after the row"])
def test_an_epoch_whose_validation_is_killed_is_not_lost_and_has_one_row(result, tmp_path, where):
    """The last step is saved; the validation is repeated, with the results of a straight run."""
    run, fork = tmp_path / "run", multiprocessing.get_context("fork")
    process = fork.Process(target=killed_at_an_epoch_s_end, args=(run, where))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    time.sleep(1.0 - time.time() % 1.0)  # event files are in the order of the second in their names
    train(run, resume=str(run))
    assert "going on from step 40" in (run / "train.log").read_text()
    assert run_hash(newest_state(run / "state")[0]) == run_hash(
        newest_state(result.run / "state")[0]
    )
    assert without_times(lines(run)) == without_times(lines(result.run))
    assert without_times(table(run)) == without_times(table(result.run))
    found, straight = curves(run), curves(result.run)
    for tag in straight.Tags()["scalars"]:
        points = [(p.step, p.value) for p in found.Scalars(tag)]
        wanted = [(p.step, p.value) for p in straight.Scalars(tag)]
        assert [step for step, _ in points] == [step for step, _ in wanted], tag
        assert points == wanted or tag.startswith(("perf/", "system/")), tag


def test_what_the_end_of_a_run_draws_is_there_once(tmp_path):
    """Test a kill between the test score and the end, and a longer run that follows."""
    run = train(tmp_path / "run", epochs=1, warmup_epochs=0.5).run
    best = vitkit.load(run / "weights" / "best.safetensors")
    without = {name: v for name, v in best.metadata["metrics"].items() if name != "test"}
    rest = {name: v for name, v in best.metadata.items() if name not in DESCRIBED}
    train(run, resume=str(run), epochs=1, warmup_epochs=0.5)
    vitkit.save(run / "weights" / "best.safetensors", best.model, preprocess=best.preprocess,
                classes=best.classes, **rest | {"metrics": without})  # fmt: skip
    train(run, resume=str(run), epochs=1, warmup_epochs=0.5)
    assert [p.step for p in curves(run).Scalars("test/top1")] == [20]
    assert len(curves(run).Images("val/confusion_matrix")) == 1
    assert [row["step"] for row in lines(run) if row["kind"] == "test"] == [20]
    train(run, resume=str(run), epochs=2, warmup_epochs=0.5)
    assert [p.step for p in curves(run).Scalars("test/top1")] == [40]
    assert [row["step"] for row in lines(run) if row["kind"] == "test"] == [20, 40]
    said = (run / "train.log").read_text()
    assert said.count("read once") == 2
    assert "images, read again (with other weights after step 20), best weights" in said


@pytest.mark.parametrize("left", ["", "epoch,st", "epoch,step,lr"])
def test_a_header_that_was_cut_short_is_written_again(tmp_path, left):
    run = session.RunFolder(tmp_path)
    run.metrics.write_text(left)
    metric_files.drop_rows_after(run, 10)
    metric_files.add_row(run, {"epoch": 1, "step": 20, "lr": 0.5})
    assert run.metrics.read_text() == "epoch,step,lr\n1,20,0.5\n"


def test_a_number_that_is_not_finite_is_null(tmp_path):
    run = session.RunFolder(tmp_path)
    metric_files.add_line(run, "step", {"step": 1, "a": float("nan"), "b": float("inf"), "c": 0.5})
    assert lines(tmp_path) == [{"kind": "step", "step": 1, "a": None, "b": None, "c": 0.5}]


def test_without_a_terminal_a_line_comes_now_and_then(tmp_path, monkeypatch, capsys):
    train(tmp_path / "rarely", quiet=False)
    assert "  step " not in capsys.readouterr().out  # the run is shorter than `now and then`
    monkeypatch.setattr(terminal, "PLAIN", 0.0)
    train(tmp_path / "often", quiet=False)
    said = [line for line in capsys.readouterr().out.splitlines() if "  step " in line]
    assert len(said) == 60
    assert said[29].startswith("epoch 2/3  step 30/60  loss ")
    for word in (" images/s  data wait ", "%  ", " GB  ", " left"):
        assert word in said[29]
    assert said[-1].endswith("0:00:00 left")


def test_on_a_terminal_there_is_a_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(terminal, "REFRESH", 0.0)
    train(tmp_path / "run", quiet=False, epochs=2)
    shown = capsys.readouterr().out
    assert "\x1b[" in shown
    assert "━" in shown
    assert "39/40" in shown
    assert "images/s  data wait" in shown


def test_the_bar_cuts_neither_steps_nor_the_time_left_on_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    bar = terminal.Display(total=12_510, done=0, quiet=False)
    status = "loss 1.058  3,265 images/s  data wait 13%  10.4 GB"
    bar.show(1234, "epoch 123/160", status, 7204.0)
    bar.start()
    bar.stop()
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().out)
    assert "epoch 123/160" in shown
    assert "1234/12510 2:00:04 left  loss 1.058  3,265 images/s" in shown
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown


class Service:
    """A fake of wandb and mlflow that records its calls, and fails on request."""

    def __init__(self) -> None:
        self.told: list[tuple[dict, int]] = []
        self.began: list[dict] = []
        self.ended: list[object] = []
        self.fails_after = 10**9

    def tell(self, values: dict, step: int) -> None:
        if len(self.told) >= self.fails_after:
            raise ConnectionError("no route")
        self.told.append((values, step))

    def begin(self, **settings) -> SimpleNamespace:
        self.began.append(settings)
        return SimpleNamespace(info=SimpleNamespace(run_id="m-1"))


@pytest.fixture
def service(monkeypatch) -> Service:
    made, wandb, mlflow = Service(), ModuleType("wandb"), ModuleType("mlflow")
    wandb.Error = type("Error", (Exception,), {})
    wandb.run = SimpleNamespace(id="w-1")
    wandb.init, wandb.log = made.begin, made.tell
    wandb.finish = lambda exit_code: made.ended.append(exit_code)
    mlflow.MlflowException = type("MlflowException", (Exception,), {})
    mlflow.active_run = lambda: "the run that was started"
    mlflow.start_run, mlflow.log_metrics = made.begin, made.tell
    mlflow.log_params = lambda settings: made.began.append(settings)
    mlflow.end_run = made.ended.append
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    return made


@pytest.mark.parametrize(("name", "end"), [("wandb", 0), ("mlflow", "FINISHED")])
def test_a_service_is_told_the_curves(tmp_path, service, name, end):
    run = train(tmp_path / "run", logger=(name,)).run
    events = curves(run)
    told = {(tag, step): v for values, step in service.told for tag, v in values.items()}
    drawn = {
        (tag, p.step): p.value for tag in events.Tags()["scalars"] for p in events.Scalars(tag)
    }
    assert told == pytest.approx(drawn)
    assert ("val/top1", 40) in told
    assert service.ended == [end]
    assert json.dumps(service.began).count('"batch_size": 64') == 1


@pytest.mark.parametrize(("name", "key", "known"), [("wandb", "id", "w-1"),
                                                    ("mlflow", "run_id", "m-1")])  # fmt: skip
def test_a_resumed_run_is_the_same_run_to_a_service(tmp_path, service, name, key, known):
    with pytest.raises(Interrupted):
        train(tmp_path / "run", callback=stopping_at(30), logger=(name,))
    assert service.ended in ([1], ["FAILED"])
    first, *_ = service.began
    train(tmp_path / "run", resume=str(tmp_path / "run"), logger=(name,))
    assert (first[key], service.began[-1][key]) == (None, known)


def test_a_service_that_fails_ends_no_run(tmp_path, service):
    service.fails_after = 4
    ended = train(tmp_path / "run", logger=("wandb",))
    assert ended.stopped == "all 3 epochs"
    assert (ended.run / "train.log").read_text().count("wandb failed: no route; the run goes") == 1
    assert len(service.told) == 4


def test_a_service_that_is_not_installed_is_named_before_anything_is_done(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(MissingExtraError, match="--logger mlflow: mlflow is not installed; pip"):
        train(tmp_path / "run", logger=("mlflow",))
    assert not (tmp_path / "run").exists()


def pace(waiting: float, working: float, cores: float, batch: int = 100) -> TimingSnapshot:
    """Make the timing of ten steps from seconds per step."""
    return TimingSnapshot(
        10 * (waiting + working), 10, 10 * batch, 10 * waiting, 10 * working, 10 * cores
    )


CASES = {
    # A device of its own: 100 images of 8 ms in 0.1 s need 8 workers; that is 0.9 core-seconds,
    # a step of 0.1 s on 16 cores.
    "many cores": (pace(0.7, 0.1, 0.1), ImageCost(6e-3, 2e-3, 0.0), Machine(16, 1, True),
                   "--workers 8 would bring a step to about 0.10 s"),
    # Two cores, and a model on the processor that uses both: 0.5 + 0.6 core-seconds on 2 cores.
    "two cores": (pace(0.6, 0.25, 0.5), ImageCost(1e-3, 5e-3, 0.0), Machine(2, 0),
                  "--workers 2 would bring a step to about 0.55 s"),
    # The same with the two workers: what was foretold has come, and is all there is.
    "no cure": (pace(0.15, 0.4, 0.5), ImageCost(1e-4, 59e-4, 0.0), Machine(2, 2),
                "the 2 cores are busy all the time: no number of workers would help"),
    "one core": (pace(0.6, 0.5, 0.5), ImageCost(1e-4, 59e-4, 0.0), Machine(1, 0),
                 "the core is busy all the time: no number of workers would help"),
    # Nothing to compute, and still a long wait.
    "slow disk": (pace(0.8, 0.1, 0.1), ImageCost(0.0, 1e-4, 0.0), Machine(16, 4, True),
                  "the cores are not busy: limited by disk or network"),
    # Decoding is nearly all of it, and both cores are busy.
    "decoding": (pace(0.55, 0.25, 0.5), ImageCost(10e-3, 1e-3, 0.0), Machine(2, 2),
                 "--cache, which saves decoding, to about 0.30 s"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_cure_follows_from_what_was_measured(name):
    found, cost, machine, cure = CASES[name]
    assert diagnose(found, cost, machine).endswith(cure)


def large_images(place: Path) -> Path:
    """Write 64 PNGs of 300 x 300: slow to decode compared to a tiny model."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 300, 300, 3), dtype=np.uint8)
    for number, pixels in enumerate(noise):
        folder = place / "train" / ("low", "high")[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png", compress_level=1)
    return place


def diagnosed(run: Path) -> str:
    (line,) = [line for line in (run / "train.log").read_text().splitlines() if "after 30" in line]
    return line


@pytest.mark.parametrize("cores", [1, 4])
def test_a_run_that_waits_for_images_says_so_and_what_would_help(tmp_path, monkeypatch, cores):
    monkeypatch.setattr(report, "available_cores", lambda: cores)
    data = str(large_images(tmp_path / "data"))
    few = {"batch_size": 4, "max_steps": 31, "workers": 0, "log_examples": False}
    line = diagnosed(train(tmp_path / "run", data=data, **few).run)
    assert "of the time waits for images (" in line
    assert ("--workers" in line) == (cores == 4)
    assert cores == 4 or "; --cache" in line  # decoding is most of it


def test_a_run_that_hardly_waits_says_so(tmp_path):
    """As the test above, with as many images in memory, and a larger model."""
    larger = {"spec": {"depth": 2, "width": 64, "patch_size": 1}, "max_steps": 31}
    line = diagnosed(train(tmp_path / "run", **larger).run)
    (share,) = re.findall(r"(\d+)\s?%", line.partition("after 30 steps")[2])[:1]
    assert int(share) < 50
    assert "--cache" not in line
