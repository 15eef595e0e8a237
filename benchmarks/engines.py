"""Measure vitkit's engines beside other libraries and bare runtimes, as docs/benchmarks.md has it.

    python benchmarks/engines.py [--models Ti S B] [--precisions float32 bfloat16 int8] [...]

The same as `python benchmarks/versus MODEL --peak ...` for each model and precision; all other
flags are its: inference of a batch and of one image by all libraries that are installed, with equal
logits, in turns. The base is timm in float32, in every precision. One model in one precision takes
2 to 9 minutes on two cores. `--tasks training` measures training steps instead. The tables are
printed, and the results are added to benchmarks/results/engines-<processor>-<date>.json. The script
does not pass or fail.
"""

from __future__ import annotations

import argparse
from datetime import date

from demo import write_results
from versus.__main__ import compare, format_tables
from versus.__main__ import parser as versus_parser

NAMES = {"Ti": "vit_tiny_patch16_224", "S": "vit_small_patch16_224",
         "B": "vit_base_patch16_224"}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--precisions", nargs="+", default=["float32", "bfloat16", "int8"])
    args, others = parser.parse_known_args()
    for name in map(NAMES.__getitem__, args.models):
        for precision in args.precisions:
            words = [name, "--peak", "--precision", precision, *others]
            result = compare(versus_parser().parse_args(words))
            print(format_tables(result), flush=True)
            # at once, so that what was measured stays if a later model fails
            key = f"{name} {precision} {' '.join(result['settings']['tasks'])}"
            write_results("engines-", {"date": date.today().isoformat(), key: result})


if __name__ == "__main__":
    main()
