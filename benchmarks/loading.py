"""Time the making of training batches from JPEGs: vitkit, torchvision and timm, on one core.

    python benchmarks/loading.py [--only small large agreement workers] [--rounds 10] [--batch 64]

Photographs of scikit-image and scikit-learn become JPEGs of quality 90: `small` are 500 x 400,
`large` 2000 x 1500, mosaics of whole pixels. Every row reads, decodes, crops at random (8 to 100 %
of the area, resized to 224 with the bicubic filter), mirrors half of the images and makes a batch
of uint8; "floats" rows also normalise it on the CPU. A turn is an epoch, a round takes all rows
forwards and backwards, and a time is processor time of a process on one core with one thread. The
table has images a second, and the ratio of the medians to each library's row with a 95 % bootstrap
interval; "vitkit, again" is vitkit compared with itself: the noise.

torchvision's own decoder does not load beside a CPU-only torch. The rows "torchvision tensor" have
`simplejpeg` in its place, which is libjpeg-turbo, too. `agreement` compares the pixels of crops
resized by torch, and of JPEGs decoded smaller, with Pillow's of whole images. `workers` measures
wall time with processes and with threads on all cores. The script does not pass or fail.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import simplejpeg
import torch
from check import photographs
from demo import processor, write_results
from PIL import Image
from versus import speed_ratio
from versus.machine import declare_missing_operators

import vitkit
from vitkit.data.images import decode as jpeg
from vitkit.data.loading.crop_flip import Augmentation, crop_box, reduced_box
from vitkit.data.loading.loader import TrainingSteps, batches
from vitkit.randomness import augmentation_key

declare_missing_operators()  # torchvision, which timm imports, takes them from CUDA's library

SIDE = 224
SCALE = (0.08, 1.0)
QUALITY = 90
SIZES = {"small": (500, 400), "large": (2000, 1500)}
"""Width and height of the JPEGs."""
FILES = {"small": 128, "large": 32}
CLASSES = 2
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PACKAGES = ("torch", "torchvision", "timm", "pillow", "simplejpeg", "numpy")
Row = Callable[[int], object]
"""Makes the batch of a number."""


def write_files(folder: Path, size: tuple[int, int], count: int) -> None:
    """Write JPEGs of photographs' own pixels: crops where they are large enough, else mosaics."""
    draw = np.random.default_rng(0)
    sources = [np.asarray(image) for image in photographs() if min(image.size) >= 300]
    for number in range(count):
        parent = folder / "train" / str(number % CLASSES)
        parent.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", size)
        left = top = 0
        while top < size[1]:
            source = sources[int(draw.integers(len(sources)))]
            height = min(300, source.shape[0])
            width = min(500, source.shape[1])
            y = int(draw.integers(source.shape[0] - height + 1))
            x = int(draw.integers(source.shape[1] - width + 1))
            tile = Image.fromarray(source[y : y + height, x : x + width])
            if size == SIZES["small"]:
                tile = tile.resize(size, Image.Resampling.LANCZOS)
            image.paste(tile, (left, top))
            left += tile.width
            if left >= size[0]:
                left, top = 0, top + tile.height
        image.save(parent / f"{number:03}.jpg", quality=QUALITY)


def vitkit_rows(folder: Path, batch: int, large: bool) -> dict[str, Row]:
    """Return vitkit's rows: its loader as training has it."""
    split = vitkit.open_dataset(folder).splits["train"]
    preprocess = vitkit.Preprocess(image_size=SIDE, mean=MEAN, std=STD)
    cpu = torch.device("cpu")

    def steps(**settings: object) -> TrainingSteps:
        augmentation = Augmentation(flip=0.5, crop_scale=SCALE[0], **settings)
        return TrainingSteps(split, preprocess, augmentation, batch_size=batch, seed=0)

    fast, slow, scaled = steps(), steps(resizer="pillow"), steps(scaled_jpeg=True)
    decoder = jpeg.fast_decoder()
    assert decoder is not None, "simplejpeg is missing, or gives other pixels than Pillow"

    def without_simplejpeg(make: TrainingSteps) -> Row:
        def row(number: int) -> object:
            jpeg.fast_decoder = lambda: None
            try:
                return make[number]
            finally:
                jpeg.fast_decoder = lambda: decoder

        return row

    rows: dict[str, Row] = {"vitkit": fast.__getitem__, "vitkit, again": fast.__getitem__}
    if large:
        rows["vitkit, scaled_jpeg"] = scaled.__getitem__
    rows |= {
        "vitkit, without simplejpeg": without_simplejpeg(fast),
        "vitkit, resizer pillow": slow.__getitem__,
        "vitkit, both by Pillow": without_simplejpeg(slow),
        "vitkit, floats": lambda number: fast[number].images(preprocess, cpu),
    }
    return rows


def library_rows(folder: Path, batch: int) -> dict[str, Row]:
    """Return the rows of torchvision and timm, each with the library's own folder dataset."""
    from timm.data import ImageDataset, create_loader, create_transform
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import InterpolationMode, v2

    bicubic = InterpolationMode.BICUBIC
    crop = [v2.RandomResizedCrop(SIDE, SCALE, interpolation=bicubic, antialias=True),
            v2.RandomHorizontalFlip()]  # fmt: skip
    floats = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    train = folder / "train"

    def decoded(path: str) -> torch.Tensor:
        # channels last in memory, as torchvision's own decoder gives them
        return torch.from_numpy(simplejpeg.decode_jpeg(Path(path).read_bytes())).permute(2, 0, 1)

    def of_torchvision(*transforms: torch.nn.Module, tensor: bool = False) -> Row:
        transform = v2.Compose([*crop, *transforms])
        loader = {"loader": decoded} if tensor else {}
        data = ImageFolder(train, transform, **loader)
        return in_order(DataLoader(data, batch, shuffle=True, drop_last=True))

    def of_timm_loader() -> Row:
        # normalises on the device, here the CPU
        loader = create_loader(
            ImageDataset(str(train)), SIDE, batch, is_training=True, scale=SCALE, color_jitter=None,
            interpolation="bicubic", mean=MEAN, std=STD, num_workers=0, device=torch.device("cpu"),
            persistent_workers=False,
        )  # fmt: skip
        return in_order(loader)

    timm_transform = create_transform(
        SIDE, is_training=True, scale=SCALE, color_jitter=None, interpolation="bicubic",
        use_prefetcher=True,
    )  # fmt: skip
    timm_data = ImageDataset(str(train), transform=timm_transform)
    return {
        "torchvision PIL": of_torchvision(v2.PILToTensor()),
        "torchvision tensor": of_torchvision(tensor=True),
        "torchvision PIL, floats": of_torchvision(v2.PILToTensor(), *floats),
        "torchvision tensor, floats": of_torchvision(*floats, tensor=True),
        "timm transform": in_order(DataLoader(timm_data, batch, shuffle=True, drop_last=True)),
        "timm create_loader, floats": of_timm_loader(),
    }


def in_order(loader: object) -> Row:
    """Return a function that takes the next batch of a loader, epoch after epoch."""

    def forever() -> Iterator[object]:
        while True:
            yield from loader  # type: ignore[misc]

    arriving = forever()
    return lambda number: next(arriving)


def times(rows: dict[str, Row], rounds: int, batches_of_epoch: int) -> dict[str, list[float]]:
    """Return the processor seconds of each epoch of each row, after one that is not timed.

    A whole epoch: a loader that makes a batch ahead makes none at the end.
    """
    spent: dict[str, list[float]] = {name: [] for name in rows}
    for number in range(-1, 2 * rounds):
        for name in list(rows)[:: (-1) ** (number % 2)]:
            start = time.process_time()
            for batch in range(batches_of_epoch):
                rows[name]((number + 1) * batches_of_epoch + batch)
            if number >= 0:
                spent[name].append(time.process_time() - start)
    return spent


def measured(kind: str, rounds: int, batch: int) -> dict[str, object]:
    """Time all rows on JPEGs of one size, print them, and return them."""
    count = FILES[kind]
    batch = min(batch, count // 2)
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), SIZES[kind], count)
        rows = vitkit_rows(Path(folder), batch, kind == "large")
        rows |= library_rows(Path(folder), batch)
        spent = times(rows, rounds, count // batch)
    made = count // batch * batch  # images of an epoch of whole batches
    against = [name for name in rows if name.startswith(("vitkit, again", "torchvision", "timm"))]
    table: dict[str, object] = {}
    print(f"\n{' x '.join(map(str, SIZES[kind]))} JPEGs, batches of {batch}, {rounds} rounds")
    for name, seconds in spent.items():
        low, _, high = (made / value for value in quantiles(seconds, n=4)[::-1])
        table[name] = {"images_per_second": made / median(seconds), "quartiles": [low, high]}
        line = f"  {name:<28}{made / median(seconds):7.0f} images/s [{low:.0f}, {high:.0f}]"
        if name in ("vitkit", "vitkit, scaled_jpeg", "vitkit, floats", "vitkit, both by Pillow"):
            compared = {other: speed_ratio(seconds, spent[other]) for other in against}
            table[name] |= {"faster_than": compared}  # type: ignore[operator]
            for other, (middle, lower, upper) in compared.items():
                line += f"\n      {middle:.2f} [{lower:.2f}, {upper:.2f}] x {other}"
        print(line)
    return table


def same_box(whole: np.ndarray, reduced: np.ndarray, key: int, index: int) -> np.ndarray:
    """Return Pillow's crop of a whole image, its box moved to where the smaller image has it."""
    size = (whole.shape[0], whole.shape[1])
    box = reduced_box(crop_box(size, SCALE[0], 0, key, index), size, reduced.shape[:2])
    factors = np.array(size)[::-1] / np.array(reduced.shape[:2])[::-1]
    moved = tuple((np.array(box) * np.tile(factors, 2)).tolist())
    image = Image.fromarray(whole).resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=moved)
    return np.asarray(image).astype(int)


def agreement() -> dict[str, object]:
    """Compare crops by torch, and of JPEGs decoded smaller, with Pillow's of whole images."""
    preprocess = vitkit.Preprocess(image_size=SIDE)
    table: dict[str, object] = {}
    plain = Augmentation(crop_scale=SCALE[0], resizer="pillow")
    others = {
        "small, resizer torch": ("small", Augmentation(crop_scale=SCALE[0])),
        "large, resizer torch": ("large", Augmentation(crop_scale=SCALE[0])),
        "large, scaled_jpeg": ("large", Augmentation(crop_scale=SCALE[0], scaled_jpeg=True,
                                                     resizer="pillow")),
    }  # fmt: skip
    print("\ndifference to Pillow's resized crop of the whole image, of values 0 to 255")
    with tempfile.TemporaryDirectory() as folder:
        for kind in SIZES:
            write_files(Path(folder) / kind, SIZES[kind], FILES["large"])
        for name, (kind, other) in others.items():
            split = vitkit.open_dataset(Path(folder) / kind).splits["train"]
            steps = TrainingSteps(split, preprocess, other, batch_size=1, seed=0)
            differences, in_place, factors = [], [], []
            for index, epoch in product(range(len(split)), range(4)):
                key = int(augmentation_key(epoch, 0))
                image = steps.read(index, key, preprocess)
                factors.append(image.factor or 1)
                if other.scaled_jpeg and factors[-1] == 1:
                    continue
                whole = split.read(index)
                changed = other.resize(image.pixels, preprocess, 0, key, index, image.size)
                expected = plain.resize(whole, preprocess, 0, key, index)
                differences.append(np.abs(changed.astype(int) - expected))
                if factors[-1] > 1:
                    expected = same_box(whole, image.pixels, key, index)
                    in_place.append(np.abs(changed.astype(int) - expected))
            all_of_them = np.stack(differences)
            row = {
                "mean": float(all_of_them.mean()), "different": float((all_of_them > 0).mean()),
                "percentile_99": float(np.percentile(all_of_them, 99)),
                "most": int(all_of_them.max()),
                "crops": len(factors), "reduced": float(np.mean(np.array(factors) > 1)),
            }  # fmt: skip
            if in_place:
                row["mean_of_the_same_box"] = float(np.mean(in_place))
            table[name] = row
            print(f"  {name:<22} " + ", ".join(f"{key} {value:.4g}" for key, value in row.items()))
    return table


def workers(rounds: int, batch: int) -> dict[str, object]:
    """Measure images a second of wall time, made by processes and by threads."""
    cores = len(os.sched_getaffinity(0))
    table: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), SIZES["small"], FILES["small"])
        split = vitkit.open_dataset(folder).splits["train"]
        preprocess = vitkit.Preprocess(image_size=SIDE)
        augmentation = Augmentation(flip=0.5, crop_scale=SCALE[0])
        steps = TrainingSteps(split, preprocess, augmentation, batch_size=batch, seed=0)
        numbers = range(16)

        def by_processes(count: int) -> float:
            # more than are timed: what waits at the end makes up for what waited at the start
            arriving = batches(steps, range(len(numbers) + 4 * count), workers=count)
            for _ in range(count):
                next(arriving)  # until all have begun
            start = time.perf_counter()
            for _ in numbers:
                next(arriving)
            seconds = time.perf_counter() - start
            arriving.close()
            return seconds

        def by_threads(count: int) -> float:
            with ThreadPoolExecutor(count) as pool:
                start = time.perf_counter()
                for _ in pool.map(steps.__getitem__, numbers):
                    pass
                return time.perf_counter() - start

        ways = {"the process itself": lambda: by_processes(0)}
        for count in sorted({1, cores}):
            ways[f"processes: {count}"] = lambda count=count: by_processes(count)
            ways[f"threads: {count}"] = lambda count=count: by_threads(count)
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name in [*ways, *reversed(ways)]:
                spent[name].append(ways[name]())
    print(f"\nwall time on {cores} cores, 500 x 400 JPEGs")
    for name, seconds in spent.items():
        rates = [len(numbers) * batch / value for value in seconds]
        low, middle, high = quantiles(rates, n=4)
        table[name] = {"images_per_second": middle, "quartiles": [low, high]}
        print(f"  {name:<20}{middle:7.0f} images/s [{low:.0f}, {high:.0f}]")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parts = ("small", "large", "agreement", "workers")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--output", type=Path, help="the results file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    all_cores = os.sched_getaffinity(0)
    results: dict[str, object] = {
        "date": date.today().isoformat(),
        "processor": processor(),
        "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in PACKAGES},
        "asked": {"rounds": args.rounds, "batch": args.batch},
    }
    for part in args.only:
        if part == "workers":
            results[part] = workers(args.rounds, args.batch)
            continue
        os.sched_setaffinity(0, {min(all_cores)})
        results[part] = (
            agreement() if part == "agreement" else measured(part, args.rounds, args.batch)
        )
        os.sched_setaffinity(0, all_cores)
    write_results("loading-", results, args.output)


if __name__ == "__main__":
    main()
