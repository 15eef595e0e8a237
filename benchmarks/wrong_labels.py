"""Wrong labels that are found again, after some were changed at random.

Run `python benchmarks/wrong_labels.py`. Five per cent of the labels of Fashion-MNIST's training
half become another class, the recipe is trained on them for some epochs, and the suspects of
`vitkit report --suspects train` are compared with the changed labels. Printed are the precision of
the list where it has 60 and 80 % of them, and how long it took. `dataset-fashion-mnist` of Debian
has the images.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
import time
from pathlib import Path

import numpy as np

import vitkit


def main() -> None:
    """Change labels, train, and print the precision of the suspects at a recall."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="fashion-mnist")
    parser.add_argument("--recipe", default="fashion-mnist")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    data = vitkit.open_dataset(arguments.data)
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "changed.csv"
        changed = change_labels(data.splits["train"], data.classes, listed, arguments)
        begin = time.monotonic()
        run = vitkit.train(
            arguments.data, recipe=arguments.recipe, epochs=arguments.epochs, relabel=listed,
            val_fraction=0.0, output=Path(folder) / "run", seed=arguments.seed, quiet=True,
            threads=arguments.threads, report=False, plots=False,
        ).run  # fmt: skip
        trained = time.monotonic()
        vitkit.report(run, suspects="train")
        print(f"training {trained - begin:.0f} s, report {time.monotonic() - trained:.0f} s")
        with (run / "suspects.csv").open(encoding="utf-8", newline="") as file:
            suspects = [row["path"] for row in csv.DictReader(file)]
    hits = np.cumsum([path in changed for path in suspects])
    print(
        f"{len(changed):,} labels changed, {len(suspects):,} suspects, {hits[-1]:,} of them changed"
    )
    for recall in (0.6, 0.8):
        wanted = int(np.ceil(recall * len(changed)))
        if hits[-1] < wanted:
            print(f"recall {recall:.0%} is not reached")
            continue
        length = int(np.searchsorted(hits, wanted)) + 1
        print(f"precision at recall {recall:.0%}: {wanted / length:.3f} ({length:,} images)")


def change_labels(
    split: object, classes: tuple[str, ...], path: Path, arguments: argparse.Namespace
) -> set[str]:
    """Write a list that gives a share of the images another class, and return these images."""
    generator = np.random.default_rng(arguments.seed)
    count = len(split.labels)
    chosen = generator.choice(count, round(arguments.share * count), replace=False)
    rows = []
    for index in chosen.tolist():
        old = int(split.labels[index])
        new = (old + int(generator.integers(1, len(classes)))) % len(classes)
        rows.append((split.path(index), classes[old], classes[new]))
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("path", "old_class", "new_class"), *rows])
    return {row[0] for row in rows}


if __name__ == "__main__":
    main()
