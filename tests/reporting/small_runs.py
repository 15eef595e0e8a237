"""Small runs for reports: of the embedded digits, and of a folder with hostile names."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import vitkit

SMALL: dict[str, Any] = {
    "epochs": 2, "warmup_epochs": 0.5, "amp": "off", "quiet": True, "device": "cpu", "threads": 1,
    "workers": 0, "log_examples": False, "log_histograms": False, "plots": False,
}  # fmt: skip
SUSPECTS_HEADER = [
    "path", "split", "number", "label", "predicted", "probability", "label_probability",
]  # fmt: skip
HOSTILE = "<script>alert('x')<"
"""A part of class and file names."""


def digits_run(folder: Path, **settings: Any) -> Path:
    spec = {"depth": 1, "width": 32, "patch_size": 4}
    asked = {"recipe": "digits", "batch_size": 128, "spec": spec, **SMALL, **settings}
    return vitkit.train("digits", output=folder, **asked).run


def photo_run(folder: Path, **settings: Any) -> Path:
    """Train on a folder of RGB and grey images whose names would run in a browser."""
    generator = np.random.default_rng(0)
    for number, label in enumerate(("cat", f"{HOSTILE}b>", 'dog "&" \'')):
        place = folder / "images" / label
        place.mkdir(parents=True)
        for index in range(40):
            pixels = generator.integers(0, 200, (60, 90, 3)) + 20 * number
            image = Image.fromarray(pixels.astype(np.uint8))
            if index % 2:
                image = image.convert("L")
            image.save(place / f"{HOSTILE}{index:02}>.png")
    spec = {"image_size": 32, "patch_size": 16, "width": 32, "depth": 1, "num_heads": 2,
            "mlp_width": 64}  # fmt: skip
    asked = {"spec": spec, "batch_size": 32, **SMALL, **settings}
    return vitkit.train(folder / "images", output=folder / "run", **asked).run
