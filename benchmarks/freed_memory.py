"""Measure what keeping freed memory gains on a processor, as docs/benchmarks.md quotes it.

    python benchmarks/freed_memory.py [--rounds 5] [--calls 8]

Forward passes of eight images and training steps in eager torch, in new processes in turn: as the C
library is by default, and with `keep_freed_memory`, as `vitkit train` and torch's engines call it.
Prints the ratio of times with a 95 % bootstrap interval and the page faults of a call, and adds
both to benchmarks/results/freed-memory-<processor>-<date>.json. It does not pass or fail.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import date
from statistics import median

from demo import processor, write_results
from versus import speed_ratio

CASES = {
    "Ti, forward": ("vit_tiny_patch16_224", 8, False),
    "S, forward": ("vit_small_patch16_224", 8, False),
    "B, forward": ("vit_base_patch16_224", 8, False),
    "Ti, step": ("vit_tiny_patch16_224", 8, True),
    "width 96, 4 blocks, 65 tokens, step": ("small", 64, True),
}
SMALL = {"image_size": 32, "patch_size": 4, "width": 96, "depth": 4, "num_heads": 4,
         "mlp_width": 192, "num_classes": 10}  # fmt: skip
PROGRAM = """
import json, resource, sys, time
import torch, vitkit
from vitkit.process import keep_freed_memory
name, images, trains, calls, keep, small = json.loads(sys.argv[1])
if keep:
    keep_freed_memory()
torch.manual_seed(0)
model = vitkit.ViT(**small) if name == "small" else vitkit.create_model(name)
model.train(trains)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
inputs = torch.randn(images, 3, *model.spec.image_size)
def call():
    if not trains:
        with torch.inference_mode():
            return model(inputs)
    optimizer.zero_grad(set_to_none=True)
    model(inputs).logsumexp(1).mean().backward()
    optimizer.step()
for _ in range(3):
    call()
seconds, before = [], resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(calls):
    start = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - start)
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([seconds, (used.ru_minflt - before) / calls, used.ru_maxrss / 1e3]))
"""


def measured(case: tuple[str, int, bool], calls: int, keep: bool) -> tuple[float, float, float]:
    """Return the median seconds of a call, its page faults, and the process's peak in MB."""
    request = json.dumps([*case, calls, keep, SMALL])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, request], capture_output=True, text=True, check=True
    )
    seconds, faults, peak = json.loads(done.stdout)
    return median(seconds), faults, peak


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--calls", type=int, default=8)
    args = parser.parse_args()
    results: dict[str, object] = {"processor": processor(), "date": date.today().isoformat()}
    for name, case in CASES.items():
        found: dict[bool, list[tuple[float, float, float]]] = {False: [], True: []}
        for number in range(2 * args.rounds):
            keep = number % 4 in (1, 2)  # A B B A
            found[keep].append(measured(case, args.calls, keep))
        times, faults, peaks = (
            {keep: [row[part] for row in rows] for keep, rows in found.items()} for part in range(3)
        )
        ratio = speed_ratio(times[True], times[False])
        results[name] = {"faster": ratio, "seconds": times[False],
                         "faults": [median(faults[keep]) for keep in (False, True)],
                         "peak_mb": [median(peaks[keep]) for keep in (False, True)]}  # fmt: skip
        print("{}: {:.2f} [{:.2f}, {:.2f}]".format(name, *ratio), results[name], flush=True)
    write_results("freed-memory-", results)


if __name__ == "__main__":
    main()
