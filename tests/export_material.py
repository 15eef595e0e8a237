"""A tiny checkpoint, and images whose classes are its own predictions: its accuracy is 100 %."""

from pathlib import Path

import numpy as np
from noise import fill_with_noise
from PIL import Image

import vitkit

CLASSES = ("ant", "bee", "cat")
TEMPERATURE = 1.7
PREPROCESS = vitkit.Preprocess(image_size=32, mean=(0.4, 0.5, 0.6), std=(0.2, 0.25, 0.3))


def save_checkpoint(path: Path) -> Path:
    model = vitkit.create_model(
        "vit_tiny_patch16_224", num_classes=len(CLASSES), image_size=32, patch_size=8, depth=1,
        width=32, num_heads=2, mlp_width=64,
    )  # fmt: skip
    fill_with_noise(model, std=0.3)  # predicts all classes
    return vitkit.save(path, model, preprocess=PREPROCESS, classes=CLASSES, temperature=TEMPERATURE)


def blobs(seed: int) -> np.ndarray:
    """Return an image of smooth colours, of a size of its own."""
    generator = np.random.default_rng(seed)
    coarse = generator.integers(0, 256, (3, 4, 3), dtype=np.uint8)
    size = tuple(generator.integers(20, 60, 2).tolist())
    return np.array(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC))


def save_images(folder: Path, checkpoint: Path, splits: dict[str, int]) -> Path:
    predictor = vitkit.Predictor.from_checkpoint(checkpoint, engine="torch")
    seed = 0
    for split, count in splits.items():
        images = [blobs(seed + number) for number in range(count)]
        seed += count
        for number, (image, found) in enumerate(zip(images, predictor(images), strict=True)):
            place = folder / split / found.label
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place / f"{number:03}.png")
    return folder
