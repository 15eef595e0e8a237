"""The images that a run began with, so that it can resume exactly when some files are gone.

The order of an epoch, the cut into train, val and test, and every random draw are functions of an
image's index in its split. `images.npz` in the run folder keeps these indices: the file names,
class numbers and file hashes of each split. A run that resumes with `--bad-images skip` takes its
splits from there; images that are missing or were changed are replaced by others of their class.
"""

from __future__ import annotations

import dataclasses
import io
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from jaxtyping import UInt64

from vitkit.data.datasets.dataset import Dataset, FileSplit
from vitkit.data.datasets.file_digests import file_digests
from vitkit.data.datasets.path_list import Paths
from vitkit.data.datasets.split import ImageFiles, Split
from vitkit.data.images.rereading import ANOTHER_FILE, file_stamps
from vitkit.errors import CheckpointError
from vitkit.io.atomic import write_bytes

FINGERPRINT, CLASSES = "fingerprint", "classes"
NAMES, LABELS, LINES, DIGESTS = "names", "labels", "lines", "digests"
SEPARATOR = b"\0"
"""Between two texts in an array: no file name has this byte."""
DAMAGE = (
    OSError,
    ValueError,
    LookupError,
    EOFError,
    TypeError,
    NotImplementedError,
    BadZipFile,
    zlib.error,
)
"""Exceptions raised by reading a damaged list."""


def write_image_list(path: Path, dataset: Dataset) -> None:
    """Write the list of a dataset of image files; nothing for one of another kind.

    Raises:
        OutputError: the file cannot be written.
    """
    columns: dict[str, np.ndarray] = {
        FINGERPRINT: _packed([dataset.fingerprint.encode()]),
        CLASSES: _packed(map(str.encode, dataset.classes)),
    }
    for name, split in dataset.splits.items():
        files = split.files()
        if files is None:  # images in arrays, archives or a cache do not go missing
            return
        columns |= _split_columns(name, files)
        columns[f"{name}/{LABELS}"] = split.labels.astype(np.int64)
    # In memory first: the file is then written all or nothing.
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **columns)
    write_bytes(path, stream.getvalue())


def _split_columns(name: str, files: ImageFiles) -> dict[str, np.ndarray]:
    """Return the columns of one split's files: names relative to its folder, digests, lines."""
    root = os.fspath(files.root)
    paths = Paths(files.paths)
    # Relative names, so that the folder of the images may be moved; bytes, as a file name need not
    # be valid UTF-8.
    names = [os.fsencode(os.path.relpath(path, root)) for path in paths.texts()]
    columns = {
        f"{name}/{NAMES}": _packed(names),
        f"{name}/{DIGESTS}": _short_digests(paths),
    }
    if files.lines is not None:
        columns[f"{name}/{LINES}"] = files.lines
    return columns


def restore_dataset(path: Path, dataset: Dataset) -> tuple[Dataset, list[str]]:
    """Restore the dataset as it was when the run began.

    Args:
        path: the list.
        dataset: the dataset as it is now; one that is not of image files is returned unchanged.

    Returns:
        The dataset, and one line for each split of which images are missing or changed.

    Raises:
        CheckpointError: the list cannot be read.
    """
    root = _image_root(dataset)
    if root is None:
        return dataset, []
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            columns = dict(stored)  # reads all of them, and so finds any damage
        splits: dict[str, Split] = {}
        notes: list[str] = []
        for key in columns:
            if not key.endswith(NAMES):
                continue
            name = key.removesuffix(f"/{NAMES}")
            split, missing = _restored_split(columns, name, root)
            splits[name] = split
            if missing:
                notes.append(
                    f"{missing:,} of {len(split):,} images of {name} are missing or changed "
                    "since the run started; others of their class are used instead"
                )
        classes = tuple(map(bytes.decode, _unpacked(columns[CLASSES])))
        fingerprint = _unpacked(columns[FINGERPRINT])[0].decode()
    except DAMAGE as error:
        raise CheckpointError(
            f"{path}: the list of the run's images is damaged ({error}); restore the missing "
            "images and pass --bad-images refuse, or start afresh"
        ) from None
    original = dataclasses.replace(dataset, classes=classes, splits=splits, fingerprint=fingerprint)
    return original, notes


def _image_root(dataset: Dataset) -> Path | None:
    """Return the folder of the dataset's images, if they are files."""
    folders = (split.folder() for split in dataset.splits.values())
    return next((folder for folder in folders if folder is not None), None)


def _restored_split(columns: dict[str, np.ndarray], name: str, root: Path) -> tuple[FileSplit, int]:
    """Rebuild a split from the list; return it and the number of missing or changed images."""
    names = map(os.fsdecode, _unpacked(columns[f"{name}/{NAMES}"]))
    paths = Paths(names, root)
    # Before the digests: a file that changes after this line has another stamp when it is read.
    stamps = file_stamps(paths.texts())
    missing = _short_digests(paths) != columns[f"{name}/{DIGESTS}"]
    # This stamp matches no file, so the image is treated as missing.
    stamps = np.where(missing, ANOTHER_FILE, stamps)
    labels = columns[f"{name}/{LABELS}"]
    split = FileSplit(paths, labels, root, columns.get(f"{name}/{LINES}"), stamps)
    return split, int(missing.sum())


def _short_digests(paths: Paths) -> UInt64[np.ndarray, " N"]:
    """Return the first 64 bits of each file's SHA-256 (N,)."""
    first_bytes = np.ascontiguousarray(file_digests(paths)[:, :8])
    return first_bytes.view(np.uint64)[:, 0]


def _packed(texts: Iterable[bytes]) -> np.ndarray:
    return np.frombuffer(SEPARATOR.join(texts), np.uint8)


def _unpacked(packed: np.ndarray) -> list[bytes]:
    return packed.tobytes().split(SEPARATOR)
