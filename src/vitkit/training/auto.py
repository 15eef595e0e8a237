"""`vitkit train DATA --auto`: candidates from cheap to expensive, while each one is better.

The candidates are k-NN on pretrained features, a linear head on them, and fine-tuning; without
weights, k-NN on pixels and a model from scratch. They are compared on validation, image by image,
by McNemar's exact test: without a significant difference the cheaper one wins. The test split is
read once, at the end, for the winner.

The training of a candidate ends by the deadline, and makes at least one epoch.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from vitkit import devices, distributed, process
from vitkit.errors import Interrupted, NonFiniteError, SettingError
from vitkit.evaluation import features, intervals, loop
from vitkit.evaluation.metrics import Metrics
from vitkit.io.atomic import write_bytes
from vitkit.messages import flag_name, plural
from vitkit.training import initial_weights, recipes
from vitkit.training.config import meaning, merging
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.monitoring.run_log import Display
from vitkit.training.plan import make_plan
from vitkit.training.recipes.defaults import MOST_EPOCHS, ImageStatistics
from vitkit.training.run import TrainResult
from vitkit.training.run_folder import RunFolder, check_output, locked, new_folder
from vitkit.training.train import train
from vitkit.weights.formats.vitkit import DESCRIBED, save
from vitkit.weights.load import load

BUDGET = "10m"
"""Default of the setting `budget`."""
UNITS = {"s": 1, "m": 60, "h": 3600}
SHARE = 0.9
"""Part of the time left that a training may use; the rest is for its evaluation."""
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
        UserError: wrong settings or data; nothing is written.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1 came; the results so far are kept.
        NonFiniteError: there is no winner, because training diverged.
    """
    # Refused before the data are read, which may take minutes.
    check_output(config)
    with process.raise_on_signal():
        search = _Search(config, clock)
        folder = search.folder = new_folder(replace(config, model="auto"), search.log)
        with locked(folder.root):
            try:
                search.run()
                metrics = search.evaluate_winner(test=config.test)
            finally:  # also of an interrupted search
                write_bytes(folder.log, "".join(f"{line}\n" for line in search.lines).encode())
    last = RunFolder(folder.root / search.winner).last
    return TrainResult(folder.root, folder.best, last, metrics, search.stopped)


def parse_budget(budget: str) -> float:
    """Convert `90s`, `10m` or `1.5h` to seconds. Raises `SettingError`.

    >>> parse_budget("1.5h")
    5400.0
    """
    try:
        seconds = float(budget[:-1]) * UNITS[budget[-1:]]
    except (ValueError, KeyError):
        seconds = 0.0
    if 0 < seconds < math.inf:
        return seconds
    raise SettingError(
        f"--budget {budget!r} is not a time; write a number above 0 with s, m or h, such as 90s, "
        "10m or 1h"
    )


def _shared_settings(config: TrainConfig) -> meaning.Settings:
    """Return the user's settings for all candidates; refuse those that the search decides."""
    # processes that measure times of their own would not decide alike
    if distributed.has_rank():
        raise SettingError("--auto runs in one process; start it without torchrun")
    given, defaults = config.to_json(), TrainConfig(data=config.data).to_json()
    changed = {name for name in given if given[name] != defaults[name]}
    decided = [
        name for name in meaning.fields_where(TrainConfig, with_auto="refused") if name in changed
    ]
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
    passed_on = meaning.fields_where(TrainConfig, with_auto="passed on")
    return {name: given[name] for name in passed_on if name in changed or name == "data"}


@dataclass(frozen=True)
class _Result:
    """A candidate's result; `correct` (N,) is True for each validation image that it got right."""

    description: str
    correct: Bool[np.ndarray, " N"]
    trained: int = 0
    weights: Path | None = None


class _Search:
    """The data and settings that all candidates share, the candidates, and their results."""

    folder: RunFolder

    def __init__(self, config: TrainConfig, clock: Callable[[], float]) -> None:
        self.clock, self.started = clock, clock()
        self.budget = parse_budget(BUDGET if config.budget is None else config.budget)
        self.settings = _shared_settings(config)
        self.pretrained: str | None = self.settings.pop("pretrained", None)
        self._display = Display(total=0, done=0, quiet=config.quiet)
        self.lines: list[str] = []
        # of no steps: the plan is for the data, the device and the weights
        start: meaning.Settings = {"pretrained": self.pretrained, "batch_size": 1, "epochs": 1}
        if self.pretrained is None:
            start |= {"spec": PIXEL_SPEC, "fit": "squash"}
        self.plan = make_plan(TrainConfig(**self.settings | start))
        for line in self.plan.notes:  # not what was chosen: the candidates choose for themselves
            self.log(line)
        if "val" not in self.plan.dataset.splits:
            raise SettingError(
                "--auto chooses by the validation split, and the data have none; raise "
                "--val-fraction above 0"
            )
        self.statistics = ImageStatistics.of(self.plan.dataset.splits["train"])
        self._predict = partial(
            loop.predict_batches, device=self.plan.device, workers=self.plan.workers
        )
        self.rows: list[dict[str, Any]] = []
        self.winner, self.stopped = "", ""
        self.test: Metrics = {}

    def log(self, line: str) -> None:
        """Print a line, and keep it for the log of the search."""
        self.lines.append(line)
        self._display.print(line)

    @property
    def used(self) -> float:
        """The time since the start of the search, in seconds."""
        return self.clock() - self.started

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
            self.stopped = error.name
            raise
        finally:  # with the reason of the end
            self.save()
        self.log(f"finished: {self.stopped}")

    def _try_finetuning(self, linear: _Result) -> str:
        """Fine-tune if a gain can be shown and the time allows; return why not, or why in vain."""
        errors, images = int((~linear.correct).sum()), len(linear.correct)
        if intervals.mcnemar(0, errors) >= intervals.SIGNIFICANCE_LEVEL:
            return (
                f"finetune cannot be significantly better: linear is wrong on only {errors} of "
                f"{images} validation images, too few to show a gain; use more validation images"
            )
        if self.used >= self.budget:
            return "the budget was used up before finetune"
        try:
            self._run("finetune", self._finetune, linear)
        except NonFiniteError as error:
            return f"finetune diverged: {error}"
        if self.winner == "finetune":
            return ""
        return "finetune is not significantly better"

    def _run(
        self, name: str, candidate: Callable[[Path], _Result], before: _Result | None = None
    ) -> _Result:
        """Run a candidate; log its result, and keep its weights if it is better than before."""
        started = self.clock()
        result = candidate(self.folder.root / name)
        right, images = int(result.correct.sum()), len(result.correct)
        low, high = intervals.wilson_interval(right, images)
        row: dict[str, Any] = {
            "name": name,
            "description": result.description,
            "trained": result.trained,
            "seconds": round(self.clock() - started, 1),
            "validation": {
                "top1": right / images,
                "top1_low": low,
                "top1_high": high,
                "images": images,
            },
        }
        line = (
            f"{name} ({result.description}, {result.trained:,} parameters trained, "
            f"{row['seconds']:.0f} s): validation top-1 {_top1_with_interval(row['validation'])}"
        )
        is_better = True
        if before is not None:
            more, fewer = result.correct & ~before.correct, before.correct & ~result.correct
            p, other = intervals.mcnemar(int(more.sum()), int(fewer.sum())), self.rows[-1]["name"]
            is_better = p < intervals.SIGNIFICANCE_LEVEL and bool(more.sum() > fewer.sum())
            row |= {"compared_with": other, "p": p, "better": is_better}
            verdict = "better than" if is_better else "worse than"
            if p >= intervals.SIGNIFICANCE_LEVEL:
                verdict = "no significant difference to"
            line += f"; {verdict} {other} (McNemar, p = {p:.2g})"
        self.log(line)
        self.rows.append(row)
        # the first weights are kept in any case
        if result.weights is not None and (is_better or not self.winner):
            self.winner = name
            self.folder.best.parent.mkdir(exist_ok=True)
            write_bytes(self.folder.best, result.weights.read_bytes())
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

    def evaluate_winner(self, *, test: bool) -> dict[str, Metrics]:
        """Evaluate the winner once on the test split, and store its metrics with its weights."""
        best, plan = load(self.folder.best), self.plan
        metrics: dict[str, Metrics] = dict(best.metadata["metrics"])
        if not test or "test" not in plan.dataset.splits:
            return metrics
        model = devices.on_device(best.model, plan.device)
        outputs = self._predict(model, plan.dataset.splits["test"], best.preprocess)
        self.test, _ = loop.evaluate_outputs(outputs, len(plan.dataset.classes), best.temperature)
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
        trained = trained or sum(parameter.numel() for parameter in stored.model.parameters())
        # preprocessed as the file says, so that `vitkit eval` gives the same score
        model = devices.on_device(stored.model, self.plan.device)
        outputs = self._predict(model, self.plan.dataset.splits["val"], stored.preprocess)
        correct = torch.cat([logits.argmax(1).cpu() == labels for logits, labels in outputs])
        return _Result(description, correct.numpy(), trained, done.best)

    def _neighbours(self, folder: Path) -> _Result:
        """Evaluate k-NN on the features of pretrained weights, or on pixels if there are none."""
        train, labels = self._features("train")
        val, val_labels = self._features("val")
        votes = features.knn(train, labels, val, self.plan.spec.num_classes)
        description = "20 nearest by " + ("features" if self.pretrained else "pixels")
        return _Result(description, (votes.argmax(1) == val_labels).numpy())

    def _features(self, split: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features or the pixels of a split (N, E), and its labels (N,)."""
        plan = self.plan
        if self.pretrained is not None:
            model = initial_weights.make_model(
                plan.spec, plan.weights, plan.config, plan.device
            ).eval()
            return features.extract_features(
                model, plan.dataset, split, plan.preprocess, device=plan.device,
                workers=plan.workers, log=self.log,
            )  # fmt: skip
        batches = self._predict(lambda x: x.flatten(1), plan.dataset.splits[split], plan.preprocess)
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

    def _finetune(self, folder: Path) -> _Result:
        """Train all pretrained weights by the recipe `finetune`, for as many epochs as usual."""
        settings = recipes.recipe("finetune") | self.statistics.augmentation(
            min(self.plan.spec.image_size)
        )
        for name in ("epochs", "batch_size", "warmup_epochs"):  # they follow from the data
            del settings[name]
        return self._train(folder, "all weights", settings | {"pretrained": self.pretrained})

    def _scratch(self, folder: Path) -> _Result:
        """Train the model that `vitkit train` chooses for the images."""
        return self._train(folder, "from random weights", {"epochs": MOST_EPOCHS})

    def _train(self, folder: Path, description: str, settings: meaning.Settings) -> _Result:
        """Train for as many epochs as the time allows."""
        ends = self.clock() + SHARE * (self.budget - self.used)
        config = self._config(settings, output=str(folder))
        done = train(config, time_left=lambda: ends - self.clock())
        last = load(done.last)
        spec, epochs = last.model.spec, plural(round(last.metadata["epoch"]), "epoch")
        description += f", width {spec.width}, {plural(spec.depth, 'block')}, {epochs}"
        return self._evaluate(description, done)

    def _config(self, layer: meaning.Settings, **required: Any) -> TrainConfig:
        """Make the settings of a candidate: its own, over them the user's, then those required."""
        # Only the winner is evaluated on test, after the search; grids would take time.
        required |= {"test": False, "log_examples": False, "log_histograms": False}
        return TrainConfig(**merging.layered(layer, self.settings, required))


def _top1_with_interval(scores: Metrics) -> str:
    return f"{scores['top1']:.4f} ({scores['top1_low']:.4f} to {scores['top1_high']:.4f})"
