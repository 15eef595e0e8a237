"""Datasets known by name: digits, part of the package, and MNIST and Fashion-MNIST in IDX files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from vitkit.data.datasets.dataset import ArraySplit, Dataset, array_digests, dataset_fingerprint
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import stratified_split
from vitkit.data.sources.huggingface import open_from_hub
from vitkit.data.sources.idx import read_idx
from vitkit.errors import DataError
from vitkit.io.cache_folder import cache_folder

DIGITS_FOLDER = Path(__file__).parent / "digits"
TEST_FRACTION = 0.2
LARGEST_STORED = 16  # digits are stored as counts of black pixels in 4 x 4 blocks

IDX_CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
}
HOW_TO_GET = {
    "mnist": "pass the folder of train-images-idx3-ubyte and its three companions as --data-root "
    "(`torchvision.datasets.MNIST('.', download=True)` downloads them to MNIST/raw)",
    "fashion-mnist": "pass the folder of train-images-idx3-ubyte and its three companions as "
    "--data-root (`torchvision.datasets.FashionMNIST('.', download=True)` downloads them to "
    "FashionMNIST/raw, the Debian package dataset-fashion-mnist installs them)",
}
IDX_ON_THE_HUB = {
    "mnist": "hf://ylecun/mnist",
    "fashion-mnist": "hf://zalando-datasets/fashion_mnist",
}
_IDX_PARTS = {"train": "train", "test": "t10k"}


def open_digits() -> Dataset:
    """Open 1,797 handwritten digits, 8 x 8 grey, 10 classes; a stratified fifth is the test split.

    E. Alpaydin, C. Kaynak: "Optical Recognition of Handwritten Digits", UCI 1998, CC BY 4.0.
    """
    stored = read_idx(DIGITS_FOLDER / "images.idx.gz").astype(np.int64)
    # 0 ... 16 becomes 0 ... 255, rounded.
    images = ((stored * 255 + LARGEST_STORED // 2) // LARGEST_STORED).astype(np.uint8)
    labels = read_idx(DIGITS_FOLDER / "labels.idx.gz").astype(np.int64)
    whole = ArraySplit(images[..., None], labels, "digits")
    train, test = stratified_split(labels, (1 - TEST_FRACTION, TEST_FRACTION))
    classes = tuple("0123456789")
    mark = dataset_fingerprint(classes, {"": (labels, array_digests(images))})
    splits: dict[str, Split] = {"train": whole.subset(train), "test": whole.subset(test)}
    return Dataset("digits", classes, splits, mark)


def known_folders(name: str, data_root: Path | None) -> tuple[Path, ...]:
    """Return the folders where the files of a dataset are looked for, in order.

    Args:
        name: name of the dataset, such as "mnist".
        data_root: the user's folder, which comes first.
    """
    # Debian's packages of datasets put them below /usr/share.
    folders = (Path("/usr/share/datasets") / name, cache_folder() / name)
    if data_root is None:
        return folders
    return (data_root / name, data_root, *folders)


def open_idx(name: str, folders: Sequence[Path]) -> Dataset:
    """Open MNIST or Fashion-MNIST from the first folder with its training images, or the Hub.

    Args:
        name: "mnist" or "fashion-mnist".
        folders: folders to look in, in order.

    Raises:
        DataError: in none of them, a companion missing, or files that do not fit together.
    """
    classes = IDX_CLASSES[name]
    folder = _first_with_images(folders)
    if folder is None:
        return _on_the_hub(name, folders)
    splits: dict[str, Split] = {}
    parts = {}
    for split, prefix in _IDX_PARTS.items():
        # A split is two independent files: both are needed, with the same number of entries.
        images = read_idx(_require(folder, f"{prefix}-images", 3, name))
        labels = read_idx(_require(folder, f"{prefix}-labels", 1, name)).astype(np.int64)
        _check(images, labels, len(classes), folder / prefix)
        splits[split] = ArraySplit(images[..., None], labels, f"{name}/{split}")
        parts[split] = (labels, array_digests(images))
    return Dataset(name, classes, splits, dataset_fingerprint(classes, parts))


def _first_with_images(folders: Sequence[Path]) -> Path | None:
    for folder in folders:
        if _find(folder, "train-images", 3) is not None:
            return folder
    return None


def _on_the_hub(name: str, folders: Sequence[Path]) -> Dataset:
    dataset = open_from_hub(IDX_ON_THE_HUB[name], name, folders, HOW_TO_GET[name])
    # The Hub spells some class names differently; vitkit's are used, so that checkpoints fit both.
    ours = IDX_CLASSES[name]
    if list(map(_letters, dataset.classes)) != list(map(_letters, ours)):
        raise DataError(
            f"{IDX_ON_THE_HUB[name]}: expected the classes {', '.join(ours)}, got "
            f"{', '.join(dataset.classes)}"
        )
    return replace(dataset, name=name, classes=ours)


def _letters(name: str) -> str:
    """Return the letters of a class name: `T - shirt / top` and `T-shirt/top` are one class."""
    return "".join(filter(str.isalnum, name)).lower()


def _find(folder: Path, stem: str, dimensions: int) -> Path | None:
    """Return an IDX file under any of its usual names; None where there is none."""
    for dot in ("-", "."):
        for ending in ("", ".gz"):
            path = folder / f"{stem}{dot}idx{dimensions}-ubyte{ending}"
            if path.is_file():
                return path
    return None


def _require(folder: Path, stem: str, dimensions: int, name: str) -> Path:
    path = _find(folder, stem, dimensions)
    if path is None:
        raise DataError(
            f"{folder}: {stem}-idx{dimensions}-ubyte of {name} is missing; {HOW_TO_GET[name]}"
        )
    return path


def _check(
    images: UInt8[np.ndarray, " ..."], labels: Int64[np.ndarray, " ..."], classes: int, where: Path
) -> None:
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not images.size:
        raise DataError(
            f"{where}-*: expected images (N, H, W) and labels (N,), "
            f"got {images.shape} and {labels.shape}"
        )
    if labels.max() >= classes:
        row = int(np.argmax(labels >= classes))
        raise DataError(
            f"{where}-labels*: expected labels below {classes}, got {labels[row]} in row {row}"
        )
