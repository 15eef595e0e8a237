"""Measure the cost of training besides the arithmetic: log, checkpoint, waiting for images.

    python benchmarks/train.py [--only overhead checkpoint waiting] [--rounds 8] [--block 5]

overhead    a step of vit_tiny_patch16_224 at 32 pixels, patch 4, batch 128 in the training loop,
            with its events, metrics and log, relative to a bare loop over the same step; and the
            time between two steps, by the loop's own clock. No checkpoints are written.
checkpoint  `save_state` of ViT-B with AdamW, relative to writing the same bytes once; both wait
            for the disk.
waiting     the share of time that vit_small waits for 224-pixel JPEGs from a folder.

Compared parts are interleaved, in rounds. The script prints the median and, in brackets, the
quartiles; it does not pass or fail.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from datetime import date
from itertools import count
from pathlib import Path
from statistics import median, quantiles

import numpy as np
import torch
from demo import processor, write_results
from PIL import Image

import vitkit
from vitkit.data.datasets.dataset import ArraySplit, Dataset
from vitkit.data.loading.loader import Batch, batches
from vitkit.models.presets import preset
from vitkit.models.vit import ViT
from vitkit.process import StopFlag
from vitkit.training.callbacks import ReportProgress, Stop
from vitkit.training.config.train_config import USUAL, RunConfig, TrainConfig
from vitkit.training.monitoring.run_log import RunLog
from vitkit.training.optimization.optimizers import configured_optimizer
from vitkit.training.plan import Plan
from vitkit.training.run_folder import RunFolder
from vitkit.training.saving import Save
from vitkit.training.state.registry import ModelPart, OptimizerPart
from vitkit.training.state.state_folder import save_state
from vitkit.training.step import StepResult
from vitkit.training.train import callbacks_of, make_run
from vitkit.training.trainer import Callback, Trainer


class NoSave(Save):
    """A `Save` callback that writes nothing."""

    def save_weights(self, *_: object) -> None:
        pass

    def save_state(self) -> None:
        pass


class Clock(Callback):
    """A clock of the time of a run outside its steps and its waiting for images."""

    between = 0.0
    _left: float | None = None

    def before_step(self, trainer: Trainer, batch: Batch) -> None:
        if self._left is not None:
            self.between += time.perf_counter() - self._left

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._left = time.perf_counter()

    def on_end(self, trainer: Trainer) -> None:
        self._left = None


def spread(values: list[float]) -> dict[str, float]:
    """Return median and quartiles."""
    low, _, high = quantiles(values, n=4)
    return {"median": median(values), "low": low, "high": high}


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def overhead(rounds: int, block: int) -> dict[str, object]:
    """Compare the loop with a bare one over the same `TrainingStep`, `block` steps each in turn.

    The log writes once per block; the default is once in 50 steps.
    """
    plan = small_images(log_interval=block)
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(Path(name))
        with RunLog(folder, total=plan.total_steps) as log:
            model, clock = ViT(plan.spec).to(plan.device), Clock()
            run = make_run(plan, folder, log, model, StopFlag())
            run.further = [clock]
            report = ReportProgress(run)
            trainer = Trainer(
                run.training_step,
                run.progress,
                lambda steps: report.watched(batches(plan.steps, steps)),
                schedule=plan.learning_rate,
                steps_per_epoch=plan.steps.steps_per_epoch,
                epochs=plan.config.epochs,
                last_step=0,
                callbacks=callbacks_of(run, report, Stop(run), NoSave(run)),
            )

            def go_on(steps: int) -> None:
                trainer.last_step += steps
                trainer.run()

            numbers = count(10**6)

            def bare() -> None:
                for _, number in zip(range(block), numbers, strict=False):
                    run.training_step(plan.steps[number], number)

            go_on(1)
            bare()
            clock.between = 0.0
            pairs = []
            for turn in range(rounds):
                ways = [lambda: go_on(block), bare]
                taken = [timed(way) for way in (ways if turn % 2 else ways[::-1])]
                pairs.append(taken if turn % 2 else taken[::-1])
    ratio = spread([ours / theirs - 1 for ours, theirs in pairs])
    step = median(theirs for _, theirs in pairs) / block
    between = clock.between / (rounds * (block - 1))
    print(f"  a bare step takes {step * 1000:.0f} ms; the loop adds {ratio['median']:+.2%} "
          f"[{ratio['low']:+.2%}, {ratio['high']:+.2%}]; by its own clock it spends "
          f"{between * 1000:.2f} ms between two steps, {between / step:.2%}")  # fmt: skip
    return {"step_seconds": step, "ratio": ratio, "between_share": between / step}


def small_images(log_interval: int) -> Plan:
    """Return random images of 32 pixels in ten classes."""
    from vitkit.data.loading.crop_flip import Augmentation
    from vitkit.data.loading.loader import TrainingSteps

    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (4096, 32, 32, 3), dtype=np.uint8)
    split = ArraySplit(pixels, random.integers(0, 10, 4096), "noise")
    classes = tuple("0123456789")
    config = TrainConfig(
        data="noise", epochs=1000, log_interval=log_interval, quiet=False, amp="off"
    )
    spec = preset("vit_tiny_patch16_224", image_size=32, patch_size=4, num_classes=10)
    preprocess = vitkit.Preprocess(image_size=32)
    steps = TrainingSteps(split, preprocess, Augmentation(flip=0.5), batch_size=128, seed=0)
    return Plan(config=config, dataset=Dataset("noise", classes, {"train": split}, "noise"),
                spec=spec, preprocess=preprocess, steps=steps, device=torch.device("cpu"),
                workers=0, notes=())  # fmt: skip


def checkpoint(rounds: int) -> dict[str, object]:
    """Compare `save_state` with one file of the same bytes."""
    model = ViT(preset("vit_base_patch16_224", num_classes=1000))
    optimizer = configured_optimizer(model, RunConfig(data="", **USUAL))
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    registry = {"model": ModelPart(model), "optimizer": OptimizerPart(optimizer)}
    buffers = [
        tensor.contiguous().view(-1).numpy().view(np.uint8)
        for part in registry.values()
        for tensor in part.tensors().values()
    ]
    size = sum(buffer.nbytes for buffer in buffers)
    times: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)

        def write() -> None:
            with (folder / "bytes").open("wb") as file:
                file.writelines(buffer.data for buffer in buffers)
                os.fsync(file.fileno())

        for turn in range(rounds + 1):  # the first one is thrown away
            saved = timed(lambda turn=turn: save_state(folder / "state", registry, turn))
            written = timed(write)
            (folder / "bytes").unlink()
            times += [(saved, written)] if turn else []
    ratio = spread([saved / written for saved, written in times])
    saved, written = (median(column) for column in zip(*times, strict=True))
    print(f"  {size / 1e9:.2f} GB: saved in {saved:.2f} s, written once in {written:.2f} s; "
          f"{ratio['median']:.2f} x [{ratio['low']:.2f}, {ratio['high']:.2f}]")  # fmt: skip
    return {"gigabytes": size / 1e9, "saved": saved, "written": written, "ratio": ratio}


def waiting(steps: int, workers: int) -> dict[str, object]:
    """Measure the waiting time of a run of vit_small from a folder."""
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        for number in range(400):
            folder = Path(name) / "images" / "train" / f"class-{number % 2}"
            folder.mkdir(parents=True, exist_ok=True)
            coarse = random.integers(0, 256, (28, 28, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize((224, 224), Image.Resampling.BICUBIC)
            image.save(folder / f"{number}.jpg", quality=90)
        run = vitkit.train(
            str(Path(name) / "images"), output=f"{name}/run", model="vit_small_patch16_224",
            batch_size=16, epochs=2, warmup_epochs=0.5, max_steps=steps, val_fraction=0.0,
            workers=workers, log_interval=1, amp="off", quiet=True,
        ).run  # fmt: skip
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        log = (run / "train.log").read_text()
    last = [row for row in rows if row["kind"] == "step"][-1]
    print(f"  {workers} workers: {last['data_wait']:.1%} of {steps} steps, the start of the "
          f"workers included; {last['images_per_s']:.1f} images/s")  # fmt: skip
    for line in log.splitlines():
        if "after 30 steps" in line:
            print(f"  {line[20:]}")
    return {"workers": workers, "data_wait": last["data_wait"],
            "images_per_s": last["images_per_s"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    names = ("overhead", "checkpoint", "waiting")
    parser.add_argument("--only", nargs="+", choices=names, default=list(names))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--block", type=int, default=5, help="steps of a round of `overhead`")
    parser.add_argument("--steps", type=int, default=12, help="of `waiting`; at most 25")
    args = parser.parse_args()
    results: dict[str, object] = {"processor": processor(), "date": str(date.today())}
    measures: dict[str, Callable[[], object]] = {
        "overhead": lambda: overhead(args.rounds, args.block),
        "checkpoint": lambda: checkpoint(args.rounds),
        "waiting": lambda: [waiting(args.steps, workers) for workers in (2, 0)],
    }
    for name in args.only:
        print(f"{name}:", flush=True)
        results[name] = measures[name]()
    write_results("train-", results)


if __name__ == "__main__":
    main()
