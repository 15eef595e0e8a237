"""CIFAR-10 and CIFAR-100 in the layouts that cannot run code.

A. Krizhevsky: "Learning Multiple Layers of Features from Tiny Images", 2009. 60,000 colour images
of 32 x 32. Two layouts are read:

    the binary version    data_batch_1.bin ... test_batch.bin, or train.bin and test.bin; each
                          image is its label (CIFAR-100: coarse, then fine), then 32 x 32 values
                          each of red, green and blue
    folders of images     train/<class>/*.png and test/<class>/*.png
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from vitkit.data.datasets.dataset import ArraySplit, Dataset, array_digests, dataset_fingerprint
from vitkit.data.datasets.split import Split
from vitkit.data.sources.huggingface import open_from_hub
from vitkit.data.sources.image_folder import open_folder
from vitkit.errors import DataError

CIFAR_SIDE = 32
CIFAR_VALUES = 3 * CIFAR_SIDE * CIFAR_SIDE
COUNTS = {"train": 50_000, "test": 10_000}
TEN = "airplane automobile bird cat deer dog frog horse ship truck"
HUNDRED = """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly
    camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile
    cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo keyboard lamp
    lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse mushroom
    oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
    possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake
    spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor
    train trout tulip turtle wardrobe whale willow_tree wolf woman worm"""
CIFAR_CLASSES = {"cifar10": tuple(TEN.split()), "cifar100": tuple(HUNDRED.split())}
BINARY: dict[str, dict[str, tuple[str, ...]]] = {
    "cifar10": {
        "train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)),
        "test": ("test_batch.bin",),
    },
    "cifar100": {"train": ("train.bin",), "test": ("test.bin",)},
}
BINARY_FOLDER = {"cifar10": "cifar-10-batches-bin", "cifar100": "cifar-100-binary"}
PICKLED = {
    "cifar10": ("cifar-10-batches-py", "data_batch_1"),
    "cifar100": ("cifar-100-python", "train"),
}
ARCHIVE = {"cifar10": "cifar-10-binary.tar.gz", "cifar100": "cifar-100-binary.tar.gz"}
ADDRESS = "https://www.cs.toronto.edu/~kriz/"
"""The author's page, which has the archives."""
CIFAR_ON_THE_HUB = {"cifar10": "hf://uoft-cs/cifar10", "cifar100": "hf://uoft-cs/cifar100"}


LabelledImages = tuple[UInt8[np.ndarray, "N H W C"], Int64[np.ndarray, " N"]]


def open_cifar(name: str, folders: Sequence[Path]) -> Dataset:
    """Open CIFAR from the first folder that holds it, else from the Hub.

    Args:
        name: "cifar10" or "cifar100".
        folders: folders to look in, in order.

    Raises:
        DataError: nowhere, only as a pickle, or files with other contents than CIFAR's.
    """
    # Either the folder in the archive, or its files.
    for parent in folders:
        for below in (".", BINARY_FOLDER[name]):
            dataset = _open_here(name, parent / below)
            if dataset is not None:
                return dataset
    _refuse_unread_layouts(name, folders)
    how = (
        f"unpack {ADDRESS}{ARCHIVE[name]} and pass the folder that contains "
        f"{BINARY_FOLDER[name]} as --data-root"
    )
    return open_from_hub(CIFAR_ON_THE_HUB[name], name, folders, how)


def _open_here(name: str, folder: Path) -> Dataset | None:
    """Open CIFAR from the layout found in a folder; None if there is none."""
    # The test file alone is not enough to choose a layout; if it is missing, that is an error.
    if all((folder / file).is_file() for file in BINARY[name]["train"]):
        parts = {split: _read_binary(name, folder, split) for split in COUNTS}
        return _open_arrays(name, folder, parts)
    if (folder / "train").is_dir() and (folder / "test").is_dir():
        return _open_folders(name, folder)
    return None


def _open_arrays(name: str, folder: Path, parts: dict[str, LabelledImages]) -> Dataset:
    classes = CIFAR_CLASSES[name]
    splits: dict[str, Split] = {}
    marks = {}
    notes = []
    for split, (images, labels) in parts.items():
        wrong = np.flatnonzero(labels >= len(classes))
        if len(wrong):
            raise DataError(
                f"{folder}: expected labels below {len(classes)}, got {labels[wrong[0]]} for "
                f"image {wrong[0]} of {split}"
            )
        if len(images) != COUNTS[split]:
            notes.append(
                f"{split} has {len(images):,} images; the complete dataset has {COUNTS[split]:,}"
            )
        splits[split] = ArraySplit(images, labels, f"{name}/{split}")
        marks[split] = (labels, array_digests(images))
    return Dataset(name, classes, splits, dataset_fingerprint(classes, marks), tuple(notes))


def _read_binary(name: str, folder: Path, split: str) -> LabelledImages:
    labels_each = 1 if name == "cifar10" else 2
    record = labels_each + CIFAR_VALUES
    images, labels = [], []
    for part in BINARY[name][split]:
        file = folder / part
        if not file.is_file():
            raise DataError(f"{file}: no such file; the binary version of {name} contains it")
        content = np.fromfile(file, np.uint8)
        # A truncated download hardly ever ends at the end of an image.
        if not len(content) or len(content) % record:
            raise DataError(
                f"{file}: expected images of {record:,} bytes each, got {len(content):,} bytes; "
                "download the file again"
            )
        rows = content.reshape(-1, record)  # (N, labels and values)
        labels.append(rows[:, labels_each - 1].astype(np.int64))  # the fine label comes last
        planes = rows[:, labels_each:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)
        # A file has all red values of an image, then all green, then all blue.
        images.append(planes.transpose(0, 2, 3, 1))
    return np.ascontiguousarray(np.concatenate(images)), np.concatenate(labels)


def _open_folders(name: str, folder: Path) -> Dataset:
    dataset = open_folder(folder)
    if dataset.classes != CIFAR_CLASSES[name]:
        different = sorted({*dataset.classes} ^ {*CIFAR_CLASSES[name]})
        raise DataError(
            f"{folder}: its classes are not those of {name}: {', '.join(different[:5])} differ; "
            "open the folder by its path, or pass another --data-root"
        )
    return dataset


def _refuse_unread_layouts(name: str, folders: Sequence[Path]) -> None:
    """Refuse the pickled version and the archive, with the way to a layout that is read."""
    pickled, first = PICKLED[name]
    for parent in folders:
        for folder in (parent / pickled, parent):
            if (folder / first).is_file():
                raise DataError(
                    f"{folder}: this version of {name} is a pickle, which can run code when it "
                    f"is loaded; download the binary version ({ARCHIVE[name]}) and put its "
                    f"folder {BINARY_FOLDER[name]} beside it"
                )
        if (parent / ARCHIVE[name]).is_file():
            raise DataError(
                f"{parent / ARCHIVE[name]}: not unpacked; run tar -xzf {ARCHIVE[name]} in its "
                "folder"
            )
