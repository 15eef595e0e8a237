"""Makes the tutorial's long trainings anew.

    python docs/tutorial/measure.py NAME... [--data-root DIR] [--seeds 0 1 2] [--quick]

Every experiment is a function in one of the files measure_*.py beside this one, which list theirs
in EXPERIMENTS. Its numbers go to docs/tutorial/results/NAME.json with the command, the processor
and the date; the chapters read them from there. With --quick everything is tiny, to see that the
code runs, and nothing is written.
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
from experiment import Asked, Experiment, Numbers  # noqa: E402


def experiments() -> dict[str, Experiment]:
    """Those of every file beside this one, by name."""
    found: dict[str, Experiment] = {}
    for place in sorted(HERE.glob("measure_*.py")):
        found |= import_module(place.stem).EXPERIMENTS
    return found


def command(name: str, asked: Asked) -> str:
    """Return the command of one experiment, without the place of the data."""
    words = ["python docs/tutorial/measure.py", name]
    words += ["--data-root DIR"] if asked.data_root else []
    words += ["--run RUN"] if asked.run else ["--seeds", *map(str, asked.seeds)]
    return " ".join(words)


def write(name: str, asked: Asked, numbers: Numbers, seconds: float) -> Path:
    """Put the numbers where the chapters read them, with how they came about."""
    about = {
        "name": name,
        "command": command(name, asked),
        "processor": processor(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": date.today().isoformat(),
        "seeds": list(asked.seeds),
        "seconds": round(seconds, 1),
    }
    place = HERE / "results" / f"{name}.json"
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(about | numbers, indent=1) + "\n")
    return place


def main() -> None:
    known = experiments()
    listed = "\n".join(f"  {name:<16}{each.about}" for name, each in known.items())
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\nExperiments:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="+", choices=list(known), metavar="NAME")
    parser.add_argument("--data-root", help="where named data sets such as mnist lie")
    parser.add_argument("--seeds", nargs="+", type=int, help="default: the experiment's own")
    parser.add_argument("--quick", action="store_true", help="tiny, and nothing is written")
    parser.add_argument("--run", help="read this finished run instead of training (mnist, cifar10)")
    given = parser.parse_args()
    for name in given.names:
        seeds = tuple(given.seeds or (known[name].seeds[:1] if given.quick else known[name].seeds))
        asked = Asked(seeds, given.data_root, given.quick, given.run)
        start = time.perf_counter()
        numbers = known[name].measure(asked)
        seconds = time.perf_counter() - start
        if given.quick:
            print(f"{name}: {seconds:.0f} s; nothing is written", flush=True)
        else:
            print(f"{name}: {seconds:.0f} s; {write(name, asked, numbers, seconds)}", flush=True)


if __name__ == "__main__":
    main()
