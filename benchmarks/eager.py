"""Measure vitkit's model beside timm's in eager torch, for every design that both have.

    OMP_NUM_THREADS=2 python benchmarks/eager.py [--rounds 5] [--depth 2] [--again] [PATTERN ...]

Models of two blocks with the same weights, float32, in turn (A B B A): the model itself, and
`vitkit.optimized`. A call takes eight images, of large models fewer, but two at least. One name of
each design stands for all that differ only in their published weights. Logits are compared first.
Each result is added at once to benchmarks/results/engines-<processor>-<date>.json; designs that are
in it already are left out, unless --again is passed. The script does not pass or fail.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial

import torch
from demo import results_file, write_results
from torch import nn
from versus import speed_ratio, turn_order
from versus.machine import declare_missing_operators

import vitkit
from vitkit.errors import VitkitError
from vitkit.planning import forward_flops

FEWEST_IMAGES, MOST_IMAGES = 2, 8
OPERATIONS = 50e9
"""Of a call, about; the images of a batch are as many as need no more."""
KEY = "eager, by design"
LEAST_SECONDS = 0.15
"""Of a turn."""
SAME = ("drop_path", "initialisation", "num_classes", "head_bias", "position_resampling")
"""Fields of a spec that change no time."""


def known() -> dict[str, object]:
    """Return today's results, by design; `None` where timm has no model of the same parameters."""
    path = results_file("engines-")
    document = json.loads(path.read_text()) if path.exists() else {}
    return document.get(KEY, {})


def designs(patterns: list[str], depth: int) -> Iterator[tuple[str, Callable[[], vitkit.ViT]]]:
    """Yield a name and a function that makes a model with few blocks, of each design."""
    seen = set()
    for name in vitkit.list_models(patterns or "*"):
        with torch.device("meta"):
            try:
                spec = vitkit.create_model(name, depth=depth).spec
            except VitkitError:
                continue
        key = str(spec.replace(**{field: getattr(vitkit.ViTSpec, field) for field in SAME}))
        if key not in seen and spec.stem in ("convolution", "linear"):
            seen.add(key)
            yield name, partial(vitkit.create_model, name, depth=depth)


def turn(model: nn.Module, images: torch.Tensor) -> float:
    """Return the seconds of a call."""
    start, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - start < LEAST_SECONDS:
        model(images)
        calls += 1
    return (time.perf_counter() - start) / calls


def compared(name: str, model: vitkit.ViT, depth: int, rounds: int) -> dict[str, object] | None:
    """Return the ratios to timm, or None where timm has no model of the same parameters."""
    import timm

    model.eval()
    try:
        peer = timm.create_model(name, depth=depth)
        peer.load_state_dict(model.state_dict())  # our names are timm's
    except (RuntimeError, TypeError):
        return None
    fitting = int(OPERATIONS / sum(forward_flops(model.spec)))
    count = min(max(fitting, FEWEST_IMAGES), MOST_IMAGES)
    images = torch.randn(count, model.spec.in_channels, *model.spec.image_size)
    fast = vitkit.optimized(model, batch_size=count)
    rows = {"timm": peer.eval(), "vitkit": model, "optimized": fast}
    with torch.inference_mode():
        logits = {key: row(images) for key, row in rows.items()}
        scale = max(1.0, float(logits["timm"].abs().max()))
        if float((logits["vitkit"] - logits["timm"]).abs().max()) > 1e-4 * scale:
            return None
        times: dict[str, list[float]] = {key: [] for key in rows}
        for key in turn_order(rows, rounds):
            times[key].append(turn(rows[key], images))
    return {key: speed_ratio(times[key], times["timm"]) for key in ("vitkit", "optimized")} | {
        "class_token": model.spec.class_token,
        "images": count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("patterns", nargs="*")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="measure known designs, too")
    args = parser.parse_args()
    declare_missing_operators()
    found = {} if args.again else known()
    for name, make in designs(args.patterns, args.depth):
        if name in found:
            continue
        found[name] = row = compared(name, make(), args.depth, args.rounds)
        if row is None:
            print(f"{name:<44} timm has no model of the same parameters", flush=True)
        else:
            shown = "  ".join(
                "{} {:.2f} [{:.2f}, {:.2f}]".format(key, *row[key])
                for key in ("vitkit", "optimized")
            )
            print(f"{name:<44} {shown}", flush=True)
        write_results("engines-", {"date": date.today().isoformat(), KEY: known() | found})


if __name__ == "__main__":
    main()
