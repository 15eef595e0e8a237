"""Measure what each chapter of the tutorial takes: `python scripts/measure_chapters.py`.

Every chapter runs alone, in a process of its own with one thread. The seconds of processor time and
the largest memory go to docs/tutorial/results/chapters.json, from which the pages take them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial"
RESULTS = TUTORIAL / "results" / "chapters.json"
sys.path.insert(0, str(ROOT / "benchmarks"))


def measured(path: Path) -> dict[str, float]:
    """Run a chapter; return its seconds of processor time, on the clock, and its megabytes."""
    program = (
        "import resource, runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__'); "
        "used = resource.getrusage(resource.RUSAGE_SELF); "
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, file=sys.stderr)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    start = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-c", program, path.name], cwd=TUTORIAL, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if ended.returncode:
        raise SystemExit(f"{path.name} ended with {ended.returncode}:\n{ended.stderr[-2000:]}")
    seconds, megabytes = map(float, ended.stderr.split()[-2:])
    on_clock = time.perf_counter() - start
    return {
        "seconds": round(seconds, 1),
        "clock": round(on_clock, 1),
        "megabytes": round(megabytes),
    }


def main() -> None:
    """Measure the chapters that are named, or all; others keep their figures."""
    from demo import processor

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("chapters", nargs="*", help="such as 03_encoder; default: all")
    wanted = parser.parse_args().chapters
    known = json.loads(RESULTS.read_text())["chapters"] if RESULTS.is_file() else {}
    for path in sorted(TUTORIAL.glob("[0-9]*.py")):
        if not wanted or path.stem in wanted:
            known[path.stem] = measured(path)
            print(f"{path.stem:<20} {known[path.stem]}", flush=True)
    found = {
        "command": "python scripts/measure_chapters.py",
        "processor": processor(),
        "threads": 1,
        "date": date.today().isoformat(),
        "chapters": {path.stem: known[path.stem] for path in sorted(TUTORIAL.glob("[0-9]*.py"))
                     if path.stem in known},
    }  # fmt: skip
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    total = sum(chapter["seconds"] for chapter in found["chapters"].values())
    print(f"together {total:.0f} s of processor time")


if __name__ == "__main__":
    main()
