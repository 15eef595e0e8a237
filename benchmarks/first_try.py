"""Measure what a first `vitkit train FOLDER` reaches, beside `--auto`, and its temperature.

    python benchmarks/first_try.py [--only photos-50 cifar-1000] [--data-root DIR] [--budget 3m]
                                   [--seeds 0] [--test] [--calibration] [--keep DIR] [-- FLAGS]

Four folders are made of real images: 50 and 200 crops of photographs that scikit-image,
scikit-learn and matplotlib bring along, in four classes, and 1,000 and 5,000 images of CIFAR-10
(of Fashion-MNIST where DIR has no CIFAR-10), in ten. Each has up to 500 further images as its test
split. Crops of train and of test are from different tiles of a photograph.

For each folder and seed, `vitkit train FOLDER` runs without any other setting, then with `--auto`.
The scores are those of the validation split, for choosing defaults; with `--test` those of the test
split as well, which is then read once. With `--calibration`, `--auto` is left out, and the test
loss is compared with and without the temperature that the run stored; `--only digits` runs on the
embedded digits, which have 144 validation images. FLAGS go to the plain runs.
Results are written to benchmarks/results; the script does not pass or fail.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from statistics import mean

import matplotlib
import numpy as np
import skimage
import sklearn
from demo import processor, run, write_results
from PIL import Image

import vitkit
from vitkit.data.datasets.split import Split
from vitkit.data.sources.open import open_dataset
from vitkit.errors import UserError

PHOTOGRAPHS = {
    "living things": ["chelsea.png", "astronaut.png", "flower.jpg", "grace_hopper.jpg"],
    "medical": ["cell.png", "ihc.png", "retina.jpg"],
    "scene": ["china.jpg", "coffee.png", "motorcycle_left.png", "rocket.jpg"],
    "texture": ["brick.png", "grass.png", "gravel.png"],
}
TILE, MOST_TILES = 128, 25
"""Side of the tiles of a photograph, in pixels, and tiles that are used of each at most."""
SMALLEST, LARGEST = 64, 112
"""Sides of the crops, in pixels."""
SIZES = {"photos-50": 50, "photos-200": 200, "cifar-1000": 1_000, "cifar-5000": 5_000}
"""Folder -> images that are not of its test split."""
DIGITS = "digits"
"""The named dataset, for `--calibration`: a temperature needs 125 validation images."""
TEST_IMAGES = 500


def places() -> list[Path]:
    """Return the folders of the libraries' sample images."""
    return [
        Path(skimage.__file__).parent / "data",
        Path(sklearn.__file__).parent / "datasets" / "images",
        Path(matplotlib.get_data_path()) / "sample_data",
    ]


def tiles(name: str) -> list[Image.Image]:
    """Cut a photograph into tiles that do not overlap."""
    (path,) = [folder / name for folder in places() if (folder / name).exists()]
    image = Image.open(path).convert("RGB")
    cut = []
    for top in range(0, image.height - TILE + 1, TILE):
        for left in range(0, image.width - TILE + 1, TILE):
            cut.append(image.crop((left, top, left + TILE, top + TILE)))
    order = np.random.default_rng(0).permutation(len(cut))
    return [cut[place] for place in order[:MOST_TILES]]


def crops(cut: list[Image.Image], count: int, rng: np.random.Generator) -> Iterator[Image.Image]:
    """Yield crops of several sizes, half of them grey."""
    for number in range(count):
        side = int(rng.integers(SMALLEST, LARGEST + 1))
        left, top = (int(rng.integers(0, TILE - side + 1)) for _ in range(2))
        crop = cut[number % len(cut)].crop((left, top, left + side, top + side))
        yield crop.convert("L") if rng.random() < 0.5 else crop


def write_photographs(folder: Path, images: int) -> None:
    """Write crops of photographs into folders `train/CLASS` and `test/CLASS`."""
    for label, (name, files) in enumerate(PHOTOGRAPHS.items()):
        cut = [tiles(file) for file in files]
        # two fifths of the tiles of each photograph
        parts = {"test": [], "train": []}
        for of_one in cut:
            border = 2 * len(of_one) // 5
            parts["test"] += of_one[:border]
            parts["train"] += of_one[border:]
        counts = {"train": images * (label + 1) // 4 - images * label // 4, "test": 40}
        for split, own in parts.items():
            rng = np.random.default_rng([label, images])
            rng.shuffle(own)
            (folder / split / name).mkdir(parents=True)
            for number, crop in enumerate(crops(own, counts[split], rng)):
                ending = ("jpg", "png", "webp")[number % 3]
                crop.save(folder / split / name / f"{number}.{ending}")


def write_subset(folder: Path, root: str | None, images: int) -> None:
    """Write as many images of each class of CIFAR-10, or of Fashion-MNIST."""
    try:
        dataset = open_dataset("cifar10", data_root=root)
    except UserError:
        print(f"{folder.name}: no CIFAR-10 in {root}, so Fashion-MNIST instead", flush=True)
        dataset = open_dataset("fashion-mnist")
    parts: dict[str, tuple[Split, int]] = {
        "train": (dataset.splits["train"], images),
        "test": (dataset.splits["test"], TEST_IMAGES),
    }
    for split, (source, count) in parts.items():
        order = np.random.default_rng(images).permutation(len(source))
        for label, name in enumerate(dataset.classes):
            (folder / split / name).mkdir(parents=True)
            own = order[source.labels[order] == label][: count // len(dataset.classes)]
            for place in own:
                pixels = source.read(int(place)).squeeze()
                Image.fromarray(pixels).save(folder / split / name / f"{place}.png")


def write_folder(name: str, folder: Path, root: str | None) -> Path:
    """Write one of the four folders, unless it is there; return the data of the runs."""
    if name == DIGITS:
        return Path(name)
    if not (folder / name).exists():
        if name.startswith("photos"):
            write_photographs(folder / name, SIZES[name])
        else:
            write_subset(folder / name, root, SIZES[name])
    return folder / name


def trained(data: Path, output: Path, *flags: str) -> dict[str, object]:
    """Run `vitkit train` once; return the scores of its best weights, and the seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, _, text = run(
        sys.executable, "-m", "vitkit", "train", str(data), "--output", str(output), *flags
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    stored = vitkit.load(output / "weights" / "best.safetensors")
    metrics = stored.metadata["metrics"]
    shown: dict[str, object] = {
        "seconds": round(seconds, 1),
        "processor_seconds": round(processor_seconds, 1),
        "val": round(metrics["val"]["top1"], 4),
    }
    if "test" in metrics:
        shown["test"] = round(metrics["test"]["top1"], 4)
        shown["loss"] = round(metrics["test"]["loss"], 4)
        # without a temperature there is no other loss
        shown["calibrated"] = round(metrics["test"].get("calibrated_loss", shown["loss"]), 4)
    shown["temperature"] = round(stored.temperature, 3)
    shown["chosen"] = next((line for line in text.splitlines() if line.startswith("chosen")), "")
    return shown


def main() -> None:
    """Make the folders, run, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*SIZES, DIGITS], default=list(SIZES))
    parser.add_argument("--data-root")
    parser.add_argument("--budget", default="3m")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--calibration", action="store_true")
    parser.add_argument("--keep", type=Path, help="where folders and runs stay")
    words = sys.argv[1:]
    border = words.index("--") if "--" in words else len(words)
    args, flags = parser.parse_args(words[:border]), words[border + 1 :]
    read_test = args.test or args.calibration
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        place = args.keep or Path(temporary)
        for name in args.only:
            data = write_folder(name, place / "data", args.data_root)
            for seed in args.seeds:
                common = ["--seed", str(seed), *([] if read_test else ["--no-test"])]
                row = {"data": name, "seed": seed}
                row["plain"] = trained(data, place / f"{name}-{seed}", *common, *flags)
                if not args.calibration:
                    auto = ["--auto", "--budget", args.budget]
                    row["auto"] = trained(data, place / f"{name}-{seed}-auto", *common, *auto)
                rows.append(row)
                print(row, flush=True)
    changes = [row["plain"]["calibrated"] - row["plain"]["loss"] for row in rows if read_test]
    if changes:
        print(
            f"temperature: test loss {mean(changes):+.4f} in the mean, {max(changes):+.4f} at "
            f"most, in {len(changes)} runs, {sum(map(bool, changes))} of them with one"
        )
    command = f"python benchmarks/first_try.py {' '.join(words)}"
    results = {"processor": processor(), "date": str(date.today())}
    for row in rows:
        mode = "calibration" if args.calibration else "auto"
        results[f"{row['data']}, seed {row['seed']}, {mode}"] = {"command": command} | row
    write_results("first-try-", results)


if __name__ == "__main__":
    main()
