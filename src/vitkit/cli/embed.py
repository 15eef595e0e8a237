"""`vitkit embed CHECKPOINT PICTURES... --out features.npz`."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import tyro
from tyro.conf import Positional

from vitkit import api
from vitkit.cli.pictures import find_pictures
from vitkit.data.images import printable
from vitkit.errors import OutputError
from vitkit.weights.files import refuse_unwritable, write_bytes
from vitkit.weights.load import load


def embed(
    checkpoint: Positional[str],
    pictures: Positional[tuple[str, ...]],
    *,
    out: str,
    device: str = "auto",
    batch_size: int = 64,
) -> None:
    """The features of pictures, what the head reads: arrays `features` (N, D) and `pictures` (N,).

    Args:
        checkpoint: a run folder (its best weights), or a checkpoint of any known format.
        pictures: files, or folders of them.
        out: the .npz file to write.
        device: cpu, cuda, mps or auto.
        batch_size: pictures run at once.
    """
    if Path(out).suffix != ".npz":
        raise OutputError(f"{out}: features are written as .npz; name it so")
    refuse_unwritable(Path(out))
    stored = load(checkpoint)
    names = find_pictures(pictures)
    features = api.embed(stored, names, device=device, batch_size=batch_size)
    content = io.BytesIO()
    np.savez(content, features=features, pictures=np.array([printable(name) for name in names]))
    write_bytes(Path(out), content.getvalue())
    sys.stdout.write(f"{len(features)} pictures x {features.shape[1]} features -> {out}\n")


def run(arguments: list[str]) -> None:
    """Parse and embed."""
    tyro.cli(embed, args=arguments, prog="vitkit embed")
