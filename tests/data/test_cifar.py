"""CIFAR in its layouts, pixel for pixel the same; pickles and broken files refused."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from image_files import folder, refusal
from PIL import Image

import vitkit
from vitkit.data.sources.benchmarks import CIFAR_CLASSES, known_folders, open_cifar
from vitkit.data.sources.open import open_dataset
from vitkit.errors import DataError

datasets = pytest.importorskip("datasets")
constants = pytest.importorskip("huggingface_hub.constants")

CONVERT = runpy.run_path(str(Path(vitkit.__file__).parents[2] / "scripts" / "convert_cifar10.py"))
GENERATOR = np.random.default_rng(0)
TRAIN = GENERATOR.integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
TEST = GENERATOR.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
TRAIN_LABELS, TEST_LABELS = np.arange(20) % 10, np.arange(6) + 3


@pytest.fixture(autouse=True)
def _nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def binary(root: Path, images: np.ndarray, labels: np.ndarray, coarse: bool = False) -> None:
    """As the format's own page has it: label bytes, then the red, green and blue planes."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with root.open("wb") as file:
        for image, label in zip(images, labels, strict=True):
            file.write(bytes([19, label] if coarse else [label]))
            for channel in range(3):
                file.write(image[:, :, channel].tobytes())


def binary_ten(root: Path) -> Path:
    for number in range(5):
        part = slice(4 * number, 4 * number + 4)
        binary(root / f"data_batch_{number + 1}.bin", TRAIN[part], TRAIN_LABELS[part])
    binary(root / "test_batch.bin", TEST, TEST_LABELS)
    return root


def rows_of_images(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for number in range(5):
        part = TRAIN[4 * number : 4 * number + 4]
        Image.fromarray(part.reshape(4, 1024, 3)).save(root / f"data_batch_{number + 1}.png")
    Image.fromarray(TEST.reshape(6, 1024, 3)).save(root / "test_batch.png")
    (root / "train_lables.json").write_text(json.dumps(TRAIN_LABELS.tolist()))
    (root / "test_lables.json").write_text(json.dumps(TEST_LABELS.tolist()))
    return root


@pytest.mark.parametrize("below", [".", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"])
def test_the_binary_version(tmp_path: Path, below: str) -> None:
    binary_ten(tmp_path / below)
    dataset = open_dataset("cifar10", data_root=tmp_path)
    assert dataset.classes[3] == "cat"
    assert len(dataset.classes) == 10
    for split, images, labels in (("train", TRAIN, TRAIN_LABELS), ("test", TEST, TEST_LABELS)):
        part = dataset.splits[split]
        assert part.labels.tolist() == labels.tolist()
        for index, image in enumerate(images):
            np.testing.assert_array_equal(part.read(index), image)
    assert "train has 20 images; the complete dataset has 50,000" in dataset.notes
    assert dataset.splits["test"].name(4) == "cifar10/test[4]"


def test_the_script_writes_the_binary_version_from_rows_of_pixels(tmp_path: Path) -> None:
    rows_of_images(tmp_path / "package")
    CONVERT["convert"](tmp_path / "package", tmp_path / "cifar-10-batches-bin")
    binary_ten(tmp_path / "published")
    for file in (tmp_path / "published").iterdir():
        assert (tmp_path / "cifar-10-batches-bin" / file.name).read_bytes() == file.read_bytes()
    assert open_dataset("cifar10", data_root=tmp_path).splits["train"].labels[13] == 3


def test_the_script_refuses_other_files(tmp_path: Path) -> None:
    source = rows_of_images(tmp_path / "package")
    (source / "test_lables.json").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"test_lables\.json: 2 labels are too few"):
        CONVERT["convert"](source, tmp_path / "one")
    Image.new("RGB", (1000, 4)).save(source / "data_batch_2.png")
    with pytest.raises(ValueError, match=r"data_batch_2\.png: expected rows of 1024 pixels"):
        CONVERT["convert"](source, tmp_path / "two")


def test_a_hundred_classes_by_their_fine_label(tmp_path: Path) -> None:
    fine = np.arange(20) * 5
    binary(tmp_path / "cifar-100-binary" / "train.bin", TRAIN, fine, coarse=True)
    binary(tmp_path / "cifar-100-binary" / "test.bin", TEST, fine[:6], coarse=True)
    dataset = open_dataset("cifar100", data_root=tmp_path)
    assert len(set(dataset.classes)) == 100
    assert list(dataset.classes) == sorted(dataset.classes)
    assert (dataset.classes[0], dataset.classes[95]) == ("apple", "whale")
    assert dataset.splits["train"].labels.tolist() == fine.tolist()
    np.testing.assert_array_equal(dataset.splits["test"].read(5), TEST[5])


def test_folders_of_images(tmp_path: Path) -> None:
    names = CIFAR_CLASSES["cifar10"]
    folder(tmp_path / "cifar10", {f"{s}/{n}": 2 for s in ("train", "test") for n in names})
    dataset = open_dataset("cifar10", data_root=tmp_path)
    assert dataset.classes == names
    assert len(dataset.splits["test"]) == 20
    (tmp_path / "cifar10" / "train" / "truck").rename(tmp_path / "cifar10" / "train" / "lorry")
    (tmp_path / "cifar10" / "test" / "truck").rename(tmp_path / "cifar10" / "test" / "lorry")
    assert "lorry, truck differ" in refusal("cifar10", data_root=tmp_path)


@pytest.mark.parametrize("where", ["cifar-10-batches-py/data_batch_1", "data_batch_1"])
def test_pickles_are_refused_unread(tmp_path: Path, where: str) -> None:
    (tmp_path / where).parent.mkdir(exist_ok=True)
    (tmp_path / where).write_bytes(b"\x80\x04cos\nsystem\n")
    message = refusal("cifar10", data_root=tmp_path)
    assert "is a pickle, which can run code" in message
    assert "cifar-10-binary.tar.gz" in message


def test_a_set_that_is_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = refusal("cifar100", data_root=tmp_path)
    assert f"searched {tmp_path}/cifar100, {tmp_path}," in message
    assert message.startswith(
        "cifar100 not found; unpack https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz and "
        "pass the folder that contains cifar-100-binary as --data-root; searched "
    )
    assert "not in the cache" in message

    monkeypatch.setitem(sys.modules, "datasets", None)
    mended = r"^cifar10 not found; pip install 'vitkit\[hub\]' lets vitkit download it; or unpack "
    with pytest.raises(DataError, match=mended):
        open_dataset("cifar10")
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(b"")
    assert "not unpacked; run tar -xzf" in refusal("cifar10", data_root=tmp_path)
    assert known_folders("cifar10", tmp_path)[-1] == tmp_path / "cache" / "cifar10"


def test_broken_files_say_what_is_wrong(tmp_path: Path) -> None:
    root = binary_ten(tmp_path / "bin")
    (root / "data_batch_3.bin").write_bytes(b"\0" * 3072)
    with pytest.raises(DataError, match=r"data_batch_3\.bin: expected images of 3,073 bytes"):
        open_cifar("cifar10", (root,))
    binary(root / "data_batch_3.bin", TRAIN[:4], np.array([1, 2, 10, 3]))
    with pytest.raises(DataError, match="labels below 10, got 10 for image 10 of train"):
        open_cifar("cifar10", (root,))
    (binary_ten(root) / "test_batch.bin").unlink()
    with pytest.raises(DataError, match=r"test_batch\.bin: no such file"):
        open_cifar("cifar10", (root,))
