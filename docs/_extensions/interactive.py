"""Parts of a page that answer the reader: a digit to draw, and examples whose numbers change.

Each is a directive whose body is one sentence. Its HTML stands without JavaScript, with the numbers
that vitkit gives; the scripts of `_static/interactive` make it answer. Only a page that has such a
part loads its scripts. The weights of the digits' model become a script too, because a page that is
opened as a file may not read other files.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np

import vitkit

DOCS = Path(__file__).parents[1]
CHECKPOINT = DOCS / "tutorial/checkpoints/digits.safetensors"
EXAMPLES = 10
"""Test images beside the drawing, one of each digit."""


def weights_script(path: Path = CHECKPOINT) -> str:
    """Return a script that sets `digitModel`: the model, how its input is made, and examples."""
    checkpoint = vitkit.load(path)
    spec, preprocess = checkpoint.model.spec, checkpoint.preprocess
    check_supported(spec)
    tensors, parts, offset = [], [], 0
    for name, value in checkpoint.model.state_dict().items():
        tensors.append({"name": name, "shape": list(value.shape), "offset": offset})
        parts.append(value.numpy().astype("<f4").tobytes())
        offset += value.numel()
    model = {
        "height": spec.image_size[0],
        "width": spec.image_size[1],
        "patch": spec.patch_size[0],
        "depth": spec.depth,
        "heads": spec.num_heads,
        "eps": spec.norm_eps,
        "mean": preprocess.mean[0],
        "std": preprocess.std[0],
        "classes": list(checkpoint.classes),
        "examples": examples(),
        "tensors": tensors,
        "data": base64.b64encode(b"".join(parts)).decode("ascii"),
    }
    return f"globalThis.digitModel = {json.dumps(model, separators=(',', ':'))};\n"


def check_supported(spec: vitkit.ViTSpec) -> None:
    """Stop the build for a model that vit.js does not compute."""
    plain = vitkit.ViTSpec(
        image_size=spec.image_size, patch_size=spec.patch_size, in_channels=1,
        num_classes=spec.num_classes, width=spec.width, depth=spec.depth,
        num_heads=spec.num_heads, mlp_width=spec.mlp_width, stem=spec.stem,
        norm_eps=spec.norm_eps,
    )  # fmt: skip
    square = spec.patch_size[0] == spec.patch_size[1]
    if not square or spec.stem not in ("convolution", "linear") or spec != plain:
        raise ValueError(f"{CHECKPOINT.name}: vit.js does not compute {spec}")


def examples() -> list[dict[str, Any]]:
    """Return the first test image of each digit, as counts 0 to 16."""
    test = vitkit.open_dataset("digits").splits["test"]
    labels = [int(label) for label in test.labels]
    found = []
    for digit in range(EXAMPLES):
        index = labels.index(digit)
        counts = np.rint(test.read(index)[..., 0] / 255 * 16).astype(int)
        found.append({"label": digit, "index": index, "counts": counts.ravel().tolist()})
    return found
