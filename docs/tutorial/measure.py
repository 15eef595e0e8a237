"""Run the tutorial's long trainings again.

    python docs/tutorial/measure.py NAME... [--data-root DIR] [--seeds 0 1 2] [--quick]

Every experiment is a function in one of the files measure_*.py beside this one; their dictionaries
EXPERIMENTS list them. The numbers are written to docs/tutorial/results/NAME.json, with the command,
the processor and the date; the chapters read these files. With --quick each training has a few
steps, to check that the code runs, and nothing is written.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import date
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "benchmarks")]

import torch  # noqa: E402
from demo import processor  # noqa: E402
from experiment import Experiment, Numbers, Options  # noqa: E402


def experiments() -> dict[str, Experiment]:
    """Return the experiments of all measure_*.py files, by name."""
    named: dict[str, Experiment] = {}
    for path in sorted(HERE.glob("measure_*.py")):
        named |= import_module(path.stem).EXPERIMENTS
    return named


def command(name: str, options: Options) -> str:
    """Return the command of one experiment, without the path of the data."""
    words = ["python docs/tutorial/measure.py", name]
    words += ["--data-root DIR"] if options.data_root else []
    words += ["--run RUN"] if options.run else ["--seeds", *map(str, options.seeds)]
    return " ".join(words)


def write(name: str, options: Options, numbers: Numbers, seconds: float) -> Path:
    """Write the numbers, and how they were measured, to the file that the chapters read."""
    about = {
        "name": name,
        "command": command(name, options),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "seeds": list(options.seeds),
        "seconds": round(seconds, 1),
    }
    path = HERE / "results" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(about | numbers, indent=1) + "\n")
    return path


def main() -> None:
    known = experiments()
    listed = "\n".join(f"  {name:<16}{each.about}" for name, each in known.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nExperiments:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", choices=list(known), metavar="NAME")
    parser.add_argument(
        "--data-root", help="the folder of named datasets such as mnist"
    )
    parser.add_argument(
        "--seeds", nargs="+", type=int, help="default: the seeds of the experiment"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a few steps; nothing is written"
    )
    parser.add_argument(
        "--run", help="read this finished run instead of training (mnist, cifar10)"
    )
    arguments = parser.parse_args()
    for name in arguments.names:
        seeds = tuple(
            arguments.seeds
            or (known[name].seeds[:1] if arguments.quick else known[name].seeds)
        )
        options = Options(seeds, arguments.data_root, arguments.quick, arguments.run)
        start = time.perf_counter()
        numbers = known[name].measure(options)
        seconds = time.perf_counter() - start
        if arguments.quick:
            print(f"{name}: {seconds:.0f} s; nothing is written", flush=True)
        else:
            print(
                f"{name}: {seconds:.0f} s; {write(name, options, numbers, seconds)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
