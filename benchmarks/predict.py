"""Measure `vitkit predict`: processor time of one image, and memory and delay of many.

    python benchmarks/predict.py [--only start stream] [--images 2000 20000] [--repeats 5]

Each figure is of a process of its own; the rows take turns (A B A B), and the table has medians
with least and most. `start` predicts one photograph by a tiny ViT and by a ViT-B/16, beside
`import torch` alone, and measures processor time. `stream` predicts folders of 64-pixel JPEGs, of
which three of each are broken, by the tiny ViT. It measures peak memory; the seconds to the first
line, beside those to the end of a folder that is one batch; and counts the lines and the broken
images that are named. The script reports figures; it does not pass or fail.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from check import make_folder, photographs
from demo import processor, write_results

BATCH = 64
BROKEN = 3
Figures = dict[str, float]


def measure(command: list[str]) -> Figures:
    """Run a Python command in a process of its own, and read its lines as they come."""
    start = time.perf_counter()
    first = 0.0
    lines = 0
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            [sys.executable, *command],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
        )
        assert child.stdout is not None
        for _ in child.stdout:
            first = first or time.perf_counter() - start
            lines += 1
        child.stdout.close()
        _, status, usage = os.wait4(child.pid, 0)
        errors.seek(0)
        named = errors.read().count(b": truncated: ")
    child.returncode = os.waitstatus_to_exitcode(status)
    return {
        "exit_code": child.returncode,
        "seconds": time.perf_counter() - start,
        "seconds_to_first_line": first,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_mb": usage.ru_maxrss / (1e6 if sys.platform == "darwin" else 1e3),
        "lines": lines,
        "broken_named": named,
    }


def in_turns(commands: Mapping[str, list[str]], repeats: int) -> dict[str, object]:
    """Measure each command so many times, in turns; the first round warms the disk's cache."""
    runs: dict[str, list[Figures]] = {name: [] for name in commands}
    for number in range(repeats + 1):
        for name, command in commands.items():
            figures = measure(command)
            if number:
                runs[name].append(figures)
    table: dict[str, object] = {}
    for name, figures in runs.items():
        row = {}
        for key in figures[0]:
            values = [each[key] for each in figures]
            row[key] = {"median": median(values), "least": min(values), "most": max(values)}
        table[name] = row
        shown = ", ".join(
            f"{key} {value['median']:.2f} ({value['least']:.2f} to {value['most']:.2f})"
            for key, value in row.items()
        )
        print(f"{name}: {shown}", flush=True)
    return table


def save_model(path: Path, name: str, **fields: int) -> str:
    """Write an untrained checkpoint: how long a prediction takes does not depend on its numbers.

    A process of its own builds it, as the peak memory of a process counts for its children, too.
    """
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_save, (path, name, fields))


def _save(path: Path, name: str, fields: dict[str, int]) -> str:
    import vitkit

    model = vitkit.create_model(name, **fields)
    size = fields.get("image_size", 224)
    return str(vitkit.save(path, model, preprocess=vitkit.Preprocess(image_size=size)))


def save_tiny(folder: Path) -> str:
    """Write a checkpoint of a ViT with two narrow blocks, for images of 32 pixels."""
    sizes = {"image_size": 32, "patch_size": 8, "width": 64, "depth": 2, "num_heads": 2}
    sizes |= {"mlp_width": 128, "num_classes": 10}
    return save_model(folder / "tiny.safetensors", "vit_tiny_patch16_224", **sizes)


def start(repeats: int) -> dict[str, object]:
    """Measure the prediction of one photograph."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        image = root / "photograph.jpg"
        photographs()[0].save(image)
        predict = ["-m", "vitkit", "predict"]
        base = save_model(root / "base.safetensors", "vit_base_patch16_224")
        commands = {
            "import torch": ["-c", "import torch; print()"],
            "tiny ViT": [*predict, save_tiny(root), str(image)],
            "ViT-B/16": [*predict, base, str(image)],
        }
        return in_turns(commands, repeats)


def stream(counts: list[int], repeats: int) -> dict[str, object]:
    """Measure the prediction of folders, and of one that is a single batch."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        predict = ["-m", "vitkit", "predict", save_tiny(root)]
        commands = {}
        for count in (BATCH, *counts):
            data = root / str(count)
            make_folder(data, count)
            files = sorted(data.rglob("*.jpg"))
            for path in (files[0], files[count // 2], files[-1]):
                path.write_bytes(path.read_bytes()[:-200])
            commands[f"{count} images"] = [*predict, str(data)]
        return in_turns(commands, repeats)


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    names = ("start", "stream")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names))
    parser.add_argument("--images", nargs="+", type=int, default=[2_000, 20_000])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    results: dict[str, object] = {"processor": processor(), "date": str(date.today())}
    # other busy processes lengthen processor time, too
    results["load_average_before"] = os.getloadavg()[0]
    measures: dict[str, Callable[[], object]] = {
        "start": lambda: start(args.repeats),
        "stream": lambda: stream(args.images, args.repeats),
    }
    for name in args.only:
        results[name] = measures[name]()
    write_results("predict-", results)


if __name__ == "__main__":
    main()
