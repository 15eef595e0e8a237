"""Train a ViT on real handwritten digits, read its test score, and see what it looks at.

Run by `make demo`; needs no network. Leaves everything in runs/demo-N. `--seed N` trains another
model.

No training image is set aside for validation: the recipe's length was chosen by cross-validation,
and the last epoch of its schedule is a better choice than the best of 160 on 144 images.
"""

from __future__ import annotations

import argparse
from itertools import count
from pathlib import Path

from PIL import Image

import vitkit
from vitkit.data.sources.open import open_dataset

IMAGE = 1  # a seven, docs/images/seven.png


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    output = next(path for n in count(1) if not (path := Path("runs") / f"demo-{n}").exists())
    result = vitkit.train(
        "digits", recipe="digits", val_fraction=0.0, seed=seed, output=str(output)
    )

    test = open_dataset("digits").splits["test"]
    image = output / "test-image.png"
    Image.fromarray(test.read(IMAGE)[..., 0]).save(image)

    checkpoint = vitkit.load(result.best)
    (said,) = vitkit.Predictor.from_checkpoint(checkpoint)([image], top_k=3)
    vitkit.explain(checkpoint, image).save(output / "attention.png")

    truth = checkpoint.classes[test.labels[IMAGE]]
    print(f"test accuracy  {result.metrics['test']['top1']:.2%}")
    print(f"prediction     {image}: {said.label} ({said.probability:.1%}); it is a {truth}")
    print(f"attention      {output / 'attention.png'}")


if __name__ == "__main__":
    main()
