"""`predictions.csv`: the prediction of every image of a split, with its loss."""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitkit.evaluation.result import Evaluation

PREDICTIONS_HEADER = (
    "image",
    "label",
    "predicted",
    "probability",
    "label_probability",
    "loss",
    "loss_rank",
)
"""Columns: the name of the image, its class, the predicted class and its probability; then the
probability of its own class, the loss -ln of that in nats, and the place by loss, highest first."""


def predictions_csv(evaluation: Evaluation) -> bytes:
    """Return the content of a CSV file in UTF-8, a row for each image in the order of the split."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(PREDICTIONS_HEADER)
    losses = evaluation.losses.tolist()
    ranks = evaluation.loss_ranks.tolist()
    # every image's row has its place by loss, so that a spreadsheet can sort by it
    for row, loss, rank in zip(evaluation.rows(), losses, ranks, strict=True):
        *names, probability = row
        numbers = [f"{probability:.6f}", f"{math.exp(-loss):.6g}", f"{loss:.6g}"]
        writer.writerow([*names, *numbers, rank])
    return text.getvalue().encode()
