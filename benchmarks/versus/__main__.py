"""The command line `python benchmarks/versus MODEL [flags]`, and the tables."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python puts this folder itself there
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from versus import Interval
from versus.baselines import BASELINES, OWN, choose
from vitkit.engines.registry import PRECISIONS
from vitkit.errors import SettingError, VitkitError
from vitkit.messages import short_number
from vitkit.process import available_cores

DESCRIPTION = """\
Compare the speed of a model with other libraries: same weights, same logits, same threads.

Each library has a process of its own. One with other logits than ours is named and not timed, as is
one that crashes. The others take turns, in an order drawn for each round, and in reverse. A ratio
is that of medians, with a 95 % bootstrap interval; the first library, compared with itself, shows
the noise. All run on the processor. For GPUs: benchmarks/gpu.sh; loaders: benchmarks/loading.py."""
EXAMPLES = """\
examples:
  python benchmarks/versus vit_small_patch16_224  # all that are installed
  python benchmarks/versus ViT-B/16 --against timm:float32 --engines openvino:int8 openvino
  python benchmarks/versus vit_tiny_patch16_224 --tasks training --against timm
  python benchmarks/versus runs/photos-vit-1 --against timm openvino"""
QUIET_LOAD = 0.3
"""Load average over one minute up to which a machine counts as idle."""
TITLES = {"inference": "inference, batch {}", "latency": "one image at a time",
          "training": "training step, batch {}"}  # fmt: skip


def main(arguments: list[str]) -> int:
    """Measure, print and return the exit code: 0, or 2 for a mistake that one line describes."""
    args = parser().parse_args(arguments)
    try:
        result = compare(args)
    except VitkitError as error:
        print(f"versus: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result, indent=2) if args.json else format_tables(result))
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        "versus", description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = made.add_argument
    add("model", help="a model's name (untrained weights), or a checkpoint of any known format")
    add("--against", nargs="*", default=[], metavar="NAME", help="baselines, each also as "
        f"NAME:PRECISION: {', '.join(BASELINES)}, or none; default timm:float32 and all that are "
        "installed. The first is the base of the ratios")  # fmt: skip
    add("--engines", nargs="*", default=[], metavar="NAME",
        help=f"of vitkit: {', '.join(OWN)}; default all that are installed")  # fmt: skip
    add("--tasks", nargs="+", choices=list(TITLES), default=["inference", "latency"])
    add("--precision", choices=PRECISIONS, default="float32")
    add("--batch-size", type=int, default=8)
    add("--threads", type=int, default=available_cores())
    add("--rounds", type=int, default=7, help="2 or more; a library has two turns in each")
    add("--seconds", type=float, default=0.5, help="of a turn, at least")
    add("--peak", action="store_true", help="also measure the largest speed of matrix products")
    add("--json", action="store_true", help="print JSON, with all turns, machine and versions")
    return made


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Check the arguments, then measure."""
    for flag, least in (("batch_size", 1), ("threads", 1), ("rounds", 2), ("seconds", 0)):
        value = getattr(args, flag)
        if value < least:
            raise SettingError(f"--{flag.replace('_', '-')} {value}: must be {least} or more")
    libraries, left_out = choose(args.against, args.engines, args.precision)
    # imported here: --help and wrong names do not wait for torch
    from versus.measure import measure

    return measure(args, libraries, left_out)


def format_tables(result: dict[str, Any]) -> str:
    """Return the tables of all tasks, with what stands above and below them."""
    settings, machine = result["settings"], result["machine"]
    load = machine["load_before"]
    busy = f" (busy: an idle machine has at most {QUIET_LOAD})" if load > QUIET_LOAD else ""
    lines = [
        f"{settings['model']}, {settings['precision']}, threads: {settings['threads']}, "
        f"rounds: {settings['rounds']}",
        f"on {machine['processor']}, load {load:.1f} before{busy}",
    ]
    for name, speed in result["matrix_products"].items():
        lines.append(f"largest matrix product: {name} {speed / 1e9:,.0f} GFLOP/s")
    for task in result["tasks"]:
        lines += ["", *_task_lines(task)]
    lines += [f"left out: {name}: {reason}" for name, reason in result["left_out"].items()]
    return "\n".join(lines)


def _task_lines(task: dict[str, Any]) -> list[str]:
    """Return the lines of one task; brackets hold 95 % intervals."""
    rows, fastest = task["rows"], task["fastest"]
    is_latency = task["task"] == "latency"
    lines = [TITLES[task["task"]].format(task["batch_size"])]
    if rows:
        lines[0] += f" (x: times as fast as {rows[0]['library']})"
        unit = "ms" if is_latency else "images/s"
        lines.append(f"  {'':<28}{unit:>9}  {'':<20}{'of peak':>9}{'MB':>8}")
    for row in rows:
        speed, share = row["images_per_second"][0], row["share_of_peak"]
        shown = f"{1e3 / speed:.2f}" if is_latency else short_number(speed)
        part = "-" if share is None else f"{100 * share:.0f} %"
        faster = Interval(*row["faster"])
        lines.append(
            f"  {row['library']:<28}{shown:>9}  {faster!s:<20}{part:>9}{row['peak_mb']:>8.0f}"
        )
        if row["is_again"] and not faster.low <= 1.0 <= faster.high:
            lines.append("  the machine was not steady: the first library differs from itself")
    if fastest:
        lines.append(
            f"  {fastest['vitkit']} beside the fastest baseline, {fastest['baseline']}: "
            f"{Interval(*fastest['faster'])} (both chosen by these times)"
        )
    return lines + [f"  not timed: {name}: {why}" for name, why in task["not_timed"].items()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
