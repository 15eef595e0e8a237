"""`vitkit embed CHECKPOINT IMAGES... --out features.npz`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import tyro
from tyro.conf import Positional

from vitkit.cli.images import (
    StreamedImages,
    files_of_checkpoint,
    find_arguments,
    refuse_images_first,
)
from vitkit.cli.parsing import EngineChoice, EngineFlags, PrecisionChoice, as_flags, open_checkpoint
from vitkit.io.results import check_outputs
from vitkit.messages import escape, plural
from vitkit.prediction.features_file import FEATURES_FILE, write_features

if TYPE_CHECKING:
    from torch import Tensor

    from vitkit.prediction.images import FoundImage

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
    engine: EngineChoice = "auto",
    precision: PrecisionChoice = "float32",
    calibrate: str | None = None,
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
        engine: auto, torch, compile, openvino or onnxruntime; auto: the fastest here, by trials.
        precision: float32, bfloat16 or int8; auto: the fastest with the same predictions.
        calibrate: DATA for int8, such as the training data; its test split is not used.
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
    choice = EngineFlags(engine, precision, calibrate, data_root)
    loaded, options = open_checkpoint(checkpoint, choice, found.total)
    from vitkit.prediction.features import feature_predictor

    predictor = feature_predictor(loaded, device=device, batch_size=batch_size, options=options)
    usable = StreamedImages(found, strict=strict, outputs={"--out": path})
    features = usable.with_outputs(predictor.outputs(usable))
    _write(path, features, bool(found.classes))
    usable.refuse_broken()


def _write(path: Path, features: Iterable[tuple[FoundImage, Tensor]], has_labels: bool) -> None:
    """Write features as they come, and print their number."""
    count, width = write_features(path, features, has_labels=has_labels)
    size = f"{plural(count, 'image')} x {plural(width, 'feature')}"
    sys.stdout.write(f"wrote {escape(path)}: {size}\n")
    if sys.stderr.isatty():
        sys.stderr.write(f"next: numpy.load({str(path)!r})['features'] in Python\n")


def run(arguments: list[str]) -> None:
    """Parse the arguments and embed."""
    with as_flags("batch_size", "split"):
        tyro.cli(embed_command, args=arguments, prog="vitkit embed")
