"""A checkpoint for tests of commands: untrained, of grey images of 8 x 8 pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import vitkit


def save_tiny(path: Path, classes: Sequence[str]) -> str:
    """Write the checkpoint of a model with these classes; return its path."""
    model = vitkit.create_model(
        "vit_tiny_patch16_224", image_size=8, patch_size=4, in_channels=1, depth=1, width=24,
        num_heads=2, mlp_width=32, num_classes=len(classes),
    )  # fmt: skip
    preprocess = vitkit.Preprocess(image_size=8, mean=(0.5,), std=(0.5,))
    return str(vitkit.save(path, model, preprocess=preprocess, classes=classes))
