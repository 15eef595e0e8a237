"""Tiny runs on the embedded digits whose log is read back."""

import json
from collections.abc import Callable
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training.tiny_runs import trained

from vitkit import Callback

TINY = {
    "recipe": "digits", "epochs": 3, "save_every": 10, "warmup_epochs": 1.0, "amp": "off",
    "batch_size": 128, "quiet": True, "device": "cpu", "log_interval": 5, "threads": 1,
    "plots": False, "report": False,
    "spec": {"depth": 1, "width": 32, "patch_size": 4},
}  # fmt: skip
"""10 steps an epoch, 30 of the whole run."""


def train(
    output: Path, data: str = "digits", callback: Callable[[], Callback] | None = None, **settings
):
    asked = {"data": data, "output": str(output)} | TINY | settings
    return trained(asked, callback)


def curves(run: Path) -> EventAccumulator:
    # by time: the names that TensorBoard sorts are alike for files of one second but for a number
    files = sorted((run / "tensorboard").iterdir(), key=lambda file: file.stat().st_mtime_ns)
    for number, file in enumerate(files):
        file.rename(file.with_name(f"{number:03d}.tfevents"))
    everything = {"histograms": 0, "images": 0, "scalars": 0}
    return EventAccumulator(str(run / "tensorboard"), size_guidance=everything).Reload()


def lines(run: Path) -> list[dict]:
    def refuse(word: str) -> float:
        raise AssertionError(f"{word} is no JSON")

    text = (run / "metrics.jsonl").read_text()
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
