"""Measure how long the commands take that need no model: help, lists, and mistakes.

    python benchmarks/startup.py [--rounds 5] [--limit 0.5]

Each command runs in a new process. Processor time (user and system) and wall time are the medians
of the rounds; on a busy machine only the processor time says something. The exit code is 1 if a
command needs more processor time than the limit, in seconds.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

from vitkit.cli import VERBS

COMMANDS = [
    ["--help"],
    ["--version"],
    *(["help", verb] for verb in VERBS),
    ["train", "digits", "--recipe", "digits", "--help"],
    ["models"],
    ["models", "vit_small*", "--pretrained"],
    ["trian", "photos"],
    ["train"],
    ["train", "photos", "--learning-rate", "1"],
    ["train", "photos", "--epochs", "0"],
    ["predict", "nothing.safetensors", "nothing.png"],
    ["summary", "vit_tiny_patch16_242"],
    ["check", "nothing"],
]


def measured(command: list[str]) -> tuple[float, float]:
    """Run a command; return its processor time and its wall time, in seconds."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-m", "vitkit", *command], check=False, capture_output=True)
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return processor, wall


def main() -> None:
    """Print a row for each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=0.5)
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds")
    print(f"{'vitkit':<50} {'processor':>9} {'wall':>6}")
    slow = 0
    for command in COMMANDS:
        times = [measured(command) for _ in range(options.rounds)]
        processor, wall = (statistics.median(values) for values in zip(*times, strict=True))
        slow += processor > options.limit
        print(f"{' '.join(command):<50} {processor:8.2f}s {wall:5.2f}s")
    sys.exit(1 if slow else 0)


if __name__ == "__main__":
    main()
