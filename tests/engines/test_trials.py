"""Which engines are tried, by whom, and where no trial can be made."""

from __future__ import annotations

import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_checkpoint import save_noisy

import vitkit
from vitkit.engines import trials as make_trials
from vitkit.engines import trials as trial
from vitkit.engines import trials as trial_cache
from vitkit.engines.child import ChildResult
from vitkit.errors import SettingError

NOWHERE = "/dev/null/folder"
"""A folder that no user can make."""
MANY = 10**12
"""Images from which trials are worth their time, even with a tiny model."""


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    return save_noisy(tmp_path / "model.safetensors", ["cat", "dog", "owl"], std=0.3)


def some_images(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(3).integers(0, 256, (count, 16, 24, 3), np.uint8))


def test_a_named_compile_is_tried_in_a_child_process(checkpoint, monkeypatch):
    monkeypatch.setattr(make_trials, "run_child", lambda *_, **__: ChildResult(reason="it hangs"))
    # the cache alone must be writable
    monkeypatch.setattr(tempfile, "tempdir", NOWHERE)
    with pytest.raises(SettingError, match=r"\(compile float32: it hangs\); pass --engine torch"):
        vitkit.Predictor.from_checkpoint(checkpoint, engine="compile")


def test_of_two_first_calls_the_second_waits_for_the_trials_of_the_first(checkpoint, monkeypatch):
    waits = threading.Event()
    tried: list[str] = []

    def crash(function: str, *arguments: str, seconds: float) -> ChildResult:
        tried.append(arguments[2])
        assert waits.wait(60)
        return ChildResult(reason="ended by SIGFPE")

    def report(line: str) -> None:
        if line == "another process tries the engines on this model; waiting for it":
            waits.set()

    def call() -> str:
        options = vitkit.EngineOptions(engine="openvino", report=report)
        with pytest.raises(SettingError) as raised:
            vitkit.Predictor.from_checkpoint(checkpoint, engine=options)
        return str(raised.value)

    monkeypatch.setattr(make_trials, "run_child", crash)
    with ThreadPoolExecutor(2) as pool:
        messages = [future.result() for future in [pool.submit(call) for _ in range(2)]]
    assert tried == ["openvino"]
    assert messages[0] == messages[1]
    assert "openvino float32: ended by SIGFPE" in messages[0]


def test_where_all_trials_fail_auto_is_torch_and_tries_again_after_a_day(checkpoint, monkeypatch):
    tried: list[str] = []
    lines: list[str] = []

    def hang(function: str, *arguments: str, seconds: float) -> ChildResult:
        tried.append(arguments[2])
        return ChildResult(reason=f"no answer in {seconds:.3g} s")

    def choose() -> str:
        options = vitkit.EngineOptions(images=MANY, report=lines.append)
        return vitkit.Predictor.from_checkpoint(checkpoint, engine=options).forward.name

    monkeypatch.setattr(make_trials, "run_child", hang)
    assert choose() == "torch"
    assert "without a trial, as all have failed (torch float32: no answer in" in lines[-1]
    count = len(tried)
    assert count == len(set(tried)) >= 3
    assert choose() == "torch"
    assert len(tried) == count, "known from now on"
    now = time.time()
    monkeypatch.setattr(trial_cache.time, "time", lambda: now + 25 * 3600)
    assert choose() == "torch"
    assert len(tried) == 2 * count


def test_features_are_not_judged_by_their_largest_number(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "TRIAL_SECONDS", 0.0)
    loaded = vitkit.load(checkpoint)
    spec = loaded.model.spec
    images = torch.zeros(120, spec.in_channels, *spec.image_size)
    for classes, judged in ((3, 120), (0, 0)):
        loaded.model.reset_classifier(classes)
        vitkit.save(tmp_path / trial.MODEL_FILE, loaded.model, preprocess=loaded.preprocess)
        with torch.no_grad():
            trial.write_inputs(tmp_path, images, loaded.model.eval()(images), None)
        made = trial.run_trial(str(tmp_path), str(tmp_path), "torch", "float32", "1")
        assert made["reason"] == ""
        assert made["agreement"]["images"] == judged, "images of which classes are compared"


def test_without_a_cache_auto_is_torch(checkpoint, monkeypatch):
    monkeypatch.setenv("VITKIT_CACHE", NOWHERE)
    lines: list[str] = []
    options = vitkit.EngineOptions(images=MANY, report=lines.append)
    predictor = vitkit.Predictor.from_checkpoint(checkpoint, engine=options)
    assert predictor.forward.name == "torch"
    assert len(lines) == 1
    assert "the cache cannot be written" in lines[0]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_that_no_file_describes_is_compared_here(checkpoint, wrong):
    loaded = vitkit.load(checkpoint)

    def hook(module: torch.nn.Module, inputs: object, outputs: torch.Tensor) -> torch.Tensor:
        return (3 if wrong and torch.compiler.is_exporting() else 2) * outputs

    loaded.model.blocks[0].mlp.fc1.register_forward_hook(hook)
    if wrong:
        with pytest.raises(SettingError, match="cannot run this model: its logits differ by"):
            vitkit.Predictor.from_checkpoint(loaded, engine="openvino")
        return
    images = some_images(3)
    logits = vitkit.Predictor.from_checkpoint(loaded, engine="openvino").logits(images)
    expected = vitkit.Predictor.from_checkpoint(loaded, engine="torch").logits(images)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
