"""Measure `vitkit check`: time and memory on many small images, and the copies that it finds.

    python benchmarks/check.py [--only size near bad] [--images 5000 50000]

`size` checks a folder of 64-pixel JPEGs twice, each time in its own process, and measures wall
time, processor time and peak memory; vitkit's cache is empty at first, the disk's is warm. `near`
counts the changed copies of photographs that are found, and the pairs of digits and Fashion-MNIST
that count as copies. `bad` counts the unreadable images of each kind that are found. The script
reports figures; it does not pass or fail.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path

import numpy as np
from demo import HERE, processor, write_results
from PIL import Image, ImageEnhance

sys.path.insert(0, str(HERE.parent / "tests"))
SIDE = 64


def make_folder(root: Path, count: int) -> None:
    """Write small JPEGs of two classes, a tenth of them for validation."""
    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
    for number in range(count):
        coarse = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        split = "val" if number % 10 == 0 else "train"
        name = "cat" if number % 4 < 2 else "dog"
        image.save(root / split / name / f"{number:06}.jpg", quality=85)


def checked(data: str, cache: Path) -> dict[str, float]:
    """Run `vitkit check` in its own process."""
    start = time.perf_counter()
    child = subprocess.Popen(
        [sys.executable, "-m", "vitkit", "check", data],
        env=os.environ | {"VITKIT_CACHE": str(cache), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    return {
        "exit_code": child.returncode,
        "seconds": time.perf_counter() - start,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3),
    }


def sizes(counts: list[int]) -> dict[str, object]:
    """Measure the first and the second run for each number of images."""
    rows: dict[str, object] = {}
    for count in counts:
        with tempfile.TemporaryDirectory() as folder:
            make_folder(Path(folder) / "data", count)
            cache = Path(folder) / "cache"
            for run in ("first", "second", "third"):
                rows[f"{count} {run}"] = checked(f"{folder}/data", cache)
                print(f"{count:>7} {run:<6} {rows[f'{count} {run}']}", flush=True)
            rows[f"{count} cache_mb"] = (
                sum(file.stat().st_size for file in cache.rglob("*.rows")) / 1e6
            )
    return rows


def saved(image: Image.Image, quality: int) -> Image.Image:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return Image.open(stream).convert("RGB")


def scaled(image: Image.Image, times: float) -> Image.Image:
    width, height = (round(side * times) for side in image.size)
    return image.resize((width, height), Image.Resampling.BICUBIC)


def cropped(image: Image.Image, part: float) -> Image.Image:
    x, y = (round(side * part) for side in image.size)
    return image.crop((x, y, image.width - x, image.height - y))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "saved at 95": lambda p: saved(p, 95),
    "saved at 75": lambda p: saved(p, 75),
    "saved at 50": lambda p: saved(p, 50),
    "saved at 20": lambda p: saved(p, 20),
    "half size": lambda p: scaled(p, 0.5),
    "a quarter, saved at 75": lambda p: saved(scaled(p, 0.25), 75),
    "twice the size": lambda p: scaled(p, 2),
    "brightness 0.8": lambda p: ImageEnhance.Brightness(p).enhance(0.8),
    "contrast 1.2": lambda p: ImageEnhance.Contrast(p).enhance(1.2),
    "grey": lambda p: p.convert("L").convert("RGB"),
    "1 % cropped": lambda p: cropped(p, 0.01),
    "mirrored": lambda p: p.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


def near() -> dict[str, object]:
    """Count copies found among photographs, and pairs in datasets that should have none."""
    from vitkit.data.checks.check import check_dataset
    from vitkit.data.checks.scan import nearest_copies, summarise
    from vitkit.data.sources.open import open_dataset

    def thumbnails(images: list[Image.Image]) -> np.ndarray:
        return np.stack([summarise(np.asarray(image))[4] for image in images])

    images = photographs()
    originals = thumbnails(images)
    rows: dict[str, object] = {"photographs": len(images)}
    for name, change in CHANGES.items():
        changed = thumbnails([change(image) for image in images])
        copies = nearest_copies(changed, originals, mirrored=True)
        found = copies == np.arange(len(images))
        rows[name] = {"found": int(found.sum()), "others": int((~found & (copies >= 0)).sum())}
        print(f"{name:<24} {rows[name]}", flush=True)
    for name in ("digits", "fashion-mnist"):
        report = check_dataset(open_dataset(name))
        rows[name] = {f.kind: len(f.images) for f in report.findings}
        print(f"{name:<24} {rows[name]}", flush=True)
    return rows


def photographs() -> list[Image.Image]:
    """Return the photographs of scikit-image, scikit-learn and matplotlib."""
    import matplotlib
    import skimage
    import sklearn

    places = [
        *(Path(skimage.__file__).parent / "data").glob("*.*"),
        *(Path(sklearn.__file__).parent / "datasets/images").glob("*.jpg"),
        *(Path(matplotlib.__file__).parent / "mpl-data/sample_data").glob("*.jpg"),
    ]
    usual = re.compile(r"\.(jpe?g|png)$")
    found = [Image.open(path).convert("RGB") for path in sorted(places) if usual.search(path.name)]
    return [image for image in found if min(image.size) >= 64]


def bad() -> dict[str, object]:
    """Check fifty unreadable images of each kind among a thousand good ones."""
    from bad_images import make_bad_folder, refused_by_header

    from vitkit.data.checks.check import check_dataset
    from vitkit.data.sources.open import open_dataset

    with tempfile.TemporaryDirectory() as folder:
        expected = make_bad_folder(Path(folder), bad=50, good=1000)
        report = check_dataset(open_dataset(folder))
        found = {p.name: p.reason for part in report.problems.values() for p in part}
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        missed_by_header = sum(not refused_by_header(Path(folder) / name) for name in expected)
    return {
        "bad": len(expected),
        "found": len(found.keys() & expected.keys()),
        "with_an_expected_reason": sum(found.get(n) in expected[n] for n in expected),
        "false_alarms": len(found.keys() - expected.keys()),
        "missed_by_a_checker_of_headers": missed_by_header,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    names = ("size", "near", "bad")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names))
    parser.add_argument("--images", nargs="+", type=int, default=[5_000, 50_000])
    args = parser.parse_args()
    results: dict[str, object] = {"processor": processor(), "date": str(date.today())}
    measures: dict[str, Callable[[], object]] = {
        "size": lambda: sizes(args.images),
        "near": near,
        "bad": bad,
    }
    for name in args.only:
        results[name] = measures[name]()
        print(f"{name}: {json.dumps(results[name], indent=2)}", flush=True)
    write_results("check-", results)


if __name__ == "__main__":
    main()
