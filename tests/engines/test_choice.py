"""The choice of an engine: by trials in child processes, some of which crash or compute wrongly."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_checkpoint import save_noisy

import vitkit
from vitkit.data.datasets.splitting import with_validation
from vitkit.data.images.preprocess import fit, normalise
from vitkit.engines import choose as checkpoint_engine
from vitkit.engines.choose import calibration_images
from vitkit.engines.trials import Trial, compare_logits, prune, report_line, sample_images
from vitkit.errors import DataError, ImageError, SettingError

CLASSES = ["cat", "dog", "owl"]
CRASHING = "import os, signal\nos.kill(os.getpid(), signal.SIGFPE)\n"
WRONG = """
import numpy as np

class Ports:
    def __getattr__(self, name):
        return lambda *_, **__: self
    outputs = property(lambda self: [self])
    data = np.full((8, 3), 7, np.float32)

def __getattr__(name):
    return lambda *_, **__: Ports()
"""
"""A runtime that answers every call, with 7 for each logit of eight images."""


class StopHereError(Exception):
    """Raised in place of building an engine."""


NUMBERS = itertools.count(1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A model of its own for each test: trials are remembered by the weights."""
    std = 0.3 + next(NUMBERS) / 1000
    return save_noisy(tmp_path / "model.safetensors", CLASSES, std=std)


def some_images(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(3).integers(0, 256, (count, 16, 24, 3), np.uint8))


def put_first(monkeypatch: pytest.MonkeyPatch, folder: Path, content: str) -> None:
    """Let child processes import another `openvino`."""
    package = folder / "packages/openvino"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(content, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(CRASHING, "ended by SIGFPE", id="crashing", marks=pytest.mark.soak),
        pytest.param(WRONG, "its logits differ by [0-9.]+; at most [0-9.e-]+", id="wrong"),
    ],
)
def test_an_engine_that_fails_here_is_refused_with_the_reason(
    checkpoint, tmp_path, monkeypatch, content, reason
):
    put_first(monkeypatch, tmp_path, content)
    message = rf"no engine can be used here \(openvino float32: {reason}.*; pass --engine torch"
    with pytest.raises(SettingError, match=message):
        vitkit.Predictor.from_checkpoint(checkpoint, engine="openvino")
    # known from now on: no child process is started, which would find the real one
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(SettingError, match=message):
        vitkit.Predictor.from_checkpoint(checkpoint, engine="openvino")


def test_openvino_gives_the_same_logits_and_features(checkpoint, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    lines: list[str] = []
    options = vitkit.EngineOptions(engine="openvino", report=lines.append)
    images = some_images(5)
    predictor = vitkit.Predictor.from_checkpoint(checkpoint, engine=options, batch_size=2)
    expected = vitkit.Predictor.from_checkpoint(checkpoint, engine="torch").logits(images)
    torch.testing.assert_close(predictor.logits(images), expected, rtol=1e-4, atol=1e-4)
    assert len(lines) == 2
    assert lines[0].startswith("trying 1 engine on this model")
    assert lines[1].startswith("engine openvino, float32: ")
    # the trial was made once
    vitkit.Predictor.from_checkpoint(checkpoint, engine=options)
    assert len(lines) == 2


def test_features_are_those_before_the_head(checkpoint):
    model = vitkit.load(checkpoint).model
    images = some_images(3)
    features = vitkit.embed(checkpoint, images)
    assert features.shape == (3, model.spec.width)
    logits = vitkit.Predictor.from_checkpoint(checkpoint).logits(images)
    with torch.inference_mode():
        torch.testing.assert_close(model.head(torch.from_numpy(features)), logits)


def test_short_work_needs_no_trial(checkpoint):
    lines: list[str] = []
    options = vitkit.EngineOptions(precision="auto", images=20, report=lines.append)
    predictor = vitkit.Predictor.from_checkpoint(checkpoint, engine=options)
    assert (predictor.forward.name, predictor.forward.precision) == ("torch", "float32")
    assert len(lines) == 1
    assert "float32 without a trial" in lines[0], "a precision that is not chosen is named"


def test_bfloat16_changes_logits_a_little(checkpoint):
    images = some_images(4)
    expected = vitkit.Predictor.from_checkpoint(checkpoint).logits(images)
    logits = vitkit.Predictor.from_checkpoint(checkpoint, precision="bfloat16").logits(images)
    assert not torch.equal(logits, expected)
    assert torch.nn.functional.cosine_similarity(logits, expected).min() > 0.8


def test_merging_is_answered_with_where_it_is(checkpoint):
    place = "it is in examples/research/token_merging.py now"
    for function in (vitkit.Predictor.from_checkpoint, vitkit.embed, vitkit.evaluate):
        arguments = () if function == vitkit.Predictor.from_checkpoint else ("digits",)
        with pytest.raises(TypeError, match=f"there is no argument 'merge'; {place}"):
            function(checkpoint, *arguments, merge=8)
    with pytest.raises(AttributeError, match=f"no attribute 'merge_tokens'; {place}"):
        vitkit.merge_tokens  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engine": "openvin"}, "engine 'openvin' does not exist \\(did you mean 'openvino'"),
        ({"precision": "int4"}, "precision 'int4' does not exist"),
        ({"engine": "onnxruntime", "precision": "bfloat16"}, "has no precision bfloat16"),
        ({"precision": "int8"}, "precision int8 needs images to calibrate with"),
        ({"calibrate": "digits"}, "--calibrate has no effect with precision float32"),
    ],
)
def test_wrong_settings(checkpoint, arguments, message):
    with pytest.raises(SettingError, match=message):
        vitkit.Predictor.from_checkpoint(checkpoint, **arguments)


def test_too_few_images_to_calibrate_with(checkpoint):
    data = {"train": (np.stack(some_images(8)), [0, 1] * 4)}
    with pytest.raises(DataError, match="has 8 images in train; at least 16 are needed"):
        vitkit.Predictor.from_checkpoint(checkpoint, precision="int8", calibrate=data)


def test_a_report_in_one_line():
    trials = [
        Trial("torch", "float32", 0.1, 0.2),
        Trial("openvino", "float32", 3.0, 0.1),
        Trial("compile", "float32", reason="no answer in 60 s"),
    ]
    assert report_line(trials, trials[1]).startswith(
        "engine openvino, float32: 10.0 images/s (2.0 times as fast as torch); "
        "compile not usable here: no answer in 60 s"
    )
    # for few images, a fast start counts more
    assert trials[0].seconds(10) < trials[1].seconds(10)
    assert trials[0].seconds(100) > trials[1].seconds(100)


def test_agreement_has_bounds():
    logits = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    assert compare_logits(logits + 1e-5, logits).refusal("float32") == ""
    assert "differ" in compare_logits(logits + 1e-2, logits).refusal("float32")
    assert compare_logits(logits * 1.01, logits).refusal("int8") == ""
    assert "cosine" in compare_logits(logits.flip(0), logits).refusal("bfloat16")
    assert "NaN" in compare_logits(logits * float("nan"), logits).refusal("int8")
    close = torch.ones(200, 1000) * 10
    close[:, 0] += 1e-3
    other = close.clone()
    other[:50, 1] += 2e-3
    assert "same class as float32 for 75.0%" in compare_logits(other, close).refusal("int8")


def test_images_of_trials_have_the_spectrum_of_photographs():
    images = sample_images(4, 3, (64, 96))
    assert images.shape == (4, 3, 64, 96)
    torch.testing.assert_close(images.mean((2, 3)), torch.zeros(4, 3), rtol=0, atol=1e-4)
    neighbours = (images[..., 1:] * images[..., :-1]).mean()
    assert neighbours > 0.7, "white noise has 0"
    assert torch.equal(images, sample_images(4, 3, (64, 96)))


def test_models_used_longest_ago_are_forgotten_first(tmp_path):
    for number, name in enumerate(("old", "middle", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.bin").write_bytes(bytes(100))
        os.utime(tmp_path / name, (number, number))
    prune(tmp_path, most_bytes=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["middle", "new"]
    prune(tmp_path, most_bytes=10)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_images_that_training_validated_on_are_not_calibrated_with(checkpoint):
    images = np.repeat(np.arange(100, dtype=np.uint8), 16 * 24 * 3).reshape(100, 16, 24, 3)
    labels = [number % 2 for number in range(100)]
    data = vitkit.open_dataset({"train": (images, labels), "test": (images[:2] + 100, [0, 1])})
    trained_on = with_validation(data, 0.2)
    metadata = {"recipe": {"val_fraction": 0.2}, "data": {"fingerprint": trained_on.fingerprint}}
    loaded = vitkit.load(checkpoint)
    plain = calibration_images(data, loaded)
    loaded = dataclasses.replace(loaded, metadata=metadata)
    assert len(plain) == 100
    used = calibration_images(data, loaded)
    assert len(used) == 80
    validation = trained_on.splits["val"]
    for index in range(len(validation)):
        pixels = fit(validation.read(index), loaded.preprocess)
        image = normalise(torch.from_numpy(pixels[None]), loaded.preprocess)
        assert not (used == image).flatten(1).all(1).any()


def test_images_that_training_left_out_are_not_calibrated_with(checkpoint, tmp_path):
    for number, pixels in enumerate(some_images(20)):
        place = tmp_path / "photos/train" / ("cat", "dog")[number % 2] / f"{number:02}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place)
    place.write_bytes(b"broken")
    loaded = vitkit.load(checkpoint)
    with pytest.raises(ImageError, match=r"19\.png"):
        calibration_images(tmp_path / "photos", loaded)
    loaded = dataclasses.replace(loaded, metadata={"recipe": {"bad_images": "skip"}})
    assert len(calibration_images(tmp_path / "photos", loaded)) == 19


def test_the_number_of_images_is_known_where_a_function_gets_them(checkpoint, monkeypatch):
    expected: list[int | None] = []

    def stop(model: vitkit.ViT, options: vitkit.EngineOptions, **_: object) -> None:
        expected.append(options.images)
        raise StopHereError

    monkeypatch.setattr(checkpoint_engine, "choose_engine", stop)
    images = some_images(3)
    for given in (images, iter(images)):
        with pytest.raises(StopHereError):
            vitkit.embed(checkpoint, given)
    assert expected == [3, None]


@pytest.mark.parametrize(
    "arguments", [{"engine": "openvino"}, {"precision": "int8", "calibrate": "digits"}]
)
def test_a_device_has_no_effect_with_engines_of_the_processor(checkpoint, arguments):
    options = vitkit.EngineOptions(**arguments)
    message = "--device cuda has no effect with .*, which runs on the CPU"
    with pytest.raises(SettingError, match=message):
        vitkit.Predictor.from_checkpoint(checkpoint, engine=options, device="cuda")
