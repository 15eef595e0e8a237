"""The choice of an engine: by trials in child processes, some of which crash or compute wrongly."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_checkpoint import save_noisy

import vitkit
from vitkit import SettingError, process
from vitkit.data.datasets.splitting import with_validation
from vitkit.engines import choose

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
MANY = 10**12
"""Images from which trials are worth their time, even with a tiny model."""


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return save_noisy(tmp_path / "model.safetensors", CLASSES, std=0.3)


def some_images(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(3).integers(0, 256, (count, 16, 24, 3), np.uint8))


def predictor(checkpoint: str | vitkit.Checkpoint, lines: list[str], **options) -> vitkit.Predictor:
    engine = vitkit.EngineOptions(report=lines.append, **options)
    return vitkit.Predictor.from_checkpoint(checkpoint, engine=engine, batch_size=2)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        pytest.param(CRASHING, "ended by SIGFPE", id="crashing", marks=pytest.mark.soak),
        pytest.param(
            WRONG,
            "its logits differ by [0-9.]+ of their spread; at most [0-9.]+",
            id="wrong",
            marks=pytest.mark.soak,
        ),
    ],
)
def test_an_engine_that_fails_here_is_refused_with_the_reason(
    checkpoint, tmp_path, monkeypatch, content, reason
):
    package = tmp_path / "packages/openvino"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(content, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    message = rf"no engine can be used here \(openvino float32: {reason}.*; pass --engine torch"
    with pytest.raises(SettingError, match=message):
        vitkit.Predictor.from_checkpoint(checkpoint, engine="openvino")


def test_openvino_gives_the_same_logits_by_one_trial(checkpoint):
    lines: list[str] = []
    images = some_images(5)
    expected = vitkit.Predictor.from_checkpoint(checkpoint, engine="torch").logits(images)
    for _ in range(2):
        found = predictor(checkpoint, lines, engine="openvino").logits(images)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert len(lines) == 2, "the trial was made once"
    assert lines[0].startswith("trying 1 engine on this model")
    assert lines[1].startswith("engines: openvino float32 ")


def test_auto_takes_the_shortest_time_with_the_start(checkpoint, monkeypatch):
    trials = {"torch": (0.1, 0.2), "openvino": (30.0, 0.1), "onnxruntime": (20.0, 0.3)}
    tried: list[str] = []

    def run(function, name, request, *_, seconds: float) -> choose.Trial:
        tried.append(name)
        if name == "compile":
            raise process.ChildError("no answer in 60 s")
        return choose.Trial(name, request.precision, *trials[name])

    monkeypatch.setattr(process, "run_in_child", run)
    lines: list[str] = []
    assert predictor(checkpoint, lines, images=MANY).forward.name == "openvino"
    assert "torch float32 5.0 images/s" in lines[-1]
    assert "compile float32: no answer in 60 s" in lines[-1]
    assert predictor(checkpoint, lines, images=200).forward.name == "torch"
    assert predictor(checkpoint, lines, engine="openvino").forward.name == "openvino"
    assert tried == ["torch", "compile", "openvino", "onnxruntime"]
    # what has failed is tried again where it is asked for
    with pytest.raises(SettingError, match=r"\(compile float32: no answer in 60 s\); pass"):
        predictor(checkpoint, lines, engine="compile")
    assert tried[-1] == "compile"


def test_where_all_trials_fail_auto_is_torch(checkpoint, monkeypatch):
    def hang(*_, seconds: float) -> None:
        raise process.ChildError(f"no answer in {seconds:.3g} s")

    monkeypatch.setattr(process, "run_in_child", hang)
    lines: list[str] = []
    found = predictor(checkpoint, lines, images=MANY, precision="auto")
    assert (found.forward.name, found.forward.precision) == ("torch", "float32")
    assert "torch float32: no answer in" in lines[-2]
    assert "as all trials have failed" in lines[-1]


@pytest.mark.parametrize("images", [20, 1000])
def test_short_work_needs_no_trial(checkpoint, images):
    lines: list[str] = []
    found = predictor(checkpoint, lines, precision="auto", images=images)
    assert (found.forward.name, found.forward.precision) == ("torch", "float32")
    assert len(lines) == 1
    assert "float32 without a trial" in lines[0], "a precision that is not chosen is named"


def test_without_a_cache_auto_is_torch(checkpoint, monkeypatch):
    monkeypatch.setenv("VITKIT_CACHE", "/dev/null/folder")
    lines: list[str] = []
    assert predictor(checkpoint, lines, images=MANY).forward.name == "torch"
    assert lines[0].startswith("no engine is tried: cannot write /dev/null/folder/engines/")
    with pytest.raises(SettingError, match=r"openvino cannot be tried.*VITKIT_CACHE names"):
        predictor(checkpoint, lines, engine="openvino")


def test_a_model_that_no_file_describes_is_not_tried(checkpoint):
    loaded = vitkit.load(checkpoint)
    loaded.model.blocks[0].mlp.fc1.register_forward_hook(lambda *call: 2 * call[2])
    assert predictor(loaded, [], images=MANY).forward.name == "torch"
    with pytest.raises(SettingError, match="engine openvino cannot be tried: the model: "):
        predictor(loaded, [], engine="openvino")


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
        ({"engine": "openvino", "device": "cuda"}, "--device cuda has no effect with --engine"),
        ({"precision": "int8", "calibrate": "digits", "device": "cuda"},
         "--device cuda has no effect with --precision int8"),
        ({"precision": "int8", "calibrate": {"train": (np.stack(some_images(8)), [0, 1] * 4)}},
         "has 8 images in train or val; at least 16 are needed"),
    ],
)  # fmt: skip
def test_wrong_settings(checkpoint, arguments, message):
    with pytest.raises(vitkit.UserError, match=message):
        vitkit.Predictor.from_checkpoint(checkpoint, **arguments)


def test_agreement_has_bounds():
    logits = torch.randn(200, 5, generator=torch.Generator().manual_seed(0))
    for changed, precision, reason in (
        (logits + 1e-5, "float32", ""),
        (logits + 1e-2, "float32", "at most 0.001 is expected"),
        (logits * 1.01, "int8", ""),
        (logits.flip(0), "bfloat16", "of their spread; at most 0.05 is"),
        (logits * float("nan"), "int8", "differ by nan"),
    ):
        found = choose.disagreement(changed, logits, precision)
        assert bool(found) == bool(reason)
        assert reason in found


def test_models_used_longest_ago_are_forgotten_first(checkpoint, tmp_path, monkeypatch):
    def run(function, name, request, *_, seconds: float) -> choose.Trial:
        return choose.Trial(name, request.precision, 0.1, 0.1)

    monkeypatch.setattr(process, "run_in_child", run)
    monkeypatch.setattr(choose, "MOST_BYTES", 2_000)
    old = tmp_path / "cache/engines/old"
    old.mkdir(parents=True)
    (old / "model.bin").write_bytes(bytes(1_900))
    predictor(checkpoint, [], engine="compile")
    (kept,) = old.parent.iterdir()
    assert sorted(file.name for file in kept.iterdir()) == ["trials.json", "trials.json.sha256"]


def test_images_that_training_validated_on_are_not_calibrated_with(checkpoint):
    images = np.repeat(np.arange(100, dtype=np.uint8), 16 * 24 * 3).reshape(100, 16, 24, 3)
    labels = [number % 2 for number in range(100)]
    data = vitkit.open_dataset({"train": (images, labels), "test": (images[:2] + 100, [0, 1])})
    trained_on = with_validation(data, 0.2)
    metadata = {"recipe": {"val_fraction": 0.2}, "data": {"fingerprint": trained_on.fingerprint}}
    loaded = vitkit.load(checkpoint)
    assert len(choose.calibration_images(data, loaded)[0]) == 100
    loaded = dataclasses.replace(loaded, metadata=metadata)
    used = {int(image[0, 0, 0]) for image in choose.calibration_images(data, loaded)[0]}
    validation = trained_on.splits["val"]
    held_out = {int(validation.read(index)[0, 0, 0]) for index in range(len(validation))}
    assert (len(used), len(held_out), used & held_out) == (80, 20, set())


def test_images_that_training_left_out_are_not_calibrated_with(checkpoint, tmp_path):
    for number, pixels in enumerate(some_images(20)):
        place = tmp_path / "photos/train" / ("cat", "dog")[number % 2] / f"{number:02}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place)
    place.write_bytes(b"broken")
    loaded = vitkit.load(checkpoint)
    with pytest.raises(vitkit.ImageError, match=r"19\.png"):
        choose.calibration_images(tmp_path / "photos", loaded)
    loaded = dataclasses.replace(loaded, metadata={"recipe": {"bad_images": "skip"}})
    images, data, split = choose.calibration_images(tmp_path / "photos", loaded)
    assert (len(images), data, split) == (19, "photos", "train")


def test_the_number_of_images_is_known_where_a_function_gets_them(checkpoint, monkeypatch):
    expected: list[int | None] = []
    choose_engine = choose._candidates

    def note(options: vitkit.EngineOptions) -> list[choose.Pair]:
        expected.append(options.images)
        return choose_engine(options)

    monkeypatch.setattr(choose, "_candidates", note)
    images = some_images(3)
    for given in (images, iter(images)):
        assert len(vitkit.embed(checkpoint, given)) == 3
    assert expected == [3, None]
