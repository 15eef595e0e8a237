"""The section on what the model has learned: the sheet of `vitkit explain --model`."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import numpy as np

from vitkit.data.images.decode import as_rgb
from vitkit.data.images.preprocess import preprocess_images
from vitkit.errors import ImageError, VitkitError
from vitkit.reporting.missing import Missing
from vitkit.reporting.reported_run import ReportedRun
from vitkit.reporting.sections.overview import SPLITS

MEASURED = 16
"""Images on which attention over depth is measured."""
SHEET_DPI = 110
"""Dots an inch of the sheet."""


def what_was_learned(run: ReportedRun) -> dict[str, Any]:
    """Return the sheet of a model: filters, positions, and attention over depth.

    Raises:
        Missing: no weights, or a model that the sheet cannot show.
    """
    command = run.command("explain", run.root, "--model", "--output", run.root / "model")
    if run.checkpoint is None:
        raise Missing(
            "The run has no weights that can be read; resume it, or draw the sheet of another "
            "checkpoint with vitkit explain CHECKPOINT --model."
        )
    # imported here: both need matplotlib or much of torch
    from vitkit.explaining.model.measure import ModelMeasurement
    from vitkit.plots.figure import encode_png

    measurement = ModelMeasurement(run.checkpoint.model)
    images = _images(run)
    size = measurement.batch_size(run.checkpoint.preprocess.image_size)
    try:
        for begin in range(0, len(images), size):
            batch = images[begin : begin + size]
            measurement.add(preprocess_images(batch, run.checkpoint.preprocess))
        found = measurement.result(run.name)
        content = encode_png(found.plot(), software="vitkit report", dpi=SHEET_DPI)
    except VitkitError as error:
        raise Missing(f"The sheet cannot be drawn: {error}.", command) from None
    return {
        "image": f"data:image/png;base64,{b64encode(content).decode('ascii')}",
        "measured": len(images),
        "lines": found.lines(),
        "command": command,
    }


def _images(run: ReportedRun) -> list[np.ndarray]:
    """Return some images that the run was not trained on; none where they cannot be read."""
    dataset = run.images.dataset
    names = [name for name in SPLITS if dataset is not None and name in dataset.splits]
    split = run.images.split(names[0]) if names else None
    if split is None:
        return []
    # from all of the split, which is often in the order of its classes
    places = np.linspace(0, len(split) - 1, min(MEASURED, len(split))).round().astype(int)
    found = []
    for place in places.tolist():
        try:
            found.append(as_rgb(split.read(place)))
        except (ImageError, OSError):
            continue
    return found
