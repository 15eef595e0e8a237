"""ImageNet-1k's class names: where they are assumed, where not, and how it is reported."""

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from weights.round_trips import noisy, written

import vitkit
from vitkit import cli
from vitkit.weights.catalogue import catalogue
from vitkit.weights.checkpoint import ASSUMED, imagenet

SMALL: dict[str, Any] = {"image_size": 16, "patch_size": 8, "width": 64, "depth": 1,
                         "num_heads": 2, "mlp_width": 64, "num_classes": 1000}  # fmt: skip
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "google": {"activation": "gelu_tanh", "resnet_variant": "published"},
    "lucidrains": {"stem": "normed_linear", "qkv_bias": False, "norm_eps": 1e-5},
    "dinov2": {"layer_scale": 1.0, "pooling": "cls_mean"},
}


def folder(name: str, place: Path, **fields: Any) -> Path:
    """A small model of 1,000 classes in the files of a format, which name no classes."""
    spec = vitkit.ViTSpec(**{**SMALL, **FIELDS.get(name, {}), **fields})
    return written(name, noisy(spec), place)


def package_file(package: str, *parts: str) -> str:
    found = importlib.util.find_spec(package)  # without running it
    assert found is not None, f"{package} is not installed; the parity tests need it"
    assert found.origin is not None
    return Path(found.origin).parent.joinpath(*parts).read_text(encoding="utf-8")


def test_the_table_is_the_one_of_torchvision_and_timm():
    module = ast.parse(package_file("torchvision", "models", "_meta.py"))
    names = next(ast.literal_eval(line.value) for line in module.body
                 if isinstance(line, ast.Assign)
                 and getattr(line.targets[0], "id", "") == "_IMAGENET_CATEGORIES")  # fmt: skip
    numbers = package_file("timm", "data", "_info", "imagenet_synsets.txt").split()
    assert list(imagenet()) == numbers == sorted(numbers)
    assert list(imagenet().values()) == names
    assert len(set(names)) == 1000
    assert imagenet()["n02123045"] == "tabby"


@pytest.mark.parametrize("name", sorted(vitkit.formats() - {"vitkit"}))
def test_a_head_of_1000_without_names_is_assumed_to_be_imagenet_s(name, tmp_path):
    found = vitkit.load(folder(name, tmp_path / name), trust_pickle=True)
    assert found.classes == tuple(imagenet().values())
    assert found.classes_assumed
    assert found.metadata["sure"]["classes"] == "usual"
    assert ASSUMED in found.metadata["warnings"]


@pytest.mark.parametrize(
    "fields", [{"num_classes": 999}, {"num_classes": 0}, {"in_channels": 1}], ids=str
)
def test_other_heads_and_other_images_get_no_names(fields, tmp_path):
    found = vitkit.load(folder("torchvision", tmp_path / "model", **fields))
    assert found.classes == ()
    assert not found.classes_assumed


def test_names_that_a_file_has_are_kept(tmp_path):
    own = tuple(f"my class {number}" for number in range(1000))
    model = noisy(vitkit.ViTSpec(**SMALL))
    files = written("huggingface", model, tmp_path / "hf", own)
    ours = tmp_path / "ours.safetensors"
    vitkit.save(ours, model, preprocess=vitkit.Preprocess(image_size=16), classes=own)
    for found in (vitkit.load(files), vitkit.load(ours)):
        assert found.classes == own
        assert not found.classes_assumed


def test_names_of_another_head_are_no_assumption(tmp_path):
    """The metadata may go on to a file of a model with other classes."""
    found = vitkit.load(folder("torchvision", tmp_path / "model"))
    kept = vitkit.adapt(found, classes=("tabby", "goldfish"))
    assert kept.classes_assumed
    assert ASSUMED in kept.warnings
    fresh = vitkit.adapt(found, num_classes=2)
    assert not fresh.classes_assumed
    path = vitkit.save(tmp_path / "own.safetensors", fresh.model, preprocess=fresh.preprocess,
                       classes=("mine", "yours"), **fresh.metadata)  # fmt: skip
    again = vitkit.load(path)
    assert not again.classes_assumed
    assert ASSUMED not in again.warnings
    assert "classes" not in vitkit.inspect(path).sure


def test_inspect_predict_and_convert_say_that_it_is_an_assumption(tmp_path, capsys, caplog):
    source = folder("torchvision", tmp_path / "source")
    assert ASSUMED in str(vitkit.inspect(source))
    assert vitkit.inspect(source).sure["classes"] == "usual"
    image = tmp_path / "grey.png"
    Image.fromarray(np.full((16, 16, 3), 128, np.uint8)).save(image)
    for to in ("huggingface", "google", "vitkit"):
        report = vitkit.convert(source, tmp_path / to, to=to, allow_lossy=True)
        assert ASSUMED in report.notes
        assert vitkit.load(tmp_path / to).classes[281] == "tabby"
    capsys.readouterr()
    caplog.clear()
    assert cli.run(["predict", str(tmp_path / "vitkit"), str(image), "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert ASSUMED in caplog.text
    labels = [
        part.rpartition(" ")[0] for part in captured.out.strip().partition(": ")[2].split(", ")
    ]
    assert set(labels) <= set(imagenet().values())


@pytest.mark.parametrize("to", ["vitkit", "huggingface", "timm"])
def test_assumed_names_are_never_written_as_stated(to, tmp_path):
    found = vitkit.load(folder("torchvision", tmp_path / "source"))
    found.model.save_pretrained(tmp_path / "saved", to=to)
    vitkit.save(tmp_path / "own.safetensors", found.model)
    vitkit.convert(tmp_path / "source", tmp_path / "converted", to=to)
    for place in ("saved", "own.safetensors", "converted"):
        again = vitkit.load(tmp_path / place)
        assert again.classes_assumed, place
        assert again.warnings.count(ASSUMED) == 1
    texts = [file.read_text() for file in (tmp_path / "saved").glob("*.json")]
    assert not any("tabby" in text for text in texts)
    # names that the caller states are stated, whatever they are
    found.model.save_pretrained(tmp_path / "stated", to=to, classes=found.classes)
    assert not vitkit.load(tmp_path / "stated").classes_assumed


@pytest.fixture
def data(tmp_path) -> Path:
    """Two images of each of two classes under their WordNet ids."""
    for number in ("n01443537", "n02123045"):
        place = tmp_path / "data" / "test" / number
        place.mkdir(parents=True)
        for count in range(2):
            pixels = np.random.default_rng(count).integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(place / f"{number}-{count}.png")
    train = tmp_path / "data" / "train"
    train.symlink_to(tmp_path / "data" / "test", target_is_directory=True)
    return tmp_path / "data"


def test_folders_of_wordnet_ids_are_matched_by_id(data, tmp_path):
    spec = vitkit.ViTSpec(**SMALL)
    model = noisy(spec)
    with torch.no_grad():
        model.head.weight.zero_()
        model.head.bias.zero_()
        model.head.bias[list(imagenet()).index("n02123045")] = 1.0
    source = written("torchvision", model, tmp_path / "model")
    scores = vitkit.evaluate(source, data, split="test", device="cpu")
    assert scores["top1"] == 0.5


def test_data_with_other_names_are_not_held_against_assumed_ones(data, tmp_path):
    """The names are assumed: data of other classes get the old refusal."""
    source = folder("torchvision", tmp_path / "model")
    (data / "test" / "n01443537").rename(data / "test" / "mine")  # of train too, a link to it
    with pytest.raises(vitkit.DataError, match="1000 logits without class names"):
        vitkit.evaluate(source, data, split="test", device="cpu")


def test_1000_classes_in_the_catalogue_are_imagenet_s():
    """A head of 1,000 rows that is another data set's would get wrong names."""
    for entry in catalogue().values():
        if entry.classes == 1000:
            about = f"{entry.name} {entry.note}".lower()
            assert "in1k" in about or "imagenet" in about or "ilsvrc" in about, entry.name
