"""Signals that stop a run."""

import os
import signal

import numpy as np
import pytest
import torch
from training.faulty import at, on
from training.tiny_runs import QUICK, end_of, run

import vitkit
from vitkit.process import raise_on_signal, stop_on_signal
from vitkit.training.distillation import Teacher


def sigterm(of_what: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_ends_validation_and_the_test_after_the_batch(tmp_path, monkeypatch):
    """Both are long in real runs; the epoch is saved before, and what was stopped is made again."""
    monkeypatch.setattr("vitkit.training.run.BATCH_SIZE", 16)
    short = {"epochs": 1, "warmup_epochs": 0.5}
    read: list[str] = []

    def during_split(split: str) -> None:
        read.append(split)
        if split == target and read.count(split) == 2:
            sigterm(split)

    for target, batches in (("val", 2), ("test", 9 + 2)):
        read.clear()
        with pytest.raises(vitkit.Interrupted, match="at step 10 of 10; everything is") as stop:
            run(tmp_path / "run", on(after_evaluation_batch=during_split), resume="auto", **short)
        assert stop.value.signum == signal.SIGTERM
        assert len(read) == batches
        last = vitkit.load(tmp_path / "run" / "weights" / "last.safetensors")
        assert ("val" in last.metadata["metrics"]) == (target == "test")
    ended = run(tmp_path / "run", resume="auto", **short)
    assert set(ended.metrics) == {"val", "test"}
    run(tmp_path / "straight", **short)
    assert end_of(tmp_path / "run") == end_of(tmp_path / "straight")


def killing(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """A metric during which a signal comes, once it has the 359 images of test."""
    if len(labels) == 359:
        sigterm(labels)
    return 0.0


def test_a_probe_that_a_signal_stops_promises_nothing(tmp_path):
    short = {"epochs": 1, "warmup_epochs": 0.5, "max_steps": 1}
    weights = run(tmp_path / "run", **short).last
    with pytest.raises(vitkit.Interrupted) as stop:
        vitkit.train(
            "digits", output=tmp_path / "probe", probe="linear", pretrained=weights,
            metrics=[killing], quiet=True, device="cpu", plots=False, report=False,
        )  # fmt: skip
    assert stop.value.signum == signal.SIGTERM
    assert str(stop.value) == f"stopped by SIGTERM; no state is saved in {tmp_path}/probe"


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGUSR1])
def test_a_closed_terminal_and_slurm_s_warning_are_signals_too(tmp_path, signum):
    signalled = at(3, lambda trainer: os.kill(os.getpid(), signum))
    before = signal.signal(signum, signal.SIG_DFL)  # the tests may run under nohup
    try:
        with pytest.raises(vitkit.Interrupted, match="at step 4 of 30; everything is") as stop:
            run(tmp_path / "run", signalled)
    finally:
        signal.signal(signum, before)
    assert stop.value.signum == signum


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signal() as flag:
            os.kill(os.getpid(), signal.SIGHUP)
        assert flag.signum is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_ctrl_c_leaves_at_once_with_one_line(tmp_path):
    """Within the step; the state of the steps before is the newest."""

    def twice(trainer: vitkit.Trainer) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(vitkit.Interrupted) as stop:
        run(tmp_path / "run", at(7, twice), workers=2)
    assert stop.value.signum == signal.SIGINT
    assert str(stop.value) == (
        f"stopped at once by a second signal, SIGINT; the newest state is {tmp_path}/run/state/"
        f"step-00000005, resume with: vitkit train --resume {tmp_path}/run"
    )


def stopped_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    sigterm(logits)
    return logits.sum()


def stopped_callback() -> vitkit.Callback:
    sigterm("built")
    return vitkit.Callback()


def stopped_teacher() -> torch.nn.Module:
    sigterm("built")
    return torch.nn.Identity()


class StoppedTeacher(torch.nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        sigterm(images)
        return images.new_zeros(len(images), 10)


class StoppedImages(torch.utils.data.Dataset):
    classes = ("a", "b")

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[object, int]:
        sigterm(index)
        return np.zeros((8, 8, 3), np.uint8), index % 2


@pytest.mark.parametrize(
    ("data", "settings"),
    [
        ("digits", {"loss": stopped_loss}),
        ("digits", {"callbacks": [stopped_callback]}),
        ("digits", {"teacher": f"{__name__}:stopped_teacher"}),
        ("digits", {"teacher": Teacher(StoppedTeacher(), vitkit.Preprocess(image_size=8))}),
        (StoppedImages(), {}),
    ],
)  # fmt: skip
def test_a_signal_is_no_error_of_the_code_that_it_interrupts(tmp_path, data, settings):
    with raise_on_signal(), pytest.raises(vitkit.Interrupted) as stop:
        vitkit.train(data, output=tmp_path / "run", epochs=1, max_steps=1, **QUICK, **settings)
    assert stop.value.signum == signal.SIGTERM
