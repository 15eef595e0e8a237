"""Photographs for chapter 13, and a small folder of images made from three of them."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from PIL import Image
from skimage import data

import vitkit
from vitkit.plots.overlay import enlarge

PHOTOGRAPHS = {
    "cat": data.chelsea,
    "horse": data.horse,
    "coffee": data.coffee,
    "rocket": data.rocket,
    "astronaut": data.astronaut,
}
"""Name -> image of scikit-image; all are in the public domain (CC0, NASA, SpaceX)."""
TEXTURES = {"brick": data.brick, "grass": data.grass, "gravel": data.gravel}
"""Likewise CC0, each one grey photograph of 512 x 512 pixels."""


def write_photographs(folder: Path) -> dict[str, Path]:
    """Write the photographs as PNG files, and return their paths by name."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, read in PHOTOGRAPHS.items():
        pixels = np.asarray(read())
        if pixels.dtype == bool:
            pixels = pixels.astype(np.uint8) * 255
        paths[name] = folder / f"{name}.png"
        Image.fromarray(pixels).save(paths[name])
    return paths


def write_textures(folder: Path, *, each: int, test: int, side: int) -> None:
    """Write squares cut from the textures: left half for train, right half for test."""
    random = np.random.default_rng(0)
    for name, read in TEXTURES.items():
        pixels = read()
        middle = pixels.shape[1] // 2
        for split, first, count in (("train", 0, each), ("test", middle, test)):
            (folder / split / name).mkdir(parents=True)
            for number in range(count):
                top = random.integers(0, len(pixels) - side)
                left = random.integers(first, first + middle - side)
                square = pixels[top : top + side, left : left + side]
                path = folder / split / name / f"{number}.png"
                Image.fromarray(square).convert("RGB").save(path)


def seen_by(preprocess: vitkit.Preprocess, path: Path) -> np.ndarray:
    """Return the pixels that a model gets, enlarged to be visible, (H, W, 3) uint8."""
    values = preprocess(path).permute(1, 2, 0).numpy()  # (h, w, 3), normalised
    pixels = (values * preprocess.std + preprocess.mean) * 255
    return enlarge(np.rint(np.clip(pixels, 0, 255)).astype(np.uint8), 7)


def with_titles(
    rows: list[list[np.ndarray]], titles: list[list[str]], size: float = 1.7
) -> Figure:
    """Draw rows of images, each with its own title."""
    down, across = len(rows), len(rows[0])
    figure, axes = plt.subplots(
        down, across, figsize=(across * size, down * (size + 0.3)), squeeze=False
    )
    for line, images, words in zip(axes, rows, titles, strict=True):
        for ax, image, title in zip(line, images, words, strict=True):
            ax.imshow(image, aspect="equal")
            ax.set_title(title, fontsize=8)
            ax.axis("off")
    figure.tight_layout(w_pad=0.4, h_pad=0.6)
    return figure


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder on this machine, and give its address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Print nothing."""

    handler = partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def top_lines(predictions: list[vitkit.Prediction], count: int = 5) -> list[str]:
    """Return one line for each image: its name, then its most probable classes."""
    lines = []
    for prediction in predictions:
        words = [f"{label} {share:.1%}" for label, share in prediction.top[:count]]
        lines.append(f"{Path(prediction.image).stem:<10} {', '.join(words)}")
    return lines
