"""The images that a run began with: so it can go on, bit for bit, when some files are gone.

The order of an epoch, the cut into train, val and test and every random draw are functions of an
image's place in its split. `images.npz` in the run's folder keeps these places: each split's names,
class numbers and hashes of the files. A run that goes on with `--bad-images skip` takes its splits
from there; images that are gone, or are others by now, have stand-ins.
"""

from __future__ import annotations

import dataclasses
import io
import os
import zlib
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from jaxtyping import UInt64

from vitkit.data.datasets.file_digests import file_digests
from vitkit.data.datasets.path_list import Paths
from vitkit.data.datasets.replacements import StandIns
from vitkit.data.images.rereading import ANOTHER_FILE, file_stamps
from vitkit.data.sources.open import Dataset, FileSplit, Split
from vitkit.errors import CheckpointError
from vitkit.io.atomic import write_bytes

FINGERPRINT, CLASSES = "fingerprint", "classes"
NAMES, LABELS, LINES, DIGESTS = "names", "labels", "lines", "digests"
BETWEEN = b"\0"
DAMAGE = (OSError, ValueError, LookupError, EOFError, TypeError, NotImplementedError, BadZipFile,
          zlib.error)  # fmt: skip
"""What reading a damaged list raises."""


def write_image_list(place: Path, dataset: Dataset) -> None:
    """Write the list of a data set of image files; nothing for one of another kind.

    Raises:
        OutputError: the file cannot be written.
    """
    columns: dict[str, np.ndarray] = {
        FINGERPRINT: _packed([dataset.fingerprint.encode()]),
        CLASSES: _packed([name.encode() for name in dataset.classes]),
    }
    for name, split in dataset.splits.items():
        files = split.split if isinstance(split, StandIns) else split
        if not isinstance(files, FileSplit):
            return
        root = os.fspath(files.root)
        columns |= {
            f"{name}/{NAMES}": _packed([os.fsencode(os.path.relpath(p, root))
                                        for p in files.paths.texts()]),
            f"{name}/{LABELS}": files.labels.astype(np.int64),
            f"{name}/{DIGESTS}": _short_digests(files.paths),
        }  # fmt: skip
        if files.lines is not None:
            columns[f"{name}/{LINES}"] = files.lines
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **columns)
    write_bytes(place, stream.getvalue())


def restored(place: Path, dataset: Dataset) -> tuple[Dataset, list[str]]:
    """The data set as the run began with it, and how many of its images are gone, a line a split.

    Args:
        place: the list.
        dataset: what is found now; one of another kind than image files comes back as it is.

    Raises:
        CheckpointError: the list cannot be read.
    """
    root = next((s.root for s in dataset.splits.values() if isinstance(s, FileSplit)), None)
    if root is None:
        return dataset, []
    try:
        with place.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            columns = {name: stored[name] for name in stored.files}
        splits: dict[str, Split] = {}
        notes: list[str] = []
        for name in [key.removesuffix(f"/{NAMES}") for key in columns if key.endswith(NAMES)]:
            split, gone = _restored_split(columns, name, root)
            splits[name] = split
            if gone:
                notes.append(
                    f"{gone:,} of {len(split):,} images of {name} are missing or changed since the "
                    f"run began; others of their class take their places"
                )
        classes = tuple(name.decode() for name in _unpacked(columns[CLASSES]))
        mark = _unpacked(columns[FINGERPRINT])[0].decode()
    except DAMAGE as error:
        raise CheckpointError(
            f"{place}: the list of the run's images is damaged ({error}); bring back the images "
            f"that are gone and pass --bad-images refuse, or start afresh"
        ) from None
    return dataclasses.replace(dataset, classes=classes, splits=splits, fingerprint=mark), notes


def _restored_split(columns: dict[str, np.ndarray], name: str, root: Path) -> tuple[FileSplit, int]:
    """A split of the list, and how many of its images are gone: their stamps fit no file."""
    names = [os.fsdecode(text) for text in _unpacked(columns[f"{name}/{NAMES}"])]
    paths = Paths(names, root)
    stamps = file_stamps(paths.texts())
    gone = _short_digests(paths) != columns[f"{name}/{DIGESTS}"]
    split = FileSplit(
        paths, columns[f"{name}/{LABELS}"], root, columns.get(f"{name}/{LINES}"),
        np.where(gone, ANOTHER_FILE, stamps),
    )  # fmt: skip
    return split, int(gone.sum())


def _short_digests(paths: Paths) -> UInt64[np.ndarray, " N"]:
    """The first 64 bits of each file's SHA-256 (N,)."""
    whole = np.ascontiguousarray(file_digests(paths)[:, :8])
    return whole.view(np.uint64)[:, 0]


def _packed(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(BETWEEN.join(texts), np.uint8)


def _unpacked(packed: np.ndarray) -> list[bytes]:
    return packed.tobytes().split(BETWEEN)
