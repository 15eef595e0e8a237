"""Measure how OpenMP's waiting policy changes the time of a training step on a busy machine.

    python benchmarks/busy.py [--recipe fashion-mnist] [--amp bfloat16] [--threads 2]
                              [--rounds 8] [--ways as-is vitkit OMP_WAIT_POLICY=PASSIVE ...]

Each setting runs in its own process, because libgomp reads the environment variables when it is
loaded. In each round every process is timed twice: with the machine otherwise idle, and while
another process keeps one core busy. The table shows the median time of a step, and its ratio to
that of `as-is` on the idle machine, with the quartiles over the rounds.

Settings: `as-is` sets no variable, `vitkit` sets what the command line sets, and
`NAME=VALUE[,NAME=VALUE]` sets the variables given.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median, quantiles

WAYS = ("as-is", "vitkit", "OMP_WAIT_POLICY=PASSIVE", "GOMP_SPINCOUNT=1000")


def child(recipe: str, amp: str, threads: int) -> None:
    """Read numbers of steps from standard input; run them, and print the seconds they took."""
    import numpy as np
    import torch

    import vitkit
    from vitkit.data.datasets.dataset import ArraySplit, Dataset
    from vitkit.data.loading.crop_flip import Augmentation
    from vitkit.data.loading.loader import TrainingSteps
    from vitkit.models.attention import use_attention
    from vitkit.models.presets import preset
    from vitkit.models.vit import ViT
    from vitkit.training.config.train_config import TrainConfig
    from vitkit.training.optimization.optimizers import configured_optimizer
    from vitkit.training.plan import Plan, make_step
    from vitkit.training.recipes import recipe_settings

    torch.set_num_threads(threads)
    settings = recipe_settings(recipe)
    settings |= {"data": "noise", "amp": amp, "attention_kernel": "plain"}
    config = TrainConfig(**settings)
    spec = preset(config.model, **{**config.spec, "num_classes": 10})
    size, channels = spec.image_size[0], spec.in_channels
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (1024, size, size, channels), dtype=np.uint8)
    split = ArraySplit(pixels, random.integers(0, 10, 1024), "noise")
    preprocess = vitkit.Preprocess(image_size=size, mean=[0.5] * channels, std=[0.5] * channels)
    steps = TrainingSteps(split, preprocess, Augmentation(), batch_size=config.batch_size, seed=0)
    classes = tuple("0123456789")
    plan = Plan(config=config, dataset=Dataset("noise", classes, {"train": split}, "noise"),
                spec=spec, preprocess=preprocess, steps=steps, device=torch.device("cpu"),
                workers=0, notes=())  # fmt: skip
    model = ViT(spec).train()
    use_attention(model, "plain")
    step, batch = make_step(plan, model, configured_optimizer(model, config)), steps[0]
    for line in sys.stdin:
        start = time.perf_counter()
        for number in range(int(line)):
            step(batch, number)
        print(time.perf_counter() - start, flush=True)


class Way:
    """A process that runs training steps with one setting."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        environment = dict(os.environ)
        if name == "vitkit":
            from vitkit.process import shorten_spinning

            shorten_spinning(environment)
        elif name != "as-is":
            environment |= dict(part.split("=", 1) for part in name.split(","))
        self.name = name
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", *arguments],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.times: dict[bool, list[float]] = {False: [], True: []}

    def steps(self, number: int) -> float:
        """Run `number` steps; return the mean milliseconds of one."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{number}\n")
        stdin.flush()
        return 1000 * float(stdout.readline()) / number


@contextmanager
def busy() -> Iterator[None]:
    """Keep one core busy by another process."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.2)
        yield
    finally:
        process.kill()
        process.wait()


def shown(values: list[float]) -> str:
    """Format the median and the quartiles."""
    low, _, high = quantiles(values, n=4)
    return f"{median(values):5.2f} [{low:4.2f}, {high:4.2f}]"


def main() -> None:
    """Measure the settings, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="fashion-mnist")
    parser.add_argument("--amp", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        child(args.recipe, args.amp, args.threads)
        return
    passed = ["--recipe", args.recipe, "--amp", args.amp, "--threads", str(args.threads)]
    ways = [Way(name, passed) for name in args.ways]
    for way in ways:
        way.steps(3)
    for _ in range(args.rounds):
        for way in ways:
            way.times[False].append(way.steps(args.steps))
        with busy():
            for way in ways:
                way.times[True].append(way.steps(args.steps))
    usual = ways[0].times[False]
    print(f"{args.recipe}, {args.amp}, {args.threads} threads; usual {median(usual):.0f} ms")
    for way in ways:
        quiet, other = (way.times[state] for state in (False, True))
        print(f"{way.name:44} quiet {median(quiet):6.1f} ms "
              f"{shown([a / b for a, b in zip(quiet, usual, strict=True)])}  "
              f"busy {median(other):6.1f} ms "
              f"{shown([a / b for a, b in zip(other, usual, strict=True)])}")  # fmt: skip
        way.process.stdin.close()
        way.process.wait()


if __name__ == "__main__":
    main()
