"""Train a ViT on handwritten digits, print its test accuracy, and draw its attention.

`make demo` runs this script. It needs no network and writes to runs/demo-N. `--seed N` trains with
another seed.

There is no validation split: the number of epochs was chosen by cross-validation, and the last
epoch is a better choice than the best of 160 epochs on only 144 validation images.
"""

from __future__ import annotations

import argparse
from itertools import count
from pathlib import Path

from PIL import Image

import vitkit

IMAGE = 1  # index of the test image that is explained, a seven


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    output = next(path for n in count(1) if not (path := Path("runs") / f"demo-{n}").exists())
    result = vitkit.train(
        "digits", recipe="digits", val_fraction=0.0, seed=seed, output=str(output)
    )

    test = vitkit.open_dataset("digits").splits["test"]
    image = output / "test-image.png"
    Image.fromarray(test.read(IMAGE)[..., 0]).save(image)

    checkpoint = vitkit.load(result.best)
    (prediction,) = vitkit.Predictor.from_checkpoint(checkpoint)([image], top_k=3)
    vitkit.explain(checkpoint, image, method="attention").save(
        output / "attention.png", overwrite=True
    )

    truth = checkpoint.classes[test.labels[IMAGE]]
    print(f"test accuracy  {100 * result.metrics['test']['top1']:.2f} %")
    probability = f"{100 * prediction.probability:.1f} %"
    print(f"prediction     {image}: {prediction.label} ({probability}), label {truth}")
    print(f"attention      {output / 'attention.png'}")


if __name__ == "__main__":
    main()
