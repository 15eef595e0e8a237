"""Datasets of the Hub: read from the cache that `datasets` itself built, without the Hub."""

from __future__ import annotations

import io
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import refusal
from PIL import Image

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.sources import huggingface
from vitkit.data.sources import open as sources
from vitkit.data.sources.open import open_dataset
from vitkit.errors import ImageError

datasets = pytest.importorskip("datasets")
constants = pytest.importorskip("huggingface_hub.constants")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no Hub."""
    monkeypatch.setenv("VITKIT_CACHE", str(tmp_path / "vitkit"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "datasets"


def image(value: int) -> dict[str, Any]:
    stream = io.BytesIO()
    Image.new("RGB", (5, 4), (value, 0, 9)).save(stream, "PNG")
    return {"bytes": stream.getvalue(), "path": None}


def build(
    cache: Path,
    splits: dict[str, list[int]],
    names: list[str],
    *,
    images: Any = image,
    address: str = "owner/flowers",
) -> None:
    """A set in the cache, as `datasets` leaves it after a download."""
    owner, name = address.split("/")
    features = datasets.Features(
        {"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=names)}
    )
    sources = cache.parent / "sources"
    sources.mkdir(exist_ok=True)
    for split, labels in splits.items():
        rows = {"image": [images(i) for i in range(len(labels))], "label": labels}
        table = datasets.Dataset.from_dict(rows, features=features)
        table.to_parquet(str(sources / f"{split}.parquet"))
    from datasets.packaged_modules.parquet.parquet import Parquet

    files = {split: str(sources / f"{split}.parquet") for split in splits}
    builder = Parquet(cache_dir=str(cache), dataset_name=name, hash=COMMIT, data_files=files)
    builder.download_and_prepare()
    # A set of the Hub is kept under its owner's name, and that of its configuration.
    (written,) = cache.glob(f"{name}/*/*/{COMMIT}")
    path = cache / f"{owner}___{name}" / "default" / "0.0.0" / COMMIT
    path.parent.mkdir(parents=True)
    written.rename(path)


def check_flowers(dataset: Dataset) -> None:
    assert dataset.name == "flowers"
    assert dataset.classes == ("tulip", "daisy", "rose")
    assert dataset.splits["train"].labels.tolist() == [2, 0, 1, 2]
    assert dataset.splits["test"].labels.tolist() == [1, 1]
    assert dataset.splits["train"].read(3).shape == (4, 5, 3)
    assert dataset.splits["train"].read(3)[0, 0].tolist() == [3, 0, 9]


NAMES = ["tulip", "daisy", "rose"]


def test_a_set_in_the_cache(cache: Path) -> None:
    build(cache, {"train": [2, 0, 1, 2], "validation": [0, 1], "test": [1, 1]}, NAMES)
    dataset = open_dataset("hf://owner/flowers")
    check_flowers(dataset)
    assert list(dataset.splits) == ["train", "val", "test"]
    assert open_dataset("hf://owner/flowers").fingerprint == dataset.fingerprint
    assert dataset.splits["train"].name(3) == "flowers-train.arrow row 3"


THEIRS = ["T - shirt / top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker",
          "Bag", "Ankle boot"]  # fmt: skip


def test_fashion_mnist_comes_from_the_hub_where_there_are_no_files(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "known_folders", lambda name, root: (cache / name,))
    splits = {"train": [9, 0, 3], "test": [0, 9]}
    build(cache, splits, THEIRS, address="zalando-datasets/fashion_mnist")
    dataset = open_dataset("fashion-mnist")
    assert dataset.name == "fashion-mnist"
    assert dataset.classes[::9] == ("T-shirt/top", "Ankle boot")
    assert {name: split.labels.tolist() for name, split in dataset.splits.items()} == splits
    message = refusal("mnist")
    assert message.startswith("mnist not found; pass the folder of train-images-idx3-ubyte and its "
                              "three companions as --data-root (`torchvision.datasets.MNIST('.', "
                              "download=True)` downloads them to MNIST/raw); searched "
                              f"{cache / 'mnist'} and the Hub (hf://ylecun/mnist: ")  # fmt: skip


def test_a_set_of_the_hub_with_other_classes_is_not_taken_for_mnist(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "known_folders", lambda name, root: (cache / name,))
    build(cache, {"train": [0, 1], "test": [0, 1]}, ["0", "one"], address="ylecun/mnist")
    assert "hf://ylecun/mnist: expected the classes 0, 1" in refusal("mnist")


def test_splits_of_other_names_are_not_read(cache: Path) -> None:
    build(cache, {"train": [2, 0, 1, 2], "extra": [0], "test": [1, 1]}, NAMES)
    dataset = open_dataset("hf://owner/flowers")
    check_flowers(dataset)
    assert "splits not read: 'extra'" in dataset.notes


def test_a_set_without_train_val_or_test(cache: Path) -> None:
    build(cache, {"extra": [0, 1]}, NAMES)
    assert "its splits are 'extra'; expected train, val or test" in refusal("hf://owner/flowers")


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_what_hf_download_left_is_found(cache: Path, tmp_path: Path, kind: str) -> None:
    """A snapshot is a folder of links to blobs, named after its commit."""
    path = tmp_path / "hub" / "datasets--owner--flowers"
    snapshot, blobs = path / "snapshots" / COMMIT, path / "blobs"
    (path / "refs").mkdir(parents=True)
    blobs.mkdir()
    (path / "refs" / "main").write_text(COMMIT)
    if kind == "parquet":
        build(cache, {"train": [0, 1, 0]}, ["rose", "tulip"], address="other/flowers")
        files = {"data/train-00000-of-00001.parquet": tmp_path / "sources" / "train.parquet"}
    else:
        files = {}
        for number in range(3):
            name = f"train/{'rose' if number % 2 == 0 else 'tulip'}/{number}.png"
            files[name] = tmp_path / f"{number}.png"
            files[name].write_bytes(image(number)["bytes"])
    for number, (name, source) in enumerate(files.items()):
        (blobs / str(number)).write_bytes(source.read_bytes())
        link = snapshot / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blobs / str(number))
    for address in ("hf://owner/flowers", f"hf://owner/flowers@{COMMIT}"):
        dataset = open_dataset(address)
        assert (dataset.name, dataset.classes) == ("flowers", ("rose", "tulip"))
        assert sorted(dataset.splits["train"].labels.tolist()) == [0, 0, 1]
        assert str(snapshot) in dataset.notes[-1]
    assert "not in the cache" in refusal("hf://owner/flowers@another")


def test_revisions(cache: Path) -> None:
    build(cache, {"train": [2, 0, 1, 2], "test": [1, 1]}, NAMES)
    check_flowers(open_dataset(f"hf://owner/flowers@{COMMIT}"))
    check_flowers(open_dataset(f"hf://owner/flowers@{COMMIT[:9]}"))
    assert f"the cache has {COMMIT} of it" in refusal("hf://owner/flowers@ffffffff")
    branch = open_dataset("hf://owner/flowers@main")
    assert f"the cache has {COMMIT}; without a network vitkit cannot" in branch.notes[0]


def test_nothing_in_the_cache_and_no_hub(cache: Path) -> None:
    message = refusal("hf://owner/nothing")
    assert "not in the cache, and the Hub cannot be reached" in message
    assert "HF_HUB_OFFLINE" in message


def test_a_hub_that_does_not_answer(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is never looked up in less than a minute; the cache is used all the same."""
    build(cache, {"train": [2, 0, 1, 2], "test": [1, 1]}, NAMES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    never = threading.Event()

    def look_up(*_: object, **__: object) -> None:
        never.wait()
        raise OSError

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(huggingface, "HUB_PATIENCE", 0.2)
    load, flags = datasets.load_dataset, []

    def watched(*arguments: Any, **options: Any) -> Any:
        flags.append((constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE))
        return load(*arguments, **options)

    monkeypatch.setattr(datasets, "load_dataset", watched)
    check_flowers(open_dataset("hf://owner/flowers"))
    never.set()
    assert flags == [(True, True)]
    assert constants.HF_HUB_OFFLINE is False


def test_sets_that_bring_code_are_refused(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(*_: object, **__: object) -> None:
        raise RuntimeError("Dataset scripts are no longer supported, but found flowers.py")

    monkeypatch.setattr(datasets, "load_dataset", script)
    message = refusal("hf://owner/flowers")
    assert "this dataset is read by its own Python code, which vitkit does not run" in message
    assert "@refs/convert/parquet" in message


def test_what_cannot_be_loaded_says_why_in_a_line(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(cache, {"train": [2, 0, 1, 2]}, NAMES)
    assert "Couldn't find cache for owner/flowers for config 'no'" in refusal(
        "hf://owner/flowers:no"
    )
    (arrow,) = cache.rglob("flowers-train.arrow")
    arrow.write_bytes(b"not a table")
    assert "cannot be loaded" in refusal("hf://owner/flowers")


def test_labels_are_refused_by_their_row(cache: Path) -> None:
    build(cache, {"train": [2, 0, -1, 2]}, NAMES)
    message = refusal("hf://owner/flowers")
    assert "flowers-train.arrow: row 2 has no label" in message


def test_rows_that_name_files(cache: Path, tmp_path: Path) -> None:
    """As sets of plain images are kept: their files lie in the Hub's cache, and nowhere else."""
    places = [tmp_path / "hub" / "a.png", tmp_path / "hub" / "b.png", tmp_path / "outside.png"]
    (tmp_path / "hub").mkdir()
    for value, path in enumerate(places):
        path.write_bytes(image(value)["bytes"])

    def row(number: int) -> dict[str, Any]:
        return {"bytes": None, "path": str(places[number])}

    # `datasets` takes the files in when it writes Parquet, not into an Arrow file.
    rows = {"image": [row(i) for i in range(3)], "label": [0, 1, 0]}
    features = datasets.Features(
        {"image": datasets.Image(decode=False), "label": datasets.ClassLabel(names=NAMES)}
    )
    build(cache, {"train": [0, 1, 0]}, NAMES)
    (arrow,) = cache.rglob("flowers-train.arrow")
    with datasets.arrow_writer.ArrowWriter(path=str(arrow), features=features) as writer:
        writer.write_batch(rows)
        writer.finalize()
    split = open_dataset("hf://owner/flowers").splits["train"]
    np.testing.assert_array_equal(split.read(1)[0, 0], [1, 0, 9])
    with pytest.raises(ImageError, match=r"flowers-train\.arrow row 2: empty"):
        split.read(2)


@pytest.mark.parametrize(
    "address", ["hf://", "hf://name", "hf://a/b/c", "hf://a/../b", "hf://a/b@"]
)
def test_addresses_that_are_none(address: str) -> None:
    assert "expected hf://owner/name" in refusal(address)


def test_a_folder_of_that_name_is_not_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "owner" / "flowers").mkdir(parents=True)
    assert "the working folder has a folder owner/flowers" in refusal("hf://owner/flowers")
