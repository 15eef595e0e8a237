"""`vitkit compare RUN_OR_CHECKPOINT RUN_OR_CHECKPOINT ...`."""

from __future__ import annotations

import json as json_format
import sys
from dataclasses import asdict

import tyro
from tyro.conf import Positional

from vitkit import api
from vitkit.cli.arguments import as_flags, filled
from vitkit.cli.output import aligned
from vitkit.data.images.decode import escape
from vitkit.evaluation.comparison import Comparison


def compare(
    checkpoints: Positional[tuple[str, ...]],
    *,
    data: str | None = None,
    split: str | None = None,
    data_root: str | None = None,
    cache: str | None = None,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 0,
    json: bool = False,
) -> None:
    """Whether one model is better than another: the same images, and McNemar's exact test.

    Args:
        checkpoints: two or more run folders (their best weights) or checkpoints; the first one is
            compared with each of the others.
        data: as for train; default what they were trained on.
        split: train, val or test; default test, else val.
        data_root: where to look for named data sets.
        cache: folder of decoded images, as for train; `auto`: the user's own.
        device: cpu, cuda, mps or auto.
        batch_size: images run at once.
        workers: loader processes.
        json: print JSON.
    """
    found = api.compare(
        *checkpoints,
        data=data,
        split=split,
        data_root=data_root,
        cache=cache,
        device=device,
        batch_size=batch_size,
        workers=workers,
    )
    if json:
        sys.stdout.write(_json(found) + "\n")
    else:
        _print(found)


def run(arguments: list[str]) -> None:
    """Parse and compare."""
    with as_flags("batch_size", "workers"):
        tyro.cli(compare, args=filled(arguments, "--cache", "auto"), prog="vitkit compare")


def _json(found: Comparison) -> str:
    pairs = [asdict(pair) | {"verdict": pair.verdict} for pair in found.pairs]
    repeats = [asdict(group) for group in found.repeats]
    return json_format.dumps({"scores": found.scores, "pairs": pairs, "repeats": repeats})


def _print(found: Comparison) -> None:
    rows = [["checkpoint", "top1", "95 %", "balanced_accuracy", "loss", "ece", "images"]]
    for name, one in found.scores.items():
        interval = f"{one['top1_low']:.4f} to {one['top1_high']:.4f}"
        others = (f"{one[score]:.4f}" for score in ("balanced_accuracy", "loss", "ece"))
        images = f"{one['images']:,.0f}"
        rows.append([escape(name), f"{one['top1']:.4f}", interval, *others, images])
    lines = [
        f"{len(group.names)} seeds of the same settings: top1 {group.mean:.4f}, standard "
        f"deviation {group.spread:.4f} ({group.low:.4f} to {group.high:.4f})"
        for group in found.repeats
    ]
    lines += [pair.verdict for pair in found.pairs]
    sys.stdout.write(aligned(rows) + "".join(f"{escape(line)}\n" for line in lines))
