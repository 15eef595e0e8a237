"""Datasets known by name: digits, MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100.

The files of their authors are looked for in the known folders, and downloaded where they are in
none of them. Their SHA-256 are those that TensorFlow Datasets and torchvision publish.
"""

import gzip
import math
import os
import struct
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int64, UInt8

from vitkit.data.datasets.dataset import ArraySplit, Dataset, array_digests, dataset_fingerprint
from vitkit.data.datasets.split import Split
from vitkit.data.datasets.splitting import stratified_split
from vitkit.errors import DataError
from vitkit.io.caches import cache_folder
from vitkit.io.download import download

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
ADDRESSES = {
    "mnist": "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "fashion-mnist": "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/"
    "data/fashion/",
    "cifar10": "https://www.cs.toronto.edu/~kriz/",
    "cifar100": "https://www.cs.toronto.edu/~kriz/",
}
"""Where the files of a dataset are downloaded from."""
_IDX_PARTS = {"train": "train", "test": "t10k"}
IDX_STEMS = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
SHA256 = {
    "mnist": """
        440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
        3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
        8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
        f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6""",
    "fashion-mnist": """
        3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
        a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
        346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
        67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5""",
    "cifar10": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    "cifar100": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
}
"""Of the files of `IDX_STEMS` in this order, or of the archive."""
LabelledImages = tuple[UInt8[np.ndarray, "N H W C"], Int64[np.ndarray, " N"]]
"""Images (N, H, W, C) and class numbers (N,)."""


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


def _downloaded(name: str, file: str, searched: Sequence[Path]) -> Path:
    """Return a file of a dataset that is in none of the folders, downloaded once."""
    digests = SHA256[name].split()
    digest = digests[IDX_STEMS.index(file.removesuffix("-ubyte.gz"))] if digests[1:] else digests[0]
    try:
        address = f"{ADDRESSES[name]}{file}"
        return download(address, sha256=digest, rehash=False, error=DataError)
    except DataError as error:
        raise DataError(
            f"{name} not found; {error}; or pass the folder of its files as --data-root; searched "
            f"{', '.join(map(str, searched))}"
        ) from None


def _dataset(
    name: str, parts: Mapping[str, LabelledImages], where: Path, notes: Sequence[str] = ()
) -> Dataset:
    """Return the dataset of images and labels by split, which were read from `where`."""
    classes = IDX_CLASSES.get(name) or CIFAR_CLASSES[name]
    splits: dict[str, Split] = {}
    marks = {}
    for split, (images, labels) in parts.items():
        fits = images.ndim == 4 and images.size and labels.shape == images.shape[:1]
        if not fits or labels.max() >= len(classes):
            raise DataError(
                f"{where}: expected images (N, H, W) and labels (N,) below {len(classes)} of "
                f"{split}, got {images.shape[:3]} and {labels.shape} up to {labels.max(initial=0)}"
            )
        splits[split] = ArraySplit(images, labels, f"{name}/{split}")
        marks[split] = (labels, array_digests(images))
    return Dataset(name, classes, splits, dataset_fingerprint(classes, marks), tuple(notes))


def open_idx(name: str, folders: Sequence[Path]) -> Dataset:
    """Open MNIST or Fashion-MNIST from the first folder with its training images, or download it.

    Args:
        name: "mnist" or "fashion-mnist".
        folders: folders to look in, in order.

    Raises:
        DataError: in none of them and out of reach, a companion missing, or files that do not fit
            together.
    """
    folder = next((place for place in folders if _find(place, "train-images-idx3")), None)
    parts: dict[str, LabelledImages] = {}
    for split, prefix in _IDX_PARTS.items():
        # A split is two independent files: both are needed, with the same number of entries.
        arrays = []
        for stem in (f"{prefix}-images-idx3", f"{prefix}-labels-idx1"):
            if folder is None:
                path: Path | None = _downloaded(name, f"{stem}-ubyte.gz", folders)
            else:
                path = _find(folder, stem)
            if path is None:
                raise DataError(
                    f"{folder}: {stem}-ubyte of {name} is missing; download it from "
                    f"{ADDRESSES[name]}"
                )
            arrays.append(read_idx(path))
        parts[split] = (arrays[0][..., None], arrays[1].astype(np.int64))
    return _dataset(name, parts, folder or Path(name))


def _find(folder: Path, stem: str) -> Path | None:
    """Return an IDX file under any of its usual names; None where there is none."""
    for name in (stem, ".".join(stem.rsplit("-", 1))):
        for ending in ("-ubyte", "-ubyte.gz"):
            path = folder / f"{name}{ending}"
            if path.is_file():
                return path
    return None


# CIFAR-10 and CIFAR-100 in their binary version, which cannot run code.
#
# A. Krizhevsky: "Learning Multiple Layers of Features from Tiny Images", 2009. 60,000 colour images
# of 32 x 32. The files are data_batch_1.bin ... test_batch.bin, or train.bin and test.bin, unpacked
# or in their archive; each image is its label (CIFAR-100: coarse, then fine), then 32 x 32 values
# each of red, green and blue.

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
ARCHIVE = {"cifar10": "cifar-10-binary.tar.gz", "cifar100": "cifar-100-binary.tar.gz"}
MOST_BYTES = 200_000_000
"""Of a file; CIFAR's have at most 154 MB."""


def open_cifar(name: str, folders: Sequence[Path]) -> Dataset:
    """Open CIFAR from the first folder that holds it, else download it.

    Args:
        name: "cifar10" or "cifar100".
        folders: folders to look in, in order.

    Raises:
        DataError: nowhere, or files with other contents than CIFAR's.
    """
    # Either the folder in the archive, its files, or the archive.
    for parent in folders:
        for folder in (parent, parent / BINARY_FOLDER[name]):
            # The test file alone is not enough to choose a layout; if it is missing, that is an
            # error.
            if all((folder / file).is_file() for file in BINARY[name]["train"]):
                files = BINARY[name]["train"] + BINARY[name]["test"]
                found = [file for file in files if (folder / file).is_file()]
                contents = {file: (folder / file).read_bytes() for file in found}
                return _open_binary(name, folder, contents)
        if (parent / ARCHIVE[name]).is_file():
            return _open_archive(name, parent / ARCHIVE[name])
    return _open_archive(name, _downloaded(name, ARCHIVE[name], folders))


def _open_archive(name: str, path: Path) -> Dataset:
    contents: dict[str, bytes] = {}
    wanted = {*BINARY[name]["train"], *BINARY[name]["test"]}
    try:
        with tarfile.open(path, "r:gz") as tar:
            for member in tar:
                file = Path(member.name).name
                # no links: what one leads to may be missing, or of any size
                if file in wanted and member.isfile() and member.size < MOST_BYTES:
                    stream = tar.extractfile(member)
                    contents[file] = b"" if stream is None else stream.read()
    except (tarfile.TarError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read: {error}; download it again") from None
    return _open_binary(name, path, contents)


def _open_binary(name: str, where: Path, contents: Mapping[str, bytes]) -> Dataset:
    """Open the binary version, of which `contents` has the files."""
    labels_each = 1 if name == "cifar10" else 2
    record = labels_each + CIFAR_VALUES
    parts: dict[str, LabelledImages] = {}
    notes = []
    for split, files in BINARY[name].items():
        content = b""
        for file in files:
            size = len(contents.get(file, b""))
            # A truncated download hardly ever ends at the end of an image.
            if not size or size % record:
                raise DataError(
                    f"{where / file}: expected images of {record:,} bytes each, got {size:,} "
                    "bytes; download the file again"
                )
            content += contents[file]
        rows = np.frombuffer(content, np.uint8).reshape(-1, record)  # (N, labels and values)
        labels = rows[:, labels_each - 1].astype(np.int64)  # the fine label comes last
        # A file has all red values of an image, then all green, then all blue.
        planes = rows[:, labels_each:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)
        parts[split] = (np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels)
        if len(rows) != COUNTS[split]:
            notes.append(
                f"{split} has {len(rows):,} images; the complete dataset has {COUNTS[split]:,}"
            )
    return _dataset(name, parts, where, notes)


# IDX files, the format of MNIST and similar datasets, gzipped or not.
#
# An IDX file is two zero bytes, a type byte (8: uint8), the number of dimensions, each dimension as
# a big-endian uint32, then the values in C order.

GZIP_MAGIC = b"\x1f\x8b"
UINT8 = 8


def read_idx(path: str | os.PathLike[str]) -> UInt8[np.ndarray, " ..."]:
    """Return the array of an IDX file, uint8; gzip is recognised by its first bytes.

    Raises:
        DataError: missing, not an IDX file, not uint8, or longer or shorter than it declares.
    """
    path = Path(path)
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(len(GZIP_MAGIC)) == GZIP_MAGIC
            raw.seek(0)
            stream = gzip.GzipFile(fileobj=raw) if is_gzip else raw
            # The third byte is the type of the values, the fourth the number of dimensions.
            head = stream.read(4)
            shape = struct.unpack(f">{head[3]}I", stream.read(4 * head[3]))
            # The file may declare more than it holds; one byte more shows if there is any.
            content = stream.read(min(math.prod(shape), MOST_BYTES) + 1)
            if head[:3] != bytes((0, 0, UINT8)) or not shape or len(content) != math.prod(shape):
                raise ValueError(
                    f"the sizes {shape} and {len(content):,} bytes after {head.hex(' ')}; expected "
                    "00 00 08 <dimensions>, the sizes, and as many values"
                )
            return np.frombuffer(content, np.uint8).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError, struct.error, zlib.error) as error:
        raise DataError(f"{path}: cannot be read as an IDX file of uint8: {error}") from error


def write_idx(path: str | os.PathLike[str], array: UInt8[np.ndarray, " ..."]) -> None:
    """Write a uint8 array, gzipped where the name ends in .gz; the same array, the same bytes."""
    header = struct.pack(f">HBB{array.ndim}I", 0, UINT8, array.ndim, *array.shape)
    content = header + array.tobytes()
    if str(path).endswith(".gz"):
        # No time in the header, so that files are reproducible; zlib's level 9.
        content = gzip.compress(content, compresslevel=9, mtime=0)
    Path(path).write_bytes(content)
