"""`vitkit embed CHECKPOINT IMAGES... --out features.npz`."""

from __future__ import annotations

import sys
from itertools import chain
from pathlib import Path

import tyro
from tyro.conf import Positional

from vitkit.cli.images import (
    StreamedImages,
    files_of_checkpoint,
    find_arguments,
    refuse_images_first,
)
from vitkit.cli.parsing.fields import as_flags
from vitkit.io.results import check_outputs
from vitkit.messages import escape, plural
from vitkit.prediction.features_file import FEATURES_FILE, write_features
from vitkit.process import uncollected_imports

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

    Images of a dataset also have their class names in the array `labels` (N,). An image that is
    missing or cannot be used is named on stderr and left out; the others are written, and the exit
    code is 2 at the end.

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
        strict: stop at the first image that is missing or cannot be used, and write nothing.
    """
    path = Path(out)
    refuse_images_first("embed", checkpoint, "IMAGES")
    named = [*map(Path, images), *files_of_checkpoint(checkpoint)]
    # first by the names alone: opening a large dataset takes time
    check_outputs([path], FEATURES_FILE, inputs=named, overwrite=overwrite, flag="--out")
    found = find_arguments(images, split=split, data_root=data_root, strict=strict)
    inputs = chain(named, found.files())
    check_outputs([path], FEATURES_FILE, inputs=inputs, overwrite=overwrite, flag="--out")
    # imported here: --help and wrong paths do not wait for torch
    with uncollected_imports():
        from vitkit.prediction.features import feature_predictor
        from vitkit.weights.load import load

    loaded = load(checkpoint)
    predictor = feature_predictor(loaded, device=device, batch_size=batch_size)
    usable = StreamedImages(found, strict=strict, outputs={"--out": path})
    features = usable.with_outputs(predictor.outputs(usable))
    count, width = write_features(path, features, has_labels=bool(found.classes))
    size = f"{plural(count, 'image')} x {plural(width, 'feature')}"
    sys.stdout.write(f"wrote {escape(out)}: {size}\n")
    if sys.stderr.isatty():
        sys.stderr.write(f"next: numpy.load({out!r})['features'] in Python\n")
    usable.refuse_broken()


def run(arguments: list[str]) -> None:
    """Parse the arguments and embed."""
    with as_flags("batch_size", "split"):
        tyro.cli(embed_command, args=arguments, prog="vitkit embed")
