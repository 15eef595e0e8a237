"""Figures that a run leaves: they show metrics.csv, and never end a run."""

import csv
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from plots.figures import drawn_part, svg_text
from training import logged_runs
from training.tiny_runs import end_of

import vitkit
from vitkit import Callback, DataError, Trainer, TrainResult, cli

train = partial(logged_runs.train, plots=True, log_histograms=False, log_examples=False)
HEADER = "epoch,step,lr,train_loss,val_top1,val_loss\n"


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs") / "straight")


def column(run: Path, name: str) -> list[float]:
    with (run / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file)]


def lines_of(figure) -> dict[tuple[str, str], tuple[list[float], list[float]]]:
    """(title of the axis, label of the line) -> its values."""
    return {
        (axes.get_ylabel(), line.get_label()): (
            np.asarray(line.get_xdata(), float).tolist(),
            np.asarray(line.get_ydata(), float).tolist(),
        )
        for axes in figure.axes
        for line in axes.lines
    }


def test_a_run_leaves_its_curves_and_they_are_those_of_metrics_csv(result):
    for name in ("curves", "confusion_matrix"):
        assert (result.run / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (result.run / f"{name}.svg").read_bytes().startswith(b"<?xml")
    figure = result.plot()
    found, epochs = lines_of(figure), [1.0, 2.0, 3.0]
    assert found["loss (nats)", "training"] == (epochs, column(result.run, "train_loss"))
    assert found["loss (nats)", "validation"] == (epochs, column(result.run, "val_loss"))
    top1 = column(result.run, "val_top1")
    x, per_cent = found["top-1 accuracy (%)", "validation"]
    assert x == epochs
    assert per_cent == pytest.approx([100 * value for value in top1])
    ((_, rates),) = [line for (title, _), line in found.items() if title == "learning rate"]
    assert rates == column(result.run, "lr")
    best = int(vitkit.load(result.best).metadata["epoch"])
    star = f"best: epoch {best}, {100 * top1[best - 1]:.1f} %"
    assert found["top-1 accuracy (%)", star] == ([best], [pytest.approx(100 * top1[best - 1])])
    text = svg_text(figure)
    words = ("epoch", "loss(nats)", "top-1accuracy(%)", "learningrate", "".join(star.split()))
    for word in words:
        assert word in text
    assert min(drawn_part(figure)) > 0.9
    assert result.curves.best_epoch == best


def test_a_resumed_run_has_the_same_files_bit_for_bit(result, tmp_path):
    stopped = train(tmp_path / "run", max_steps=15).run
    assert lines_of(vitkit.LearningCurves.read(stopped).plot())["loss (nats)", "training"][0] == [1]
    train(stopped, resume=str(stopped))
    for name in ("curves.png", "curves.svg", "confusion_matrix.png", "confusion_matrix.svg"):
        assert (stopped / name).read_bytes() == (result.run / name).read_bytes(), name


def test_without_plots_a_run_is_the_same_but_for_the_figures(result, tmp_path):
    run = train(tmp_path / "run", plots=False)
    files = {file.name for file in result.run.iterdir()}
    drawn = {f"{name}.{kind}" for name in ("curves", "confusion_matrix") for kind in ("png", "svg")}
    assert {file.name for file in run.run.iterdir()} == files - drawn
    assert run.metrics == result.metrics
    assert end_of(run.run) == end_of(result.run)
    assert [axes.get_ylabel() for axes in run.plot().axes] == [
        axes.get_ylabel() for axes in result.plot().axes
    ]


def test_a_run_leaves_the_predictions_that_eval_writes(result, tmp_path):
    table = tmp_path / "predictions.csv"
    words = ["eval", str(result.run), "digits", "--device", "cpu", "--predictions", str(table)]
    assert cli.run(words) == 0
    assert (result.run / "predictions.csv").read_bytes() == table.read_bytes()
    assert table.read_bytes().count(b"\n") == 1 + 359


def test_a_search_shows_the_curves_of_its_winner(result, tmp_path):
    search = TrainResult(tmp_path, tmp_path / "best.safetensors", result.last)
    assert search.curves.run == result.run


def test_without_validation_there_is_no_accuracy(tmp_path):
    run = train(tmp_path / "run", epochs=1, val_fraction=0.0, warmup_epochs=0.5)
    figure = run.plot()
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss (nats)", "learning rate"]
    assert (run.run / "curves.png").exists()
    assert run.curves.best_epoch is None
    assert "testsplit" in confusion_words(run.run)


def confusion_words(run: Path) -> str:
    """The words that the confusion matrix of a run shows, without spaces."""
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (run / "confusion_matrix.svg").read_text())
    return "".join("".join(texts).split())


def test_the_confusion_matrix_is_of_the_split_of_the_last_score(result, tmp_path):
    right = round(359 * result.metrics["test"]["top1"])
    assert f"testsplit:{right}of359imagesright" in confusion_words(result.run)
    untested = train(tmp_path / "run", epochs=1, warmup_epochs=0.5, test=False)
    assert "validationsplit:" in confusion_words(untested.run)


def test_a_run_of_a_few_steps_has_no_curves_and_says_so_when_asked(tmp_path):
    run = train(tmp_path / "run", max_steps=2)
    assert not (run.run / "curves.png").exists()
    assert "warning" not in (run.run / "train.log").read_text()
    with pytest.raises(DataError, match=r"no epoch is complete in metrics\.csv, so there is no"):
        run.plot()
    assert not run.best.exists()
    shown = run._repr_html_()
    assert str(run.last) in shown
    assert str(run.best) not in shown


def test_a_probe_has_a_confusion_matrix_and_no_curves(result, tmp_path):
    run = vitkit.train("digits", output=tmp_path / "run", probe="linear", quiet=True,
                       device="cpu", pretrained=result.best, report=False)  # fmt: skip
    assert (run.run / "confusion_matrix.svg").exists()
    assert not (run.run / "curves.png").exists()
    assert "warning" not in (run.run / "train.log").read_text()
    with pytest.raises(DataError, match="a probe"):
        run.plot()


def test_a_figure_that_fails_is_a_line_and_the_run_is_complete(tmp_path, monkeypatch):
    for name in ("vitkit.plots.curves", "vitkit.plots.confusion"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it raises
    run = train(tmp_path / "run", epochs=1, warmup_epochs=0.5)
    log = (run.run / "train.log").read_text()
    for name in ("curves.png", "confusion_matrix.png"):
        assert f"warning: {name} is not written: ModuleNotFoundError: import of" in log
        assert not (run.run / name).exists()
    assert "test" in run.metrics
    assert "ended after 1 epoch; best weights" in log
    assert run.best.exists()


def test_training_does_not_wait_for_matplotlib(tmp_path, monkeypatch):
    """All that a run imports is there before it begins; in its epochs, matplotlib cannot be."""
    code = "import sys, vitkit.training.train; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    looked = []

    class Look(Callback):
        def before_epoch(self, trainer: Trainer) -> None:
            for name in [*sys.modules]:
                if name.startswith(("vitkit.plots.", "matplotlib")) and "html" not in name:
                    monkeypatch.delitem(sys.modules, name)
            monkeypatch.setitem(sys.modules, "matplotlib", None)

        def after_epoch(self, trainer: Trainer) -> None:
            looked.append(sys.modules["matplotlib"])
            monkeypatch.undo()

    run = train(tmp_path / "run", callback=Look, epochs=1, warmup_epochs=0.5)
    assert looked == [None]
    assert (run.run / "curves.png").exists()


def written(folder: Path, rows: str) -> Path:
    folder.mkdir()
    (folder / "metrics.csv").write_text(HEADER + rows)
    return folder


def test_values_that_are_not_finite_are_gaps(tmp_path):
    rows = "1,10,0.1,2.5,0.5,2\n2,20,0.1,nan,0.75,inf\n3,30,0.1,1.5,0.75,1.25\n"
    curves = vitkit.LearningCurves.read(written(tmp_path / "run", rows))
    found = lines_of(curves.plot())
    loss = found["loss (nats)", "training"][1]
    assert loss[::2] == [2.5, 1.5]
    assert np.isnan(loss[1])
    assert np.isnan(found["loss (nats)", "validation"][1][1])
    assert curves.best_epoch == 3  # of two equal ones that with the lower loss
    assert curves.plot().axes[0].lines[0].get_marker() == "o"


def test_an_epoch_is_there_once_and_half_a_row_is_not(tmp_path):
    rows = "1,10,0.1,2.5,0.5,2\n2,20,0.1,2.25,0.75,1\n2,20,0.1,2,0.75,1\n3,30,0.1,1.7"
    curves = vitkit.LearningCurves.read(written(tmp_path / "run", rows))
    assert curves.columns["epoch"].tolist() == [1, 2]
    assert curves.columns["train_loss"].tolist() == [2.5, 2.0]


@pytest.mark.parametrize("epochs", [1, 3, 30, 300])
def test_curves_of_any_length_fill_their_figure(tmp_path, epochs):
    rows = "".join(
        f"{n},{n},{1e-3 / n},{2 / n},{1 - 1 / n},{3 / n}\n" for n in range(1, epochs + 1)
    )
    figure = vitkit.LearningCurves.read(written(tmp_path / "run", rows)).plot()
    assert min(drawn_part(figure)) > 0.9
    box, size = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) >= 0
    assert (box.x1, box.y1) <= tuple(size)
    assert all(tick.is_integer() for axes in figure.axes for tick in axes.get_xticks())
