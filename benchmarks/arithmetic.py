"""Time training steps in float32 and bfloat16, with fused and plain attention, by model size.

    python benchmarks/arithmetic.py [--threads 1] [--rounds 5] [--device cpu]

The rule in `vitkit.training.optimization.precision` was chosen from these numbers. The four
variants of a model are timed in turn on the same weights and images. The table shows the median
step of float32 with fused attention, and the ratio of each other variant to it with the quartiles
over the rounds.
"""

from __future__ import annotations

import argparse
import copy
import time
from itertools import product
from statistics import median, quantiles

import torch
from demo import processor
from torch.nn import functional as F

from vitkit.models.attention import use_attention
from vitkit.models.vit import ViT
from vitkit.spec import ViTSpec
from vitkit.training.optimization.precision import autocast, wait_for

MODELS = {  # image size, patch, width, depth, heads, images a step
    "width 32, 16 tokens": (16, 4, 32, 2, 2, 24),
    "width 64, 16 tokens (digits)": (8, 2, 64, 4, 4, 64),
    "width 64, 64 tokens": (32, 4, 64, 4, 4, 64),
    "width 96, 50 tokens": (28, 4, 96, 3, 3, 64),
    "width 128, 64 tokens": (32, 4, 128, 6, 4, 64),
    "width 192, 64 tokens": (32, 4, 192, 4, 3, 32),
    "width 192, 196 tokens": (224, 16, 192, 4, 3, 8),
    "width 192, 576 tokens": (384, 16, 192, 4, 3, 4),
    "width 384, 196 tokens": (224, 16, 384, 4, 6, 4),
    "width 384, 1,024 tokens": (512, 16, 384, 2, 6, 2),
    "width 768, 196 tokens": (224, 16, 768, 2, 12, 2),
}


def main() -> None:
    """Measure the models, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    ways = list(product(("off", "bfloat16"), ("fused", "plain")))
    print(f"{processor()}, {args.threads} threads; " + ", ".join("/".join(w) for w in ways[1:]))
    for name, (size, patch, width, depth, heads, images) in MODELS.items():
        spec = ViTSpec(image_size=size, patch_size=patch, width=width, depth=depth,
                       num_heads=heads, mlp_width=4 * width, num_classes=10)  # fmt: skip
        model = ViT(spec).to(device).train()
        batch = torch.randn(images, 3, size, size, device=device)
        labels = torch.randint(0, 10, (images,), device=device)
        copies = [copy.deepcopy(model) for _ in ways]
        times: list[list[float]] = [[] for _ in ways]
        for number in range(args.rounds + 1):
            for (precision, kernel), one, taken in zip(ways, copies, times, strict=True):
                use_attention(one, kernel)
                start = time.perf_counter()
                for _ in range(3):
                    with autocast(precision, device):
                        loss = F.cross_entropy(one(batch).float(), labels)
                    loss.backward()
                    wait_for(device)
                if number:
                    taken.append((time.perf_counter() - start) / 3)
        shown = []
        for taken in times[1:]:
            ratios = [a / b for a, b in zip(taken, times[0], strict=True)]
            low, _, high = quantiles(ratios, n=4)
            shown.append(f"{median(ratios):4.2f} [{low:4.2f}, {high:4.2f}]")
        print(f"{name:30} {1000 * median(times[0]):7.1f} ms  " + "  ".join(shown), flush=True)


if __name__ == "__main__":
    main()
