"""Draw the figure of the site's front page: a photograph, its patches, and where the model looks.

    python scripts/front_page_figure.py

It writes docs/images/patches_and_attention.webp, with a transparent background, from the checkpoint
that the tutorial carries and scikit-image's `chelsea` (CC0, by Stefan van der Walt).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from PIL import Image
from skimage import data

import vitkit

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "docs/tutorial/checkpoints/cifar10.safetensors"
OUTPUT = ROOT / "docs/images/patches_and_attention.webp"
SIZE, GAP, BETWEEN = (384, 576), 6, 56
"""Height and width of the photograph; the gaps between patches and between the three images."""


def apart(image: np.ndarray, across: int) -> np.ndarray:
    """Return an image (H, W, 3) as across x across patches with transparent gaps, RGBA uint8."""
    height, width = image.shape[0] // across, image.shape[1] // across
    down, right = height + GAP, width + GAP
    whole = np.zeros((across * down - GAP, across * right - GAP, 4), np.uint8)
    for row in range(across):
        for column in range(across):
            inside = image[row * height :, column * width :][:height, :width]
            place = whole[row * down :, column * right :][:height, :width]
            place[..., :3], place[..., 3] = inside, 255
    return whole


def main() -> None:
    """Draw and write."""
    photograph = Image.fromarray(data.chelsea())
    shown = np.asarray(photograph.resize(SIZE[::-1], Image.Resampling.LANCZOS))
    checkpoint = vitkit.load(CHECKPOINT)
    found = vitkit.explain(checkpoint, np.asarray(photograph), method="libragrad")
    assert found.grid is not None
    heat = Image.fromarray((found.grid / found.grid.max()).astype(np.float32))
    large = np.asarray(heat.resize(SIZE[::-1], Image.Resampling.NEAREST))
    colours = colormaps["inferno"](large.clip(0, 1))[..., :3] * 255
    overlay = (0.45 * shown + 0.55 * colours).astype(np.uint8)
    across = len(found.grid)
    parts = [apart(shown, 1), apart(shown, across), apart(overlay, across)]
    height = max(len(part) for part in parts)
    width = sum(part.shape[1] for part in parts) + BETWEEN * 2
    canvas, x = Image.new("RGBA", (width, height), (0, 0, 0, 0)), 0
    for part in parts:
        canvas.paste(Image.fromarray(part), (x, (height - len(part)) // 2))
        x += part.shape[1] + BETWEEN
    canvas.save(OUTPUT, quality=85, method=6)
    print(f"{found.label} {found.probability:.1%}; {OUTPUT}, {canvas.size}")


if __name__ == "__main__":
    main()
