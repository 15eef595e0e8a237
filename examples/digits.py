"""Train a ViT on real handwritten digits, read its test score, and see what it looks at.

Run by `make demo`; needs no network. Leaves everything in runs/demo-N.
"""

from __future__ import annotations

from itertools import count
from pathlib import Path

from PIL import Image

import vitkit
from vitkit.data.sources import open_dataset

PICTURE = 1  # a seven, docs/pictures/seven.png


def main() -> None:
    output = next(path for n in count(1) if not (path := Path("runs") / f"demo-{n}").exists())
    result = vitkit.train("digits", recipe="digits", output=str(output))

    test = open_dataset("digits").splits["test"]
    picture = output / "test-picture.png"
    Image.fromarray(test.read(PICTURE)[..., 0]).save(picture)

    checkpoint = vitkit.load(result.best)
    (said,) = vitkit.Predictor.from_checkpoint(checkpoint)([picture], top_k=3)
    vitkit.explain(checkpoint, picture).save(output / "attention.png")

    truth = checkpoint.classes[test.labels[PICTURE]]
    print(f"test accuracy  {result.metrics['test']['top1']:.2%}")
    print(f"prediction     {picture}: {said.label} ({said.probability:.1%}); it is a {truth}")
    print(f"attention      {output / 'attention.png'}")


if __name__ == "__main__":
    main()
