"""The library that resizes crops is part of a run, and an older run keeps the one it had."""

import os
import signal
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from training.faulty import at
from training.tiny_runs import edit_manifest, end_of, last_state, run

import vitkit
from vitkit import Interrupted, SettingError, TrainConfig

CROPPED = {
    "epochs": 1, "warmup_epochs": 0.0, "crop_scale": 0.3, "log_examples": False,
    "log_histograms": False, "model_ema": False, "test": False, "max_steps": 4,
}  # fmt: skip


def stop(trainer: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def forget_resizer(run: Path) -> None:
    """Make a run look as one that was begun before the setting existed."""
    config = run / "config.yaml"
    lines = config.read_text().splitlines(keepends=True)
    config.write_text("".join(line for line in lines if not line.startswith("resizer:")))
    edit_manifest(last_state(run), lambda manifest: manifest["settings"].pop("resizer"))


def resizer_of(run: Path) -> str:
    return YAML(typ="safe", pure=True).load(run / "config.yaml")["resizer"]


def test_a_run_keeps_its_resizer_and_an_older_one_has_pillow(tmp_path: Path) -> None:
    assert TrainConfig(data="digits").resizer == "torch"
    straight = tmp_path / "straight"
    run(straight, resizer="pillow", **CROPPED)
    older = tmp_path / "older"
    with pytest.raises(Interrupted):
        run(older, at(2, stop), resizer="pillow", **CROPPED)
    forget_resizer(older)
    with pytest.raises(SettingError, match="resizer: pillow -> torch"):
        vitkit.train("digits", resume=str(older), resizer="torch")
    vitkit.train("digits", resume=str(older))
    assert resizer_of(older) == "pillow"
    assert end_of(older) == end_of(straight)
