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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
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
from vitkit.training.callbacks import Deadline
from vitkit.training.config.data_settings import CATALOGUE
from vitkit.training.config.meaning import Settings, fields_where
from vitkit.training.config.merging import layered
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.interrupts import raise_on_signal
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

    Returns:
        The folder, the winner's weights there, its last weights in its own run, its metrics on
        validation and test, and why the search ended.

    Raises:
        UserError: wrong settings or data, or a budget too small for one epoch; nothing is written.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1 came; the results so far are kept.
        NonFiniteError: there is no winner, because training diverged.
    """
    # Refused before the data are read, which may take minutes.
    check_output(config)
    with raise_on_signal():
        search = _Search(config, clock)
        candidates = search.candidates()
        # Before the folder: nothing is written for a budget that is too small.
        search.check_budget(candidates)
        folder = search.folder = new_folder(replace(config, model="auto"), search.log)
        with locked(folder.root):
            try:
                winner = search.run(candidates)
                metrics = search.evaluate_winner(winner, test=config.test)
            finally:  # the table of an interrupted search is written, too
                search.log_table()
                write_bytes(folder.log, "".join(f"{line}\n" for line in search.lines).encode())
    last = RunFolder(folder.root / winner.name).last
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
    if config.recipe is not None:
        raise SettingError(
            f"--auto chooses the settings that a recipe has; leave out --recipe {config.recipe}, "
            "or train without --auto"
        )
    given = config.to_json()
    defaults = TrainConfig(data=config.data).to_json()
    changed = {name for name in given if given[name] != defaults[name]}
    decided = [name for name in fields_where(TrainConfig, with_auto="refused") if name in changed]
    # With weights, `model` selects published ones; from scratch, the search chooses the size.
    if config.model is not None and config.pretrained is None:
        decided.append("model")
    if decided:
        flags = ", ".join(map(flag_name, decided))
        pronoun = "it" if len(decided) == 1 else "them"
        raise SettingError(
            f"--auto chooses {flags} itself; leave {pronoun} out, or train without --auto"
        )
    # processes that measure times of their own would not decide alike
    if has_rank():
        raise SettingError("--auto runs in one process; start it without torchrun")
    passed_on = fields_where(TrainConfig, with_auto="passed on")
    return {name: given[name] for name in passed_on if name in changed or name == "data"}


@dataclass(frozen=True)
class _Result:
    """A candidate's result; `correct` (N,) is True for each validation image that it got right."""

    name: str
    description: str
    trained: int
    correct: Bool[np.ndarray, " N"]
    seconds: float
    weights: Path | None = None

    @property
    def errors(self) -> int:
        return int((~self.correct).sum())

    def scores(self) -> Metrics:
        """Return the validation top-1 with its 95 % interval, and the number of images."""
        low, high = wilson_interval(int(self.correct.sum()), len(self.correct))
        top1 = float(self.correct.mean())
        return {"top1": top1, "top1_low": low, "top1_high": high, "images": len(self.correct)}

    def p_value(self, other: _Result) -> float:
        """Return the p-value of McNemar's exact test; only images on which they differ count."""
        only_self = int((self.correct & ~other.correct).sum())
        only_other = int((other.correct & ~self.correct).sum())
        return mcnemar(only_self, only_other)

    def is_better_than(self, other: _Result) -> bool:
        """Return whether this result has significantly fewer errors."""
        return self.errors < other.errors and self.p_value(other) < SIGNIFICANCE_LEVEL


class _Candidate(NamedTuple):
    """A way to a classifier: the estimated seconds of its shortest run, and the run itself."""

    name: str
    seconds: Callable[[], float]
    run: Callable[[Path], _Result]


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
        self.statistics = ImageStatistics.of(self.train)
        self.log(self.statistics.describe())
        self._predict = partial(predict_batches, device=self.plan.device, workers=self.plan.workers)
        self.baseline: _Result | None = None
        self.best: _Result | None = None
        self.rows: list[dict[str, Any]] = []
        self.stopped = ""
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

    def candidates(self) -> list[_Candidate]:
        """Return the candidates from cheap to expensive; the first is a baseline."""
        neighbours = _Candidate("neighbours", self._feature_seconds, self._neighbours)
        if self.pretrained is None:
            return [neighbours, self._scratch()]
        # the head learns from the features of the neighbours, which are cached
        linear = _Candidate("linear", lambda: 0.0, self._linear)
        return [neighbours, linear, self._finetune()]

    @property
    def used(self) -> float:
        """The time since the start of the search, in seconds."""
        return self.clock() - self.started

    def check_budget(self, candidates: Sequence[_Candidate]) -> None:
        """Refuse a budget that is too small for the first candidate with weights."""
        needed = sum(candidate.seconds() for candidate in candidates[:2])
        needed += self.used
        if needed > self.budget:
            raise SettingError(
                f"--budget {self.given} is too short for {candidates[1].name} on this machine; "
                f"pass --budget {math.ceil(MARGIN * needed)}s or more"
            )

    def run(self, candidates: Sequence[_Candidate]) -> _Result:
        """Run one candidate after another, until one is not better; return the winner."""
        try:
            for candidate in candidates:
                self.stopped = self._try(candidate)
                if self.stopped:
                    break
        except Interrupted as error:
            self.stopped = error.name
            self.save()  # with the reason of the end
            message = str(error)
            if self.best is not None:
                message += f"; the best so far, {self.best.name}, is kept in {self.folder.best}"
            raise Interrupted(error.signum, message) from None
        self.stopped = self.stopped or "nothing further to try"
        self.save()
        self.log(f"finished: {self.stopped}")
        assert self.best is not None, "the first candidate with weights always runs"
        return self.best

    def _try(self, candidate: _Candidate) -> str:
        """Run a candidate; return the reason if the search ends here, else an empty string."""
        best = self.best  # None before the first candidate with weights, which always runs
        if best is not None:
            if mcnemar(0, best.errors) >= SIGNIFICANCE_LEVEL:
                return (
                    f"{candidate.name} cannot be significantly better: {best.name} is wrong on "
                    f"only {best.errors} of {len(best.correct)} validation images, too few to "
                    "show a gain; use more validation images"
                )
            needed = candidate.seconds()
            left = max(0.0, self.budget - self.used)
            if needed > left:
                return f"{candidate.name} needs at least {needed:.0f} s, and {left:.0f} s are left"
        try:
            result = candidate.run(self.folder.root / candidate.name)
        except NonFiniteError as error:
            if best is None:  # there is nothing to fall back to
                raise
            return f"{candidate.name} diverged: {error}"
        self._add(result)
        if best is not None and not result.is_better_than(best):
            return f"{candidate.name} is not significantly better"
        return ""

    def _add(self, result: _Result) -> None:
        """Compare a result with the best one so far, and keep it: in a row, the log, the folder."""
        other, scores = self.best or self.baseline, result.scores()
        better = other is None or result.is_better_than(other)
        line = f"{result.name}: validation top-1 {_top1_with_interval(scores)}"
        compared: dict[str, Any] = {"compared_with": None, "p": None, "better": None}
        if other is not None:
            compared = {"compared_with": other.name, "p": result.p_value(other), "better": better}
            verdict = "better than" if better else "no significant difference to"
            if other.is_better_than(result):
                verdict = "worse than"
            line += f"; {verdict} {other.name} (McNemar, p = {compared['p']:.2g})"
        self.log(line)
        row = {
            "name": result.name,
            "description": result.description,
            "trained": result.trained,
            "seconds": round(result.seconds, 1),
            "validation": scores,
        }
        self.rows.append(row | compared | {"leaves_weights": result.weights is not None})
        if result.weights is None:
            self.baseline = result
        elif self.best is None or better:
            self.best = result
            self.folder.best.parent.mkdir(exist_ok=True)
            needed = result.weights.stat().st_size
            # All or nothing: a killed search leaves the previous winner.
            with replacing(self.folder.best, needed=needed) as temporary:
                shutil.copyfile(result.weights, temporary)
        self.save()

    def save(self) -> None:
        """Write the results as JSON: seconds, shares and counts."""
        content = {
            "data": self.plan.dataset.name,
            "budget": self.budget,
            "seconds": round(self.used, 1),
            "candidates": self.rows,
            "stopped": self.stopped,
            "winner": self.best.name if self.best else None,
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

    def evaluate_winner(self, winner: _Result, *, test: bool) -> dict[str, Metrics]:
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
            f"test split, {self.test['images']:.0f} images, evaluated once, with {winner.name}: "
            f"top-1 {_top1_with_interval(self.test)}"
        )
        # `save` writes the metadata that it describes itself.
        metadata = {key: value for key, value in best.metadata.items() if key not in DESCRIBED}
        metadata |= {"classes": best.classes, "metrics": metrics}
        save(self.folder.best, best.model, preprocess=best.preprocess, **metadata)
        self.save()
        return metrics

    def _evaluate(
        self, name: str, description: str, weights: Path, started: float, trained: int | None = None
    ) -> _Result:
        """Evaluate a file of weights on the validation images."""
        stored = load(weights)
        if trained is None:
            trained = sum(parameter.numel() for parameter in stored.model.parameters())
        # preprocessed as the file says, so that `vitkit eval` gives the same score
        model = on_device(stored.model, self.plan.device)
        outputs = self._predict(model, self.val, stored.preprocess)
        correct = torch.cat([logits.argmax(1).cpu() == labels for logits, labels in outputs])
        seconds = self.clock() - started
        return _Result(name, description, trained, correct.numpy(), seconds, weights)

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
        started, num_classes = self.clock(), self.plan.spec.num_classes
        train, labels = self._features("train")
        val, val_labels = self._features("val")
        correct = knn(train, labels, val, num_classes).argmax(1) == val_labels
        description = "20 nearest by " + ("features" if self.pretrained else "pixels")
        seconds = self.clock() - started
        return _Result(folder.name, description, 0, correct.numpy(), seconds)

    def _features(self, split: str) -> tuple[Tensor, Tensor]:
        """Return the features or the pixels of a split (N, E), and its labels (N,)."""
        plan = self.plan
        if self.pretrained is not None:
            return extract_features(
                self._model,
                plan.dataset,
                split,
                plan.preprocess,
                device=plan.device,
                workers=plan.workers,
                log=self.log,
            )
        batches = self._predict(self._forward, plan.dataset.splits[split], plan.preprocess)
        pixels, labels = zip(*batches, strict=True)
        # A copy: what is computed in inference mode cannot be used outside of it.
        return torch.cat([part.cpu() for part in pixels]).clone(), torch.cat(labels)

    def _linear(self, folder: Path) -> _Result:
        """Fit a linear head, as `--probe linear` does."""
        started, spec = self.clock(), self.plan.spec
        layer = {"pretrained": self.pretrained, "probe": "linear", "output": str(folder)}
        # Both settings have no effect on a probe.
        result = train(self._config(layer, balance=False, compile=False))
        trained = spec.num_classes * (spec.width + 1)
        description = "linear head on features"
        return self._evaluate(folder.name, description, result.best, started, trained)

    def _finetune(self) -> _Candidate:
        """Make the candidate that trains all pretrained weights, by the recipe `finetune`."""
        settings = finetune() | self.statistics.augmentation(min(self.plan.spec.image_size))
        settings |= {"pretrained": self.pretrained, "model": self.settings.get("model")}
        timed = cache(lambda: self._timed(settings))

        def run(folder: Path) -> _Result:
            # no more than the longer: the recipe's epochs, or AugReg's 500 steps
            most = max(FINETUNE_EPOCHS, math.ceil(STEPS / timed().plan.steps.steps_per_epoch))
            return self._train(folder, "all weights", timed(), most)

        return _Candidate("finetune", lambda: timed().epoch, run)

    def _scratch(self) -> _Candidate:
        """Make the candidate that trains the largest model from scratch that fits the time."""
        # a large model would overfit few images
        sizes = [size for size in reversed(SIZES) if size.images <= len(self.train)]
        smallest = cache(lambda: self._timed(scratch_settings(sizes[0], self.statistics)))

        def run(folder: Path) -> _Result:
            chosen = smallest()
            for size in sizes[1:]:
                larger = self._timed(scratch_settings(size, self.statistics))
                if larger.epoch * size.epochs > SHARE * (self.budget - self.used):
                    break
                chosen = larger
            return self._train(folder, "from random weights", chosen, MOST_EPOCHS)

        return _Candidate("scratch", lambda: smallest().epoch, run)

    def _timed(self, settings: Settings) -> _Training:
        """Time a few steps of a model, and estimate an epoch; validation counts as training."""
        batch_size = limit_batch_size(len(self.train), settings["batch_size"])
        settings = settings | {"batch_size": batch_size, "last_batch": "fill"}
        plan = make_plan(self._config(settings, **_with_epochs(settings, 1)))
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
        started = self.clock()
        left = SHARE * (self.budget - self.used)
        epochs = max(1, min(most, math.ceil(MARGIN * left / timed.epoch)))
        self.log(
            f"{folder.name}: about {timed.epoch:.2g} s an epoch; up to {plural(epochs, 'epoch')}, "
            "as many as fit into the time"
        )
        required = _with_epochs(timed.settings, epochs) | {"output": str(folder)}
        # estimates may be wrong, and the budget is kept all the same
        deadline = Deadline(started + left, self.clock)
        result = train(self._config(timed.settings, **required), deadline=deadline)
        spec = timed.plan.spec
        made = plural(round(load(result.last).metadata["epoch"]), "epoch")
        description += f", width {spec.width}, {plural(spec.depth, 'block')}, {made}"
        return self._evaluate(folder.name, description, result.best, started)

    def _config(self, layer: Settings, **required: object) -> TrainConfig:
        """Make the settings of a candidate: its own, over them the user's, then those required."""
        # Only the winner is evaluated on test, after the search; grids would take time.
        required |= {"test": False, "log_examples": False, "log_histograms": False}
        return TrainConfig(**layered(layer, self.settings, required))


def _with_epochs(settings: Settings, epochs: int) -> Settings:
    """Return the epochs and a warm-up of at most a tenth of them."""
    return {"epochs": epochs, "warmup_epochs": limit_warmup(settings["warmup_epochs"], epochs)}


def _top1_with_interval(scores: Metrics) -> str:
    return f"{scores['top1']:.4f} ({scores['top1_low']:.4f} to {scores['top1_high']:.4f})"
