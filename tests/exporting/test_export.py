"""Exports of every format: equal to torch, usable from the file alone, refused when worse."""

import errno
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from export_material import CLASSES, TEMPERATURE, blobs, save_checkpoint, save_images
from PIL import Image

import vitkit
from vitkit import CheckpointError, OutputError, cli, process
from vitkit.exporting import check, files

ENDINGS = {"onnx": ".onnx", "openvino": ".xml", "torch": ".pt2", "aoti": ".pt2"}
LATER = pytest.mark.soak
EXPORTS = [
    pytest.param("onnx", False, id="onnx", marks=LATER),
    pytest.param("onnx", True, id="onnx-pixels", marks=LATER),
    pytest.param("openvino", False, id="openvino", marks=LATER),
    pytest.param("openvino", True, id="openvino-pixels"),
    pytest.param("torch", False, id="torch", marks=LATER),
    pytest.param("torch", True, id="torch-pixels", marks=LATER),
    pytest.param("aoti", True, id="aoti-pixels", marks=LATER),
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("weights") / "tiny.safetensors")


@pytest.fixture(scope="module")
def photos(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_images(tmp_path_factory.mktemp("photos"), checkpoint, {"train": 120, "val": 40})


@pytest.mark.parametrize(("to", "with_preprocessing"), EXPORTS)
def test_an_export_is_the_checkpoint_again(
    checkpoint, photos, tmp_path, monkeypatch, to, with_preprocessing
):
    monkeypatch.chdir(tmp_path)
    for name in ("onnx", "openvino", "torch"):  # files of the user's, which are not imported
        (tmp_path / f"{name}.py").write_text("raise SystemExit", encoding="utf-8")
    out = tmp_path / "made" / f"tiny{ENDINGS[to]}"
    report = vitkit.export(
        checkpoint, out, to=to, data=photos, with_preprocessing=with_preprocessing
    )
    figures = json.loads(Path(f"{out}.json").read_text())
    assert figures["images"] == 40
    assert figures["torch"]["top1"] == figures["exported"]["top1"] == 1.0
    assert figures["relative_logit_error"] < 1e-2
    assert report.figures == figures
    assert f"top-1 on val of {photos.name}: 100.00%, by torch 100.00%" in str(report)
    assert {file.name for file in out.parent.iterdir()} == {file.name for file in report.files}

    images = [blobs(seed) for seed in range(900, 905)]
    wanted = vitkit.Predictor.from_checkpoint(checkpoint, engine="torch")(images, top_k=3)
    found = vitkit.Predictor(out, trust_code=True)(images, top_k=3)
    for one, other in zip(wanted, found, strict=True):
        assert one.label == other.label
        assert other.probability == pytest.approx(one.probability, abs=5e-3)
    predictor = vitkit.Predictor(out, trust_code=True)
    assert predictor.temperature == TEMPERATURE
    alone = [predictor.logits([image]) for image in images]
    with ThreadPoolExecutor(3) as pool:  # as a server calls it
        together = pool.map(predictor.logits, [[image] for image in images * 8])
        for logits, expected in zip(together, alone * 8, strict=True):
            assert torch.equal(logits, expected)

    scores = vitkit.evaluate(out, photos, trust_code=out.suffix == ".pt2")
    wanted = vitkit.evaluate(checkpoint, photos)
    assert (scores["images"], scores["top1"]) == (40, 1.0)
    assert scores["calibrated_loss"] == pytest.approx(wanted["calibrated_loss"], abs=5e-3)

    shown = Image.fromarray(images[0])
    shown.save(tmp_path / "a.png")
    shown.putalpha(Image.linear_gradient("L").resize(shown.size))
    shown.save(tmp_path / "clear.png")
    (tmp_path / "alone.py").write_text(report.script, encoding="utf-8")
    assert len(report.script.splitlines()) <= 36
    assert "vitkit." not in report.script.replace("vitkit.json", "")
    done = subprocess.run(
        [sys.executable, "-I", "-W", "ignore", "alone.py", "a.png", "clear.png"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    predictor = vitkit.Predictor.from_checkpoint(checkpoint, engine="torch")
    for line, wanted in zip(
        done.stdout.splitlines(),
        predictor([tmp_path / "a.png", tmp_path / "clear.png"]),
        strict=True,
    ):
        name, label, probability = line.split()
        assert (name, label) == (Path(wanted.image).name, wanted.label)
        assert float(probability) == pytest.approx(wanted.probability, abs=5e-3)


@pytest.mark.soak
@pytest.mark.parametrize("with_preprocessing", [False, True])
def test_int8_runs_in_int8(checkpoint, photos, tmp_path, with_preprocessing):
    data = calibrate = str(photos)
    if with_preprocessing:  # objects serve as well as folders do
        data, calibrate = ({split: Photos(photos / split)} for split in ("val", "train"))
    report = vitkit.export(
        checkpoint, tmp_path / "tiny.xml", to="openvino", data=data, int8=True,
        calibrate=calibrate, with_preprocessing=with_preprocessing, max_drop=10.0,
    )  # fmt: skip
    # the four linear layers of the one block, not the head
    assert report.figures["int8_layers"] == 4
    assert report.description.int8
    assert report.figures["calibration"]["images"] == 120
    assert "calibrated on 120 images of train" in str(report)
    assert report.figures["images"] == 40


class Photos:
    """The images of one split as a dataset of pairs."""

    classes = CLASSES

    def __init__(self, folder: Path) -> None:
        self.files = sorted(folder.glob("*/*.png"))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        file = self.files[index]
        return Image.open(file), self.classes.index(file.parent.name)


@pytest.mark.soak
@pytest.mark.parametrize(("to", "precision"), [("openvino", "float16"), ("torch", "bfloat16")])
def test_half_precision_is_near(checkpoint, tmp_path, to, precision):
    out = tmp_path / f"tiny{ENDINGS[to]}"
    report = vitkit.export(checkpoint, out, to=to, precision=precision)
    assert 0 < report.figures["relative_logit_error"] < 0.1
    assert report.figures["agreement"] > 0.9


@pytest.mark.soak
def test_a_runtime_without_the_operators_is_named_in_one_line(checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match="ONNX Runtime cannot open it: ") as refused:
        vitkit.export(checkpoint, tmp_path / "a.onnx", to="onnx", precision="bfloat16")
    assert str(refused.value).startswith(f"{tmp_path / 'a.onnx'}: ")
    assert str(refused.value).endswith("; nothing is written: try another --to or --precision")
    assert "\n" not in str(refused.value)
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoint_itself_is_never_replaced(checkpoint, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"weights")
    loaded = replace(vitkit.load(checkpoint), path=tmp_path / "a.bin")
    with pytest.raises(OutputError, match=r"OUT .*a\.bin: this file is one of the inputs"):
        vitkit.export(loaded, tmp_path / "a.xml", to="openvino", overwrite=True)


def swapped(checkpoint: vitkit.Checkpoint) -> vitkit.Checkpoint:
    with torch.no_grad():
        for part in checkpoint.model.head.parameters():
            part.copy_(part.roll(1, 0))
    return checkpoint


def not_finite(checkpoint: vitkit.Checkpoint) -> vitkit.Checkpoint:
    checkpoint.model.head.bias.data[0] = torch.nan
    return checkpoint


def wrongly_normalised(checkpoint: vitkit.Checkpoint) -> vitkit.Checkpoint:
    checkpoint.model.patch_embed.proj.weight.data *= 255
    return checkpoint


@pytest.mark.parametrize(
    ("broken", "with_data", "message"),
    [
        pytest.param(
            wrongly_normalised, False, "logits differ from torch's by", id="input", marks=LATER
        ),
        pytest.param(swapped, True, "top-1 falls from 100.00% to", id="swapped", marks=LATER),
        pytest.param(not_finite, False, "NaN or infinity for 64 of 64", id="NaN", marks=LATER),
    ],
)
def test_a_broken_export_leaves_nothing(
    checkpoint, photos, tmp_path, monkeypatch, broken, with_data, message
):
    """The writer gets another model than the one that is compared with."""
    write = files.write_artefact

    def write_broken(given, *others):
        model = vitkit.load(checkpoint).model
        write(broken(replace(given, model=model)), *others)

    monkeypatch.setattr("vitkit.exporting.export.write_artefact", write_broken)
    with pytest.raises(CheckpointError, match=f"nothing is written: .*{message}"):
        vitkit.export(
            checkpoint, tmp_path / "new" / "tiny.pt2", to="torch",
            data=str(photos) if with_data else None,
        )  # fmt: skip
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "description", "message"),
    [
        ({}, {}, ""),
        ({"relative_logit_error": 2e-3}, {}, r"0\.002 of their spread \(bound 0\.001\)"),
        ({"relative_logit_error": float("nan")}, {}, "differ from torch's by nan"),
        ({"relative_logit_error": 1e-2}, {"with_preprocessing": True}, ""),
        ({"not_finite": 3}, {}, "NaN or infinity for 3 of 1,000 images"),
        ({"exported": {"top1": 0.896}}, {}, ""),
        ({"exported": {"top1": 0.894}}, {}, r"by 0\.60 points \(bound 0\.5\); raise --max-drop"),
        ({"exported": {"top1": 0.95}}, {}, ""),
        ({"relative_logit_error": 0.4, "int8_layers": 4}, {"int8": True}, ""),
        ({"int8_layers": 3}, {"int8": True}, "executes 3 of 4 linear layers of the blocks in int8"),
    ],
)
def test_what_is_worse_is_refused_with_the_figure(changes, description, message):
    figures = {
        "images": 1000, "not_finite": 0, "relative_logit_error": 1e-6, "agreement": 1.0,
        "torch": {"top1": 0.9}, "exported": {"top1": 0.9}, "int8_layers": 0,
    }  # fmt: skip
    plain = files.ArtefactDescription("openvino", vitkit.Preprocess(), CLASSES, 3, 1.0)
    arguments = (figures | changes, replace(plain, **description), 4, 0.5)
    if not message:
        check.refuse_worse(*arguments)
        return
    with pytest.raises(CheckpointError, match=message) as refused:
        check.refuse_worse(*arguments)
    assert "\n" not in str(refused.value)


def test_a_runtime_that_dies_is_one_line(checkpoint, tmp_path, monkeypatch):
    def crash(function, *_: object, seconds: float) -> None:
        raise process.ChildError("ended by SIGSEGV")

    monkeypatch.setattr(process, "run_in_child", crash)
    message = r"a\.pt2: in a process of its own: ended by SIGSEGV; nothing is written: try another"
    with pytest.raises(CheckpointError, match=message):
        vitkit.export(checkpoint, tmp_path / "a.pt2", to="torch")
    assert list(tmp_path.iterdir()) == []


def test_only_what_is_written_is_an_error_of_out(checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "a.pt2"

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("vitkit.exporting.export.write_artefact", fail)
        with pytest.raises(OutputError, match=r"cannot write .*a\.pt2: "):
            vitkit.export(checkpoint, out, to="torch")
    with monkeypatch.context() as full:
        full.setattr(torch.export, "save", fail)
        with pytest.raises(OutputError, match=r"cannot write .*a\.pt2: the disk is full"):
            vitkit.export(checkpoint, out, to="torch")
    monkeypatch.setattr("vitkit.exporting.export.write_artefact", lambda *_: None)
    monkeypatch.setattr("vitkit.exporting.check.check_export", fail)
    with pytest.raises(OSError, match="No space left") as error:
        vitkit.export(checkpoint, out, to="torch")
    assert not isinstance(error.value, OutputError)
    assert list(tmp_path.iterdir()) == []


def test_commands_refuse_wrong_choices_in_one_line(
    checkpoint, photos, tmp_path, capsys, monkeypatch
):
    other = save_images(tmp_path / "few", checkpoint, {"train": 12, "val": 12})
    for label in ("ant", "dog"):
        (tmp_path / "else" / "train" / label).mkdir(parents=True)
        Image.fromarray(blobs(3)).save(tmp_path / "else" / "train" / label / "1.png")
    (tmp_path / "there.onnx").write_bytes(b"mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "vitkit.engines.openvino_engine.CAPABILITIES", {"bfloat16": "INSTRUCTIONS_OF_2040"}
    )
    int8 = ["--to", "openvino", "--int8", "--calibrate"]
    for words, message in (
        (["a.pt", "--to", "onnx"], "expected a name that ends in .onnx for --to onnx"),
        (["a.onnx", "--to", "onnx", "--opset", "9"], "--opset 9 (opset=): expected 18 to"),
        (["a.xml", "--to", "openvino", "--opset", "20"], "--opset 20 is for --to onnx"),
        (["a.onnx", "--to", "onnx", "--int8"], "--int8 needs --to openvino"),
        (["a.xml", "--to", "openvino", "--int8"], "--int8 needs --calibrate DATA"),
        (["a.xml", *int8, str(other)], "12 images in train or val; at least 16 are needed"),
        (["a.xml", *int8, str(photos), "--data", str(photos), "--split", "train"],
         "is the one that the model is checked on"),
        (["a.onnx", "--to", "onnx", "--data", "else", "--split", "train"],
         "classes that the checkpoint lacks: 'dog'"),
        (["a.xml", "--to", "openvino", "--precision", "bfloat16"], "no instructions for bfloat16"),
        (["there.onnx", "--to", "onnx"], "or replace it with --overwrite"),
        (["a.onnx", "--to", "onnx", "--split", "val"], "--split val has no effect without --data"),
        (["a.onnx", "--to", "onnx", "--max-drop", "-1"], "must be from 0 to 100 points"),
    ):  # fmt: skip
        before = sorted(tmp_path.iterdir())
        assert cli.run(["export", str(checkpoint), *words]) == 2, words
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert sorted(tmp_path.iterdir()) == before


def test_no_compiler_is_one_line(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(vitkit.MissingExtraError, match=r"needs a C\+\+ compiler"):
        vitkit.export(checkpoint, tmp_path / "a.pt2", to="aoti")


def test_generated_images_differ_and_are_the_same_again():
    images = check.generated_images()
    assert len({image.shape for image in images}) == 4
    assert not np.array_equal(images[0], images[1])
    assert np.array_equal(images[5], check.generated_images()[5])


def test_a_removed_argument_is_answered(checkpoint, tmp_path):
    with pytest.raises(
        TypeError, match=r"no argument 'allow_slower'; a slower export is not refused"
    ):
        vitkit.export(checkpoint, tmp_path / "a.onnx", to="onnx", allow_slower=True)
