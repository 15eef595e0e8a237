"""Draw the figure at the top of the README: one photograph, two maps, and their faithfulness.

    python scripts/explanation_figure.py CHECKPOINT [--output docs/images/explanation.webp]

CHECKPOINT is a run of `vitkit train cifar10 --recipe cifar10-small`, or another model that knows
cats. The photograph is scikit-image's `chelsea` (CC0, by Stefan van der Walt). The script prints
what the figure says, so that the text below it can be checked.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from PIL import Image
from skimage import data

import vitkit

ROOT = Path(__file__).parent.parent
METHODS = ("libragrad", "attention")
QUALITY = 92
"""Of the file, 0 to 100; a PNG without loss is ten times as large."""


def main() -> None:
    """Draw, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images/explanation.webp")
    arguments = parser.parse_args()
    checkpoint = vitkit.load(arguments.checkpoint)
    photograph = data.chelsea()
    maps = [
        vitkit.explain(checkpoint, photograph, method=method, faithfulness=True)
        for method in METHODS
    ]
    drawn = io.BytesIO()
    vitkit.plot_explanations(maps, across=3).savefig(drawn, dpi=200, facecolor="white")
    image = Image.open(drawn).convert("RGB")
    image.save(arguments.output, quality=QUALITY, method=6)
    print(f"{maps[0].label}: {maps[0].probability:.3f}; {checkpoint.metadata.get('metrics')}")
    for explanation in maps:
        faithfulness = explanation.faithfulness
        print(f"{explanation.method}: {faithfulness.line if faithfulness else ''}")
    print(f"{arguments.output}: {arguments.output.stat().st_size / 1e3:.0f} kB, {image.size}")


if __name__ == "__main__":
    main()
