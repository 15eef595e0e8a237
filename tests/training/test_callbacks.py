"""A callback that ends a run, at any event: all is saved, and resuming gives the same bits."""

import csv
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from training.faulty import on
from training.tiny_runs import STEPS, TINY, counters, end_of, last_state, run

import vitkit
from vitkit import Interrupted, Trainer, UserCodeError

TIMES = {"images_per_s", "data_wait", "seconds"}
"""Columns that no two runs have alike."""
PLACES = [
    ("on_start", 0),
    ("before_epoch", 20),
    ("before_step", 24),
    ("after_step", 24),
    ("after_step", 20),  # the last step of an epoch, which is still validated
    ("after_epoch", 20),
    ("on_end", STEPS),
]
"""Events, and the steps made there; an epoch has 10."""


class HaltError(Exception):
    """An error that vitkit does not know."""


def table(output: Path) -> list[dict[str, str]]:
    """The rows of metrics.csv."""
    with (output / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: v for name, v in row.items() if name not in TIMES} for row in rows]


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """The run that nothing happens to."""
    output = tmp_path_factory.mktemp("straight") / "run"
    run(output)
    return output


def disturb(output: Path, event: str, step: int, how: str) -> None:
    """Train until a callback ends the run at an event."""

    def act(trainer: Trainer, *_: Any) -> None:
        if trainer.progress.step != step:
            return
        if how == "raised":
            raise HaltError("enough")
        trainer.end("a test", error=HaltError("enough") if how == "end with an error" else None)

    if how == "end":
        assert run(output, on(**{event: act})).stopped == "a test"
    elif how == "end with an error":
        with pytest.raises(HaltError, match="enough"):
            run(output, on(**{event: act}))
    else:
        expected = (
            rf"the callback On raised HaltError in {event}: enough; the run stopped at step "
            rf"{step}, everything is saved: fix it and resume with: vitkit train --resume "
        )
        with pytest.raises(UserCodeError, match=expected):
            run(output, on(**{event: act}))


@pytest.mark.parametrize(
    ("event", "step", "how"),
    [*((*place, "raised") for place in PLACES), ("after_step", 24, "end"),
     ("after_step", 20, "end with an error")],
)  # fmt: skip
def test_nothing_is_lost_at_any_event(straight, tmp_path, monkeypatch, event, step, how):
    monkeypatch.setattr(
        "vitkit.training.saving.SAVED_EVERY", 1e9
    )  # of the epochs only the first saves
    output = tmp_path / "run"
    disturb(output, event, step, how)
    assert counters(last_state(output))["step"] == step
    last = vitkit.load(output / "weights" / "last.safetensors")
    assert last.metadata["epoch"] == step / 10
    if step:
        assert table(output) == table(straight)[: step // 10]
    resumed = run(output, resume=str(output))
    assert resumed.stopped == "all 3 epochs"
    assert end_of(output) == end_of(straight)
    assert table(output) == table(straight)


def test_the_other_callbacks_are_called_at_the_event_that_ends_the_run(tmp_path):
    seen: list[str] = []

    class Halt(vitkit.Callback):
        def after_step(self, trainer, result):
            if trainer.progress.step == 3:
                raise HaltError("enough")

    class Count(vitkit.Callback):
        def after_step(self, trainer, result):
            seen.append(f"step {trainer.progress.step}")

        def on_end(self, trainer):
            seen.append("end")

    with pytest.raises(UserCodeError, match=r"Halt raised HaltError in after_step: enough"):
        vitkit.train("digits", output=tmp_path / "run", callbacks=[Halt(), Count()], **TINY)
    assert seen == ["step 1", "step 2", "step 3", "end"]


def test_the_first_of_several_errors_is_raised(tmp_path):
    def halt(trainer: Trainer, *_: Any) -> None:
        if trainer.progress.step == STEPS:  # where the run ends anyway
            trainer.end(error=HaltError("the first"))
            trainer.end(error=HaltError("the second"))

    with pytest.raises(HaltError, match="the first"):
        run(tmp_path / "run", on(after_step=halt))


def test_a_run_that_stopped_in_validation_is_resumed_with_on_start(tmp_path):
    """A callback may open in `on_start` what it writes to in `after_epoch`."""
    stop = on(after_evaluation_batch=lambda split: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="stopped at step 10 of 30; everything is saved"):
        run(tmp_path / "run", stop)
    seen: list[tuple[str, int]] = []

    def note(event: str) -> Callable[..., None]:
        return lambda trainer, *_: seen.append((event, trainer.progress.step))

    events = {name: note(name) for name in ("on_start", "before_epoch", "after_epoch", "on_end")}
    run(tmp_path / "run", on(**events), resume=str(tmp_path / "run"), max_steps=20)
    assert seen == [
        ("on_start", 10), ("after_epoch", 10), ("before_epoch", 10), ("after_epoch", 20),
        ("on_end", 20),
    ]  # fmt: skip


def test_patience_waits_for_the_validation_that_was_missing(tmp_path):
    """The epoch that is still to be validated may be the better one."""

    def stop_in_third_epoch(split: str) -> None:
        if progress[0].step == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)

    def one_epoch_was_worse(trainer: Trainer, *_: Any) -> None:
        progress[:] = [trainer.progress]
        if trainer.progress.step == 20:
            trainer.progress.stale = 1

    progress: list[Any] = []
    disturbed = on(before_step=one_epoch_was_worse, after_evaluation_batch=stop_in_third_epoch)
    with pytest.raises(Interrupted, match="stopped at step 30 of 30"):
        run(tmp_path / "run", disturbed)
    resumed = run(tmp_path / "run", resume=str(tmp_path / "run"), epochs=4, patience=1)
    assert resumed.stopped == "all 4 epochs"
