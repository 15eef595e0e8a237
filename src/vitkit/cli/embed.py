"""`vitkit embed CHECKPOINT IMAGES... --out features.npz`."""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import tyro
from tyro.conf import Positional

from vitkit.cli.arguments import as_flags
from vitkit.cli.images import UsableImages, files_of_checkpoint, find_images, refuse_images_first
from vitkit.io.atomic import replacing
from vitkit.io.results import check_outputs, npz_result
from vitkit.messages import escape, plural

if TYPE_CHECKING:
    from torch import Tensor

FEATURES_FILE = npz_result("a file of features", ("features", "images"))


def embed_command(
    checkpoint: Positional[str],
    images: Positional[tuple[str, ...]],
    *,
    out: str,
    device: str = "auto",
    batch_size: int = 64,
    overwrite: bool = False,
    strict: bool = False,
) -> None:
    """Write the pooled features of images as arrays `features` (N, D) and `images` (N,).

    An image that cannot be used is named on stderr and left out; the others are written, and the
    exit code is 2 at the end.

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        images: files, or folders of them.
        out: the .npz file to write.
        device: cpu, cuda, mps or auto.
        batch_size: images per batch.
        overwrite: replace any existing file that is not an input; default: only earlier features.
        strict: stop at the first image that cannot be used, and write nothing.
    """
    path = Path(out)
    refuse_images_first("embed", checkpoint, "IMAGES")
    usable = UsableImages(find_images(images), strict=strict)
    inputs = [*usable.paths, *files_of_checkpoint(checkpoint)]
    check_outputs([path], FEATURES_FILE, inputs=inputs, overwrite=overwrite, flag="--out")
    # imported here: --help and wrong paths do not wait for torch
    from vitkit.prediction import feature_predictor
    from vitkit.weights.load import load

    loaded = load(checkpoint)
    predictor = feature_predictor(loaded, device=device, batch_size=batch_size)
    features = usable.with_outputs(predictor.outputs(usable.paths))
    count, width = _write(path, features)
    sys.stdout.write(f"wrote {out}: {plural(count, 'image')} x {plural(width, 'feature')}\n")
    usable.refuse_broken()


def run(arguments: list[str]) -> None:
    """Parse the arguments and embed."""
    with as_flags("batch_size"):
        tyro.cli(embed_command, args=arguments, prog="vitkit embed")


def _write(path: Path, rows: Iterable[tuple[Path, Tensor]]) -> tuple[int, int]:
    """Write features to an .npz file as they come, so that memory does not grow; return (N, D)."""
    names = []
    width = 0
    with replacing(path) as temporary, tempfile.TemporaryFile(dir=path.parent) as features:
        for name, row in rows:
            names.append(escape(name))
            width = len(row)
            features.write(row.numpy().tobytes())
        # An array in an .npz file begins with its shape, which is known only now.
        header = {"descr": "<f4", "fortran_order": False, "shape": (len(names), width)}
        features.seek(0)
        with zipfile.ZipFile(temporary, "w") as archive:
            with archive.open("features.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array_header_1_0(entry, header)
                shutil.copyfileobj(features, entry)
            with archive.open("images.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, np.array(names, dtype=np.str_))
    return len(names), width
