"""`vitkit eval CHECKPOINT DATA`."""

from __future__ import annotations

import json
import sys

import tyro
from tyro.conf import Positional

from vitkit import api


def evaluate(
    checkpoint: Positional[str],
    data: Positional[str],
    *,
    split: str | None = None,
    data_root: str | None = None,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 0,
    json: bool = False,
) -> None:
    """How good a checkpoint is: top-1, top-k and loss.

    Args:
        checkpoint: a .safetensors file that vitkit wrote.
        data: as for train: a folder, CSV, Parquet, tars or a named set; classes match by name.
        split: train, val or test; default test, else val.
        data_root: where to look for named data sets.
        device: cpu, cuda, mps or auto.
        batch_size: pictures run at once.
        workers: loader processes.
        json: print JSON.
    """
    metrics = api.evaluate(
        checkpoint,
        data,
        split=split,
        data_root=data_root,
        device=device,
        batch_size=batch_size,
        workers=workers,
    )
    if json:
        sys.stdout.write(_json(metrics) + "\n")
    else:
        for name, value in metrics.items():
            shown = f"{value:.0f}" if name == "pictures" else f"{value:.4f}"
            sys.stdout.write(f"{name:<9} {shown}\n")


def run(arguments: list[str]) -> None:
    """Parse and evaluate."""
    tyro.cli(evaluate, args=arguments, prog="vitkit eval")


def _json(metrics: dict[str, float]) -> str:
    return json.dumps(metrics)
