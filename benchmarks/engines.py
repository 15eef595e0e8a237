"""Measure vitkit's engines beside other libraries and bare runtimes, as docs/benchmarks.md has it.

    python benchmarks/engines.py [--models Ti S B] [--precisions float32 bfloat16 int8]
                                 [--batch 8] [--rounds 7] [--seconds 0.5] [--threads N]
                                 [--against NAME ...] [--engines NAME ...] [--training]
                                 [--plot FOLDER]

The same as `vitkit bench MODEL` for each model and precision: inference of a batch and of one image
by all contenders that are installed, with equal logits, in turns; a NAME may have a precision, as
in timm:float32. The base is timm in float32, in every precision. One model in one
precision takes 2 to 9 minutes on two cores. `--training` measures training steps and loaders
instead. The tables are printed, and the results are added to
benchmarks/results/engines-<processor>-<date>.json. The script does not pass or fail.
"""

from __future__ import annotations

import argparse
import sys
import time
from datetime import date
from pathlib import Path

from demo import write_results

from vitkit.benchmarking.contenders import choose_contenders
from vitkit.benchmarking.measure import Benchmark
from vitkit.benchmarking.model_files import open_model
from vitkit.benchmarking.plot import save_plot
from vitkit.benchmarking.settings import benchmark_settings
from vitkit.benchmarking.table import format_tables

NAMES = {"Ti": "vit_tiny_patch16_224", "S": "vit_small_patch16_224",
         "B": "vit_base_patch16_224"}  # fmt: skip


def report(line: str) -> None:
    """Print on stderr what is done now."""
    print(f"{time.strftime('%X')} {line}", file=sys.stderr, flush=True)


def measured(name: str, precision: str, args: argparse.Namespace) -> dict[str, object]:
    """Measure one model in one precision."""
    settings = benchmark_settings(
        precision=precision,
        batch_size=args.batch,
        threads=args.threads,
        rounds=args.rounds,
        seconds=args.seconds,
        tasks=("training", "loader") if args.training else (),
    )
    lineup = choose_contenders(args.against, args.engines, precision)
    result = Benchmark(name, open_model(name, {}), lineup, settings, report).run()
    print(format_tables(result), flush=True)
    if args.plot is not None:
        save_plot(result, args.plot / f"{name}-{precision}.png", "benchmarks/engines.py")
    return result.to_json()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn, at least")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--against", nargs="+", default=[])
    parser.add_argument("--engines", nargs="+", default=[])
    parser.add_argument("--training", action="store_true", help="training steps and loaders")
    parser.add_argument("--plot", type=Path, help="a folder for figures")
    args = parser.parse_args()
    kind = "training" if args.training else "inference"
    for name in map(NAMES.__getitem__, args.models):
        for precision in args.precisions:
            made = measured(name, precision, args)
            # at once, so that what was measured stays if a later model fails
            write_results(
                "engines-",
                {"date": date.today().isoformat(), f"{name} {precision} {kind}": made},
            )


if __name__ == "__main__":
    main()
