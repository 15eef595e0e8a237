"""Checkpoints for tests of commands: an untrained one of grey images, and one of noise."""

from collections.abc import Sequence
from pathlib import Path

from noise import fill_with_noise

import vitkit


def save_tiny(path: Path, classes: Sequence[str]) -> str:
    """Write a model of grey images of 8 x 8 pixels with these classes; return its path."""
    model = vitkit.create_model(
        "vit_tiny_patch16_224", image_size=8, patch_size=4, in_channels=1, depth=1, width=24,
        num_heads=2, mlp_width=32, num_classes=len(classes),
    )  # fmt: skip
    preprocess = vitkit.Preprocess(image_size=8, mean=(0.5,), std=(0.5,))
    return str(vitkit.save(path, model, preprocess=preprocess, classes=classes))


def save_noisy(path: Path, classes: Sequence[str], *, std: float, **fields) -> str:
    """Write a model of noise whose maps differ from patch to patch; return its path.

    It takes RGB images of 16 x 24 pixels, 2 x 3 patches.

    Args:
        path: of the file.
        classes: the first `num_classes` of them are the model's.
        std: of the noise.
        **fields: of the spec.
    """
    spec = vitkit.ViTSpec(**{
        "image_size": (16, 24), "patch_size": 8, "width": 16, "depth": 2, "num_heads": 4,
        "mlp_width": 16, "num_classes": len(classes), **fields,
    })  # fmt: skip
    model = vitkit.ViT(spec)
    fill_with_noise(model, std=std)
    preprocess = vitkit.Preprocess(image_size=spec.image_size)
    return str(vitkit.save(path, model, preprocess=preprocess, classes=classes[: spec.num_classes]))
