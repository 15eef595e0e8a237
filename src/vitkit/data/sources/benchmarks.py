"""Datasets known by name: digits, MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100, and their files."""

from __future__ import annotations

import gzip
import io
import math
import os
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from vitkit.data.datasets.dataset import ArraySplit, Dataset, array_digests, dataset_fingerprint
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import stratified_split
from vitkit.data.sources.huggingface import open_from_hub
from vitkit.data.sources.image_folder import open_folder
from vitkit.errors import DataError
from vitkit.io.caches import cache_folder
from vitkit.messages import nearest_parent

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


# CIFAR-10 and CIFAR-100 in the layouts that cannot run code.
#
# A. Krizhevsky: "Learning Multiple Layers of Features from Tiny Images", 2009. 60,000 colour images
# of 32 x 32. Two layouts are read:
#
#     the binary version    data_batch_1.bin ... test_batch.bin, or train.bin and test.bin; each
#                           image is its label (CIFAR-100: coarse, then fine), then 32 x 32 values
#                           each of red, green and blue
#     folders of images     train/<class>/*.png and test/<class>/*.png

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


# IDX files, the format of MNIST and similar datasets, gzipped or not.
#
# An IDX file is two zero bytes, a type byte (8: uint8), the number of dimensions, each dimension as
# a big-endian uint32, then the values in C order. The declared size is checked against the size of
# the file before memory is taken.

GZIP_MAGIC = b"\x1f\x8b"
UINT8 = 8
TYPE_NAMES = {9: "int8", 11: "int16", 12: "int32", 13: "float32", 14: "float64"}
MOST_DIMENSIONS = 255
IDX_BLOCK = 1 << 20
# Deflate cannot shrink by more (RFC 1951: 258 bytes from 2 bits).
MOST_INFLATION = 1032


def read_idx(path: str | os.PathLike[str]) -> UInt8[np.ndarray, " ..."]:
    """Return the array of an IDX file, uint8; gzip is recognised by its first bytes.

    Raises:
        DataError: missing, not an IDX file, not uint8, or longer or shorter than it declares.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            size = os.fstat(raw.fileno()).st_size
            if not is_gzip:
                return _read(raw, path, most=size)
            with gzip.GzipFile(fileobj=raw) as stream:
                return _read(stream, path, most=size * MOST_INFLATION)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; {nearest_parent(path)}") from None
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as an IDX file: {error}") from error


def write_idx(path: str | os.PathLike[str], array: np.ndarray) -> None:
    """Write `array`, uint8, gzipped where the name ends in .gz; the same array, the same bytes.

    Raises:
        DataError: an array that is not uint8, or has no dimension or more than 255.
    """
    if array.dtype != np.uint8 or not 1 <= array.ndim <= MOST_DIMENSIONS:
        raise DataError(
            f"{path}: expected a uint8 array of 1 to {MOST_DIMENSIONS} dimensions, "
            f"got {array.dtype} of {array.ndim}"
        )
    header = struct.pack(f">HBB{array.ndim}I", 0, UINT8, array.ndim, *array.shape)
    content = header + array.tobytes()
    if str(path).endswith(".gz"):
        # No time in the header, so that files are reproducible; zlib's level 9.
        content = gzip.compress(content, compresslevel=9, mtime=0)
    Path(path).write_bytes(content)


def _read(
    stream: gzip.GzipFile | io.BufferedReader, path: Path, most: int
) -> UInt8[np.ndarray, " ..."]:
    """Read one array from a stream that holds at most `most` bytes."""
    head = stream.read(4)
    if len(head) < 4 or head[:2] != b"\0\0" or head[3] == 0:
        raise DataError(
            f"{path}: not an IDX file: expected 00 00 <type> <dimensions>, "
            f"got {head.hex(' ') or 'an empty file'}"
        )
    # The third byte is the type of the values, the fourth the number of dimensions.
    if head[2] != UINT8:
        known = TYPE_NAMES.get(head[2], "an unknown type")
        raise DataError(f"{path}: expected values of type 8 (uint8), got {head[2]} ({known})")
    sides = stream.read(4 * head[3])
    if len(sides) < 4 * head[3]:
        raise DataError(
            f"{path}: expected {head[3]} dimensions, but the file ends within the header"
        )
    shape = struct.unpack(f">{head[3]}I", sides)
    expected = math.prod(shape)
    available = most - 4 - len(sides)
    declared = f"{path}: declares {' x '.join(map(str, shape))} = {expected:,} values"
    if expected > available:
        raise DataError(f"{declared}, but the file can hold at most {max(available, 0):,}")
    content = bytearray()
    # One byte more than declared is read, to see if there is any.
    while len(content) <= expected and (block := stream.read(min(IDX_BLOCK, expected + 1))):
        content += block
    if len(content) != expected:
        actual = "more" if len(content) > expected else f"{len(content):,}"
        raise DataError(f"{declared}, found {actual}")
    return np.frombuffer(content, np.uint8).reshape(shape)
