"""`vitkit train DATA --auto`: candidates from cheap to expensive, while each one is better.

The candidates are k-NN on pretrained features, a linear head on them, and fine-tuning; without
weights, k-NN on pixels and a model from scratch. They are compared on validation, image by image,
by McNemar's exact test: without a significant difference the cheaper one wins. The test split is
read once, at the end, for the winner.

The limit of time is one rule: a candidate starts if its shortest run, estimated from a few timed
batches, fits into the time that is left, and its training ends by the deadline.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from vitkit.devices import on_device
from vitkit.distributed import has_rank
from vitkit.errors import CheckpointError, Interrupted, NonFiniteError, SettingError
from vitkit.evaluation.features import extract_features, knn
from vitkit.evaluation.intervals import SIGNIFICANCE_LEVEL, mcnemar, wilson_interval
from vitkit.evaluation.loop import evaluate_outputs, predict_batches
from vitkit.evaluation.metrics import Metrics
from vitkit.io.atomic import replacing, write_bytes
from vitkit.messages import flag_name, plural
from vitkit.models.vit import ViT
from vitkit.process import raise_on_signal
from vitkit.training.callbacks import Deadline
from vitkit.training.config.data_settings import CATALOGUE
from vitkit.training.config.meaning import Settings, fields_where
from vitkit.training.config.merging import layered
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.monitoring.run_log import Display
from vitkit.training.optimization.precision import wait_for
from vitkit.training.plan import Plan, make_plan
from vitkit.training.recipes.presets import finetune
from vitkit.training.run import TrainResult
from vitkit.training.run_folder import RunFolder, check_output, locked, new_folder
from vitkit.training.setup.defaults import (
    FINETUNE_EPOCHS,
    MOST_EPOCHS,
    SIZES,
    STEPS,
    ImageStatistics,
    limit_batch_size,
    limit_warmup,
    scratch_settings,
)
from vitkit.training.setup.initial_weights import make_model
from vitkit.training.train import train
from vitkit.training.tuning import trial, tune_settings
from vitkit.weights.formats.vitkit import DESCRIBED, save
from vitkit.weights.load import load

BUDGET = "10m"
"""Default of the setting `budget`."""
UNITS = {"s": 1, "m": 60, "h": 3600}
SHARE = 0.9
"""Part of the time left that a training may use; the rest is for its evaluation."""
MARGIN = 1.2
"""Factor by which an estimate may be wrong."""
WARM_UP, TIMED, TIMED_IMAGES = 1, 4, 64
"""Training steps before the timed ones, timed steps, and images whose features are timed."""
PIXEL_SPEC = {"image_size": 16, "patch_size": 16}
"""Size to which images are resized before their pixels are compared."""


def run_search(config: TrainConfig, clock: Callable[[], float] = time.monotonic) -> TrainResult:
    """Search over candidates, and evaluate the winner once on the test split.

    The folder has `search.json`, the winner in `weights/best.safetensors`, and a run folder for
    each candidate that trained.

    Args:
        config: `data`, `budget`, and settings that are passed on to every candidate.
        clock: returns the current time, in seconds; it never decreases.

    Raises:
        UserError: wrong settings or data, or a budget too small for one epoch; nothing is written.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1 came; the results so far are kept.
        NonFiniteError: there is no winner, because training diverged.
    """
    # Refused before the data are read, which may take minutes.
    check_output(config)
    with raise_on_signal():
        search = _Search(config, clock)
        # Before the folder: nothing is written for a budget that is too small.
        search.check_budget()
        folder = search.folder = new_folder(replace(config, model="auto"), search.log)
        with locked(folder.root):
            try:
                search.run()
                metrics = search.evaluate_winner(test=config.test)
            finally:  # the table of an interrupted search is written, too
                search.log_table()
                write_bytes(folder.log, "".join(f"{line}\n" for line in search.lines).encode())
    last = RunFolder(folder.root / search.winner).last
    return TrainResult(folder.root, folder.best, last, metrics, search.stopped)


def parse_budget(budget: str) -> float:
    """Convert `90s`, `10m` or `1.5h` to seconds. Raises `SettingError`.

    >>> parse_budget("1.5h")
    5400.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", budget.strip())
    if match is None or float(match[1]) == 0:
        raise SettingError(
            f"--budget {budget!r} is not a time; write a number above 0 with s, m or h, such "
            "as 90s, 10m or 1h"
        )
    return float(match[1]) * UNITS[match[2]]


def _shared_settings(config: TrainConfig) -> Settings:
    """Return the user's settings for all candidates; refuse those that the search decides."""
    if config.resume is not None:
        raise SettingError(
            "--auto takes no --resume, as every search starts afresh; to resume one candidate: "
            "vitkit train --resume RUN/CANDIDATE, without --auto"
        )
    # processes that measure times of their own would not decide alike
    if has_rank():
        raise SettingError("--auto runs in one process; start it without torchrun")
    given, defaults = config.to_json(), TrainConfig(data=config.data).to_json()
    changed = {name for name in given if given[name] != defaults[name]}
    decided = [name for name in fields_where(TrainConfig, with_auto="refused") if name in changed]
    # With weights, `model` selects published ones; from scratch, the search chooses the size.
    if config.model is not None and config.pretrained is None:
        decided.append("model")
    if config.recipe is not None:  # not the settings that it has
        decided = ["recipe"]
    if decided:
        pronoun = "it" if len(decided) == 1 else "them"
        raise SettingError(
            f"--auto chooses {', '.join(map(flag_name, decided))} itself; leave {pronoun} out, or "
            "train without --auto"
        )
    passed_on = fields_where(TrainConfig, with_auto="passed on")
    return {name: given[name] for name in passed_on if name in changed or name == "data"}


BETTER, WORSE, SAME = "better than", "worse than", "no significant difference to"
"""Verdicts of a comparison."""


@dataclass(frozen=True)
class _Result:
    """A candidate's result; `correct` (N,) is True for each validation image that it got right."""

    description: str
    correct: Bool[np.ndarray, " N"]
    trained: int = 0
    weights: Path | None = None

    def scores(self) -> Metrics:
        """Return the validation top-1 with its 95 % interval, and the number of images."""
        low, high = wilson_interval(int(self.correct.sum()), len(self.correct))
        top1 = float(self.correct.mean())
        return {"top1": top1, "top1_low": low, "top1_high": high, "images": len(self.correct)}

    def compare(self, other: _Result) -> tuple[float, str]:
        """Return the p-value of McNemar's exact test, and the verdict."""
        only_self = int((self.correct & ~other.correct).sum())
        only_other = int((other.correct & ~self.correct).sum())
        p = mcnemar(only_self, only_other)
        if p >= SIGNIFICANCE_LEVEL:
            return p, SAME
        return p, BETTER if only_self > only_other else WORSE


class _Training(NamedTuple):
    """A model that may be trained: its settings, its plan, and the estimated seconds an epoch."""

    settings: Settings
    plan: Plan
    epoch: float


class _Search:
    """The data and settings that all candidates share, the candidates, and their results."""

    folder: RunFolder

    def __init__(self, config: TrainConfig, clock: Callable[[], float]) -> None:
        self.clock, self.started = clock, clock()
        self.given = BUDGET if config.budget is None else config.budget
        self.budget = parse_budget(self.given)
        self.settings = _shared_settings(config)
        self.pretrained: str | None = self.settings.pop("pretrained", None)
        self._display = Display(total=0, done=0, quiet=config.quiet)
        self.lines: list[str] = []
        self.plan = self._open()
        for line in self.plan.notes:  # not what was chosen: the candidates choose for themselves
            self.log(line)
        if "val" not in self.plan.dataset.splits:
            raise SettingError(
                "--auto chooses by the validation split, and the data have none; raise "
                "--val-fraction above 0"
            )
        self.train, self.val = (self.plan.dataset.splits[name] for name in ("train", "val"))
        # from small to large; a large model would overfit few images
        self.sizes = [size for size in reversed(SIZES) if size.images <= len(self.train)]
        self.statistics = ImageStatistics.of(self.train)
        self.log(self.statistics.describe())
        device, workers = self.plan.device, self.plan.workers
        self._predict = partial(predict_batches, device=device, workers=workers)
        self._extract = partial(extract_features, device=device, workers=workers, log=self.log)
        self.rows: list[dict[str, Any]] = []
        self.winner, self.stopped = "", ""
        self.test: Metrics = {}

    def log(self, line: str) -> None:
        """Print a line, and keep it for the log of the search."""
        self.lines.append(line)
        self._display.print(line)

    def _open(self) -> Plan:
        """Open and check the data, and the weights to start from, if any can be reached."""
        # of no steps: the plan is for the data, the device and the weights
        settings = self.settings | {"batch_size": 1, "epochs": 1}
        if self.pretrained is not None:
            try:
                return make_plan(TrainConfig(**settings | {"pretrained": self.pretrained}))
            except CheckpointError as error:
                if self.pretrained != CATALOGUE:  # a file that the user named must be readable
                    raise
                self.log(
                    f"no published weights can be reached ({error}); training from random weights "
                    "instead"
                )
                self.pretrained = None
                self.settings.pop("model", None)
                settings.pop("model", None)
        return make_plan(TrainConfig(**settings | {"spec": PIXEL_SPEC, "fit": "squash"}))

    @property
    def used(self) -> float:
        """The time since the start of the search, in seconds."""
        return self.clock() - self.started

    def check_budget(self) -> None:
        """Refuse a budget that is too small for the first candidate with weights."""
        name, needed = "linear", self._feature_seconds()  # cached: the head learns from the same
        if self.pretrained is None:
            name, needed = "scratch", needed + self._first.epoch
        needed += self.used
        if needed > self.budget:
            raise SettingError(
                f"--budget {self.given} is too short for {name} on this machine; pass --budget "
                f"{math.ceil(MARGIN * needed)}s or more"
            )

    def run(self) -> None:
        """Run the candidates from cheap to expensive."""
        try:
            baseline = self._run("neighbours", self._neighbours)
            if self.pretrained is None:
                self._run("scratch", self._scratch, baseline)
                end = ""
            else:
                end = self._try_finetuning(self._run("linear", self._linear, baseline))
            self.stopped = end or "nothing further to try"
        except Interrupted as error:
            self.stopped, message = error.name, str(error)
            if self.winner:
                message += f"; the best so far, {self.winner}, is kept in {self.folder.best}"
            raise Interrupted(error.signum, message) from None
        finally:  # with the reason of the end
            self.save()
        self.log(f"finished: {self.stopped}")

    def _try_finetuning(self, linear: _Result) -> str:
        """Fine-tune if a gain can be shown and the time allows; return why not, or why in vain."""
        errors, images = int((~linear.correct).sum()), len(linear.correct)
        if mcnemar(0, errors) >= SIGNIFICANCE_LEVEL:
            return (
                f"finetune cannot be significantly better: linear is wrong on only {errors} of "
                f"{images} validation images, too few to show a gain; use more validation images"
            )
        needed, left = self._first.epoch, max(0.0, self.budget - self.used)
        if needed > left:
            return f"finetune needs at least {needed:.0f} s, and {left:.0f} s are left"
        try:
            self._run("finetune", self._finetune, linear)
        except NonFiniteError as error:
            return f"finetune diverged: {error}"
        return "" if self.winner == "finetune" else "finetune is not significantly better"

    def _run(
        self, name: str, candidate: Callable[[Path], _Result], before: _Result | None = None
    ) -> _Result:
        """Run a candidate; log its result, and keep its weights if it is better than before."""
        started = self.clock()
        result = candidate(self.folder.root / name)
        seconds = self.clock() - started
        line = f"{name}: validation top-1 {_top1_with_interval(result.scores())}"
        compared_with, p, verdict = None, None, None
        if before is not None:
            compared_with = self.rows[-1]["name"]
            p, verdict = result.compare(before)
            line += f"; {verdict} {compared_with} (McNemar, p = {p:.2g})"
        self.log(line)
        row = {
            "name": name,
            "description": result.description,
            "trained": result.trained,
            "seconds": round(seconds, 1),
            "validation": result.scores(),
            "compared_with": compared_with,
            "p": p,
            "better": None if before is None else verdict == BETTER,
            "leaves_weights": result.weights is not None,
        }
        self.rows.append(row)
        # the first weights are kept in any case
        if result.weights is not None and (not self.winner or verdict == BETTER):
            self.winner = name
            self.folder.best.parent.mkdir(exist_ok=True)
            needed = result.weights.stat().st_size
            # All or nothing: a killed search leaves the previous winner.
            with replacing(self.folder.best, needed=needed) as temporary:
                shutil.copyfile(result.weights, temporary)
        self.save()
        return result

    def save(self) -> None:
        """Write the results as JSON: seconds, shares and counts."""
        content = {
            "data": self.plan.dataset.name,
            "budget": self.budget,
            "seconds": round(self.used, 1),
            "candidates": self.rows,
            "stopped": self.stopped,
            "winner": self.winner or None,
            "test": self.test,
        }
        write_bytes(self.folder.search, json.dumps(content, indent=1).encode())

    def log_table(self) -> None:
        """Print the results as a table."""
        row = "{:<10}  {:<25}  {:>11}  {:>7}  {}"
        self.log(
            row.format("candidate", "validation top-1, 95 %", "trained", "seconds", "description")
        )
        for result in self.rows:
            top1 = _top1_with_interval(result["validation"])
            numbers = f"{result['trained']:,}", f"{result['seconds']:.0f}"
            self.log(row.format(result["name"], top1, *numbers, result["description"]))

    def evaluate_winner(self, *, test: bool) -> dict[str, Metrics]:
        """Evaluate the winner once on the test split, and store its metrics with its weights."""
        best, plan = load(self.folder.best), self.plan
        metrics: dict[str, Metrics] = dict(best.metadata["metrics"])
        if not test or "test" not in plan.dataset.splits:
            return metrics
        model = on_device(best.model, plan.device)
        outputs = self._predict(model, plan.dataset.splits["test"], best.preprocess)
        self.test, _ = evaluate_outputs(outputs, len(plan.dataset.classes), best.temperature)
        metrics["test"] = self.test
        self.log(
            f"test split, {self.test['images']:.0f} images, evaluated once, with {self.winner}: "
            f"top-1 {_top1_with_interval(self.test)}"
        )
        # `save` writes the metadata that it describes itself.
        metadata = {key: value for key, value in best.metadata.items() if key not in DESCRIBED}
        metadata |= {"classes": best.classes, "metrics": metrics}
        save(self.folder.best, best.model, preprocess=best.preprocess, **metadata)
        self.save()
        return metrics

    def _evaluate(self, description: str, done: TrainResult, trained: int | None = None) -> _Result:
        """Evaluate the best weights of a candidate's run on the validation images."""
        stored = load(done.best)
        if trained is None:
            trained = sum(parameter.numel() for parameter in stored.model.parameters())
        # preprocessed as the file says, so that `vitkit eval` gives the same score
        model = on_device(stored.model, self.plan.device)
        outputs = self._predict(model, self.val, stored.preprocess)
        correct = torch.cat([logits.argmax(1).cpu() == labels for logits, labels in outputs])
        return _Result(description, correct.numpy(), trained, done.best)

    @cached_property
    def _model(self) -> ViT:
        """The pretrained model."""
        plan = self.plan
        return make_model(plan.spec, plan.weights, plan.config, plan.device).eval()

    def _forward(self, images: Tensor) -> Tensor:
        """Return the features of images (B, E), or their pixels without weights."""
        if self.pretrained is None:
            return images.flatten(1)
        return self._model.pooled(self._model.forward_features(images))

    def _feature_seconds(self) -> float:
        """Time the features of a few images; return the seconds for all of them."""
        sample = self.train.subset(np.arange(min(len(self.train), TIMED_IMAGES)))
        plan, started = self.plan, 0.0
        for _ in range(2):  # the first pass warms up
            started = self.clock()
            list(self._predict(self._forward, sample, plan.preprocess))
            wait_for(plan.device)
        each = (self.clock() - started) / len(sample)
        return each * (len(self.train) + len(self.val))

    def _neighbours(self, folder: Path) -> _Result:
        """Evaluate k-NN on the features of pretrained weights, or on pixels if there are none."""
        train, labels = self._features("train")
        val, val_labels = self._features("val")
        votes = knn(train, labels, val, self.plan.spec.num_classes)
        description = "20 nearest by " + ("features" if self.pretrained else "pixels")
        return _Result(description, (votes.argmax(1) == val_labels).numpy())

    def _features(self, split: str) -> tuple[Tensor, Tensor]:
        """Return the features or the pixels of a split (N, E), and its labels (N,)."""
        data, preprocess = self.plan.dataset, self.plan.preprocess
        if self.pretrained is not None:
            return self._extract(self._model, data, split, preprocess)
        batches = self._predict(self._forward, data.splits[split], preprocess)
        pixels, labels = zip(*batches, strict=True)
        # A copy: what is computed in inference mode cannot be used outside of it.
        return torch.cat([part.cpu() for part in pixels]).clone(), torch.cat(labels)

    def _linear(self, folder: Path) -> _Result:
        """Fit a linear head, as `--probe linear` does."""
        spec = self.plan.spec
        layer = {"pretrained": self.pretrained, "probe": "linear", "output": str(folder)}
        # Both settings have no effect on a probe.
        done = train(self._config(layer, balance=False, compile=False))
        return self._evaluate("linear head on features", done, spec.num_classes * (spec.width + 1))

    @cached_property
    def _first(self) -> _Training:
        """The pretrained model by the recipe `finetune`, or else the smallest from scratch."""
        if self.pretrained is None:
            return self._timed(scratch_settings(self.sizes[0], self.statistics))
        settings = finetune() | self.statistics.augmentation(min(self.plan.spec.image_size))
        model = self.settings.get("model")
        return self._timed(settings | {"pretrained": self.pretrained, "model": model})

    def _finetune(self, folder: Path) -> _Result:
        """Train all pretrained weights."""
        # no more than the longer: the recipe's epochs, or AugReg's 500 steps
        most = max(FINETUNE_EPOCHS, math.ceil(STEPS / self._first.plan.steps.steps_per_epoch))
        return self._train(folder, "all weights", self._first, most)

    def _scratch(self, folder: Path) -> _Result:
        """Train the largest model from scratch that fits the time."""
        chosen = self._first
        for size in self.sizes[1:]:
            larger = self._timed(scratch_settings(size, self.statistics))
            if larger.epoch * size.epochs > SHARE * (self.budget - self.used):
                break
            chosen = larger
        return self._train(folder, "from random weights", chosen, MOST_EPOCHS)

    def _timed(self, settings: Settings) -> _Training:
        """Time a few steps of a model, and estimate an epoch; validation counts as training."""
        batch_size = limit_batch_size(len(self.train), settings["batch_size"])
        settings = settings | {"batch_size": batch_size, "last_batch": "fill"}
        plan = make_plan(self._config(settings, epochs=1))
        with torch.random.fork_rng():
            torch.manual_seed(plan.config.seed)
            model = make_model(plan.spec, plan.weights, plan.config, plan.device)
            plan = plan.with_settings(tune_settings(plan, model, lambda line: None))
            step = trial(plan, model)
            started = self.clock()
            batches = [plan.steps[n % plan.total_steps] for n in range(WARM_UP + TIMED)]
            loading = (self.clock() - started) / len(batches) / max(1, plan.workers)
            for number, batch in enumerate(batches):
                if number == WARM_UP:
                    started = self.clock()
                step(batch, number)
                wait_for(plan.device)
            training = (self.clock() - started) / TIMED
        steps = plan.steps.steps_per_epoch + len(self.val) / batch_size
        return _Training(settings, plan.without_weights(), (loading + training) * steps)

    def _train(self, folder: Path, description: str, timed: _Training, most: int) -> _Result:
        """Train for as many epochs as the time allows, at most so many."""
        now = self.clock()
        left = SHARE * (self.budget - (now - self.started))
        epochs = max(1, min(most, math.ceil(MARGIN * left / timed.epoch)))
        self.log(
            f"{folder.name}: about {timed.epoch:.2g} s an epoch; up to {plural(epochs, 'epoch')}, "
            "as many as fit into the time"
        )
        config = self._config(timed.settings, epochs=epochs, output=str(folder))
        # estimates may be wrong, and the budget is kept all the same
        done = train(config, deadline=Deadline(now + left, self.clock))
        spec = timed.plan.spec
        made = plural(round(load(done.last).metadata["epoch"]), "epoch")
        description += f", width {spec.width}, {plural(spec.depth, 'block')}, {made}"
        return self._evaluate(description, done)

    def _config(self, layer: Settings, **required: Any) -> TrainConfig:
        """Make the settings of a candidate: its own, over them the user's, then those required."""
        # Only the winner is evaluated on test, after the search; grids would take time.
        required |= {"test": False, "log_examples": False, "log_histograms": False}
        if "epochs" in required:
            required["warmup_epochs"] = limit_warmup(layer["warmup_epochs"], required["epochs"])
        return TrainConfig(**layered(layer, self.settings, required))


def _top1_with_interval(scores: Metrics) -> str:
    return f"{scores['top1']:.4f} ({scores['top1_low']:.4f} to {scores['top1_high']:.4f})"
