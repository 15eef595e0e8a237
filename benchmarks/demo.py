"""Measure the demo and import times, as quoted in docs/benchmarks.md.

    python benchmarks/demo.py [--only demo imports]

Every measurement runs in its own process, one after the other. The script prints the results and
writes them to benchmarks/results/<processor>-<date>.json; it does not pass or fail.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from statistics import mean, median

from versus.machine import instruction_sets
from versus.machine import processor_name as processor

from vitkit.process import shorten_spinning

HERE = Path(__file__).parent
REPEATS = 7
SEEDS = 5


def run(*command: str, folder: Path | None = None) -> tuple[float, float, str]:
    """Return seconds, peak memory in MB and output of one command, with its children."""
    with tempfile.TemporaryFile("w+") as out:
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, cwd=folder)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - start
        out.seek(0)
        text = out.read()
    if child.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {child.returncode}:\n{text}")
    to_mb = 1e6 if sys.platform == "darwin" else 1e3  # bytes there, kilobytes here
    return seconds, usage.ru_maxrss / to_mb, text


def demo() -> dict[str, object]:
    """Run the program of `make demo` with several seeds: accuracy, time and peak memory."""
    shorten_spinning(os.environ)  # as the Makefile does
    program, accuracies, taken, peaks = str(HERE.parent / "examples" / "digits.py"), [], [], []
    for seed in range(SEEDS):
        with tempfile.TemporaryDirectory() as folder:
            seconds, memory, text = run(
                sys.executable, program, "--seed", str(seed), folder=Path(folder)
            )
        (accuracy,) = re.findall(r"test accuracy\s+([\d.]+) %", text)
        accuracies.append(round(float(accuracy) / 100, 4))
        taken.append(round(seconds, 1))
        peaks.append(memory)
    return {"test_top1": accuracies, "mean_top1": mean(accuracies), "seconds": taken,
            "peak_mb": max(peaks)}  # fmt: skip


def imports() -> dict[str, float]:
    """Measure the median seconds of starting Python and importing."""
    programs = {
        "python": "pass",
        "import_torch": "import torch",
        "import_torch_vitkit": "import torch, vitkit",
        "import_torch_vitkit_all_names": "import torch, vitkit\n"
        "for name in vitkit.__all__: getattr(vitkit, name)",
        "help": "import vitkit.cli; vitkit.cli.run(['--help'])",
        "train_help": "import vitkit.cli\ntry: vitkit.cli.run(['train', '--help'])\n"
        "except SystemExit: pass",
    }
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(REPEATS):
        for name, code in programs.items():
            taken[name].append(run(sys.executable, "-c", code)[0])
    return {name: median(times) for name, times in taken.items()}


def results_file(prefix: str = "") -> Path:
    """Return the results file of today and this processor.

    Different processors may have one name in virtual machines, so the file's name says if there is
    AVX-512.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", processor().lower()).strip("-")
    slug += "-avx512" * ("avx512f" in instruction_sets())
    return HERE / "results" / f"{prefix}{slug}-{date.today().isoformat()}.json"


def write_results(prefix: str, results: dict[str, object], output: Path | None = None) -> None:
    """Add results to a file; the default is the results file of today."""
    place = output or results_file(prefix)
    place.parent.mkdir(exist_ok=True)
    before = json.loads(place.read_text()) if place.exists() else {}
    place.write_text(json.dumps(before | results, indent=2) + "\n")
    print(f"written to {place}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    measures = {"demo": demo, "imports": imports}
    parser.add_argument("--only", nargs="+", choices=list(measures), default=list(measures))
    args = parser.parse_args()
    import torch

    results: dict[str, object] = {
        "date": date.today().isoformat(),
        "processor": processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in args.only:
        results[name] = measures[name]()
        print(f"{name}: {json.dumps(results[name], indent=2)}", flush=True)
    write_results("", results)


if __name__ == "__main__":
    main()
