"""`vitkit embed CHECKPOINT IMAGES... --out features.npz`."""

from __future__ import annotations

import sys
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tyro
from tyro.conf import Positional

from vitkit.cli.images import (
    StreamedImages,
    files_of_checkpoint,
    find_arguments,
    refuse_images_first,
)
from vitkit.cli.parsing.fields import as_flags
from vitkit.io.atomic import replacing
from vitkit.io.results import check_outputs, npz_result
from vitkit.messages import plural

if TYPE_CHECKING:
    from torch import Tensor

    from vitkit.prediction.images import FoundImage

FEATURES_FILE = npz_result("a file of features", ("features", "images"), optional=("labels",))
BYTES_AT_ONCE = 1 << 20
TEXTS_AT_ONCE = 10_000
"""Texts of an array that are encoded at once: each then has the length of the longest of all."""


EXAMPLES = (
    "vitkit embed runs/photos-vit-1 photos --out features.npz  # all images of a folder",
    "vitkit embed runs/photos-vit-1 mnist --split test --out test.npz  # with labels",
    "vitkit embed model.safetensors 'photos/*.png' --out png.npz  # quoted patterns",
)


def embed_command(
    checkpoint: Positional[str],
    images: Positional[tuple[str, ...]],
    *,
    out: str,
    device: str = "auto",
    batch_size: int = 64,
    split: str | None = None,
    data_root: str | None = None,
    overwrite: bool = False,
    strict: bool = False,
) -> None:
    """Write the pooled features of images as arrays `features` (N, D) and `images` (N,).

    Images of a dataset also have their class names in the array `labels` (N,). An image that cannot
    be used is named on stderr and left out; the others are written, and the exit code is 2 at the
    end.

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        images: files, folders, quoted patterns ('photos/**/*.png'), http(s) addresses, - (reads
            paths from the standard input), or datasets (list.csv, x.parquet, 'wds:*.tar', mnist).
        out: the .npz file to write.
        device: cpu, cuda, mps or auto.
        batch_size: images per batch.
        split: train, val or test: only this split of datasets and of folders with class folders.
        data_root: folder of the named datasets, or the folder that the paths of a CSV begin at.
        overwrite: replace any existing file that is not an input; default: only earlier features.
        strict: stop at the first image that cannot be used, and write nothing.
    """
    path = Path(out)
    refuse_images_first("embed", checkpoint, "IMAGES")
    named = [*map(Path, images), *files_of_checkpoint(checkpoint)]
    # first by the names alone: opening a large dataset takes time
    check_outputs([path], FEATURES_FILE, inputs=named, overwrite=overwrite, flag="--out")
    found = find_arguments(images, split=split, data_root=data_root)
    inputs = chain(named, found.files())
    check_outputs([path], FEATURES_FILE, inputs=inputs, overwrite=overwrite, flag="--out")
    # imported here: --help and wrong paths do not wait for torch
    from vitkit.prediction.embedding import feature_predictor
    from vitkit.weights.load import load

    loaded = load(checkpoint)
    predictor = feature_predictor(loaded, device=device, batch_size=batch_size)
    usable = StreamedImages(found, strict=strict, outputs={"--out": path})
    features = usable.with_outputs(predictor.outputs(usable))
    count, width = _write(path, features, has_labels=bool(found.classes))
    sys.stdout.write(f"wrote {out}: {plural(count, 'image')} x {plural(width, 'feature')}\n")
    if sys.stderr.isatty():
        sys.stderr.write(f"next: numpy.load({out!r})['features'] in Python\n")
    usable.refuse_broken()


def run(arguments: list[str]) -> None:
    """Parse the arguments and embed."""
    with as_flags("batch_size", "split"):
        tyro.cli(embed_command, args=arguments, prog="vitkit embed")


def _write(
    path: Path, rows: Iterable[tuple[FoundImage, Tensor]], *, has_labels: bool
) -> tuple[int, int]:
    """Write features to an .npz file as they come; return (N, D).

    Features do not stay in memory. Names of files are exact: a byte that is not UTF-8 is a lone
    surrogate, as for `os.fsencode`.
    """
    names: list[str] = []
    labels: list[str] = []
    width = 0
    # an array begins with its shape, which is known at the end: the features wait in a file
    with replacing(path) as temporary, tempfile.TemporaryFile(dir=path.parent) as features:
        for image, row in rows:
            names.append(image.name)
            labels.append(image.label)
            width = len(row)
            features.write(row.numpy().tobytes())
        features.seek(0)
        with zipfile.ZipFile(temporary, "w") as archive:
            chunks = iter(lambda: features.read(BYTES_AT_ONCE), b"")
            _write_array(archive, "features", "<f4", (len(names), width), chunks)
            _write_texts(archive, "images", names)
            if has_labels:
                _write_texts(archive, "labels", labels)
    return len(names), width


def _write_texts(archive: zipfile.ZipFile, name: str, texts: Sequence[str]) -> None:
    """Write texts as an array in which each has the length of the longest."""
    kind = f"<U{max(1, max(map(len, texts), default=1))}"
    parts = (texts[start : start + TEXTS_AT_ONCE] for start in range(0, len(texts), TEXTS_AT_ONCE))
    chunks = (np.array(part, dtype=kind).tobytes() for part in parts)
    _write_array(archive, name, kind, (len(texts),), chunks)


def _write_array(
    archive: zipfile.ZipFile,
    name: str,
    kind: str,
    shape: tuple[int, ...],
    chunks: Iterable[bytes],
) -> None:
    """Write an array of an .npz file; it begins with its shape."""
    header = {"descr": kind, "fortran_order": False, "shape": shape}
    # its size is not known yet, and may be above the 4 GB of a plain entry
    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        np.lib.format.write_array_header_1_0(entry, header)
        for chunk in chunks:
            entry.write(chunk)
