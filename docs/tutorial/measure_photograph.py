"""Recognise the photographs of chapter 13 with a published checkpoint; this needs a network."""

from __future__ import annotations

import tempfile
from pathlib import Path

from experiment import Experiment, Numbers, Options
from photographs import top_lines, write_photographs

import vitkit

PUBLISHED = "vit_small_patch16_224.augreg_in21k_ft_in1k"
OURS = Path(__file__).parent / "checkpoints" / "cifar10.safetensors"


def photograph(options: Options) -> Numbers:
    """Return the lines that the chapter shows where there is no network."""
    checkpoint = vitkit.load(OURS if options.quick else PUBLISHED)
    with tempfile.TemporaryDirectory() as folder:
        paths = list(write_photographs(Path(folder)).values())
        predictions = vitkit.Predictor.from_checkpoint(checkpoint)(paths)
    return {
        "checkpoint": PUBLISHED,
        "licence": checkpoint.metadata.get("licence"),
        "lines": top_lines(predictions),
    }


EXPERIMENTS = {
    "photograph": Experiment(
        photograph, "a published model on photographs; downloads 88 MB", seeds=(0,)
    ),
}
