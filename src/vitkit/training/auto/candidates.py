"""The rungs of `--auto`: neighbours, a linear head, fine-tuning, and a model from noise."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from vitkit.data.sources.open import Split
from vitkit.devices import on_device
from vitkit.errors import plural
from vitkit.evaluation.evaluate import outputs
from vitkit.evaluation.features import ITERATIONS, features, knn
from vitkit.models.vit import ViT
from vitkit.training import train as session
from vitkit.training.auto.heuristics import SIZES, Looks, Size, batch_of, scratch_settings
from vitkit.training.auto.search import Clock, Outcome
from vitkit.training.config.train_config import Settings, TrainConfig, layered
from vitkit.training.initial_weights import make_model
from vitkit.training.optimization.precision import wait_for
from vitkit.training.recipes.transfer import finetune
from vitkit.training.setup import Plan, make_plan
from vitkit.training.trainer import Callback, Trainer
from vitkit.training.tuning.trials import trial, try_out
from vitkit.weights.formats.vitkit import save
from vitkit.weights.load import load

SHARE = 0.85
"""Part of the time left that a schedule is made for: machines are not always as fast as found."""
WARM_UP, TIMED = 1, 4
"""Steps before those that are timed, and those."""
FILES = 6
"""Times the weights that an epoch writes: best, last, and the state with two moments."""
FINETUNE_EPOCHS, FINETUNE_STEPS = 20, 500
"""Fine-tuning needs no more than the longer: the recipe's epochs, AugReg's 500 steps."""
SCRATCH_EPOCHS = 300
"""From noise, more passes than this gained little in the papers on small data."""


@dataclass
class SearchContext:
    """What all rungs stand on.

    Attributes:
        settings: that the user gave, but for those that the ladder decides.
        pretrained: the weights to start from, if any.
        plan: of one of them, for the data and the device.
        looks: of the training images.
        opening: seconds that making a plan took.
        say: told what is measured.
        clock: what time it is.
    """

    settings: Settings
    pretrained: str | None
    plan: Plan
    looks: Looks
    opening: float
    say: Callable[[str], None]
    clock: Clock

    @property
    def train(self) -> Split:
        """The training images."""
        return self.plan.dataset.splits["train"]

    @property
    def val(self) -> Split:
        """The validation images."""
        return self.plan.dataset.splits["val"]

    def config(self, *layers: Settings, **needed: object) -> TrainConfig:
        """The settings of a rung. The test split stays closed, and seconds are not for images.

        Args:
            *layers: of the rung, such as a recipe; what the user set wins over them.
            **needed: what the rung cannot do without, whatever the user set.
        """
        kept = {"test": False, "log_examples": False, "log_histograms": False}
        return TrainConfig(**layered(*layers, self.settings, kept | needed))

    def outcome(
        self, name: str, what: str, best: Path, started: float, trained: int | None = None
    ) -> Outcome:
        """What weights say of the validation images; all were trained, where nothing is said."""
        stored, plan = load(best), self.plan
        trained = trained or sum(p.numel() for p in stored.model.parameters())
        made = outputs(on_device(stored.model, plan.device), self.val, stored.preprocess,
                       device=plan.device, workers=plan.workers)  # fmt: skip
        right = torch.cat([(z.argmax(1).cpu() == labels) for z, labels in made]).numpy()
        return Outcome(name, what, trained, right, best, self.clock() - started)


def time_of(forward: Callable[[Tensor], Tensor], plan: Plan, clock: Clock) -> float:
    """Seconds an image, from its file to what a callable makes of it."""
    train = plan.dataset.splits["train"]
    some = train.subset(np.arange(min(len(train), 256)))
    made = outputs(forward, some, plan.preprocess, batch_size=64, device=plan.device)
    next(made)  # warms up
    started = clock()
    if not (rest := sum(len(labels) for _, labels in made)):
        rest = sum(len(labels) for _, labels in
                   outputs(forward, some, plan.preprocess, device=plan.device))  # fmt: skip
    wait_for(plan.device)
    return (clock() - started) / rest


@dataclass
class Neighbours:
    """The nearest neighbours by the features of pretrained weights, or by pixels without any."""

    ground: SearchContext
    name: str = "neighbours"
    leaves_weights: bool = False

    @cached_property
    def _model(self) -> ViT:
        plan = self.ground.plan
        return make_model(plan.spec, plan.weights, plan.config, plan.device).eval()

    def _forward(self, images: Tensor) -> Tensor:
        if self.ground.pretrained is not None:
            return self._model.pooled(self._model.forward_features(images))
        return images.flatten(1)

    def least(self) -> float:
        """For one look at every image."""
        ground = self.ground
        return (len(ground.train) + len(ground.val)) * time_of(
            self._forward, ground.plan, ground.clock
        )

    def run(self, folder: Path, seconds: float) -> Outcome:
        """Look. Nothing is left in the folder; features of weights are kept for the next rung."""
        ground, started = self.ground, self.ground.clock()
        (train, labels), (held, truth) = self._features("train"), self._features("val")
        votes = knn(train, labels, held, ground.plan.spec.num_classes)
        right = (votes.argmax(1) == truth).numpy()
        what = "20 nearest by " + ("features" if ground.pretrained else "pixels")
        return Outcome(self.name, what, 0, right, None, ground.clock() - started)

    def _features(self, split: str) -> tuple[Float[Tensor, "N E"], Int64[Tensor, "N"]]:
        ground, plan = self.ground, self.ground.plan
        if ground.pretrained is not None:
            return features(self._model, plan.dataset, split, plan.preprocess, device=plan.device,
                            workers=plan.workers, say=ground.say)  # fmt: skip
        made = [*outputs(self._forward, plan.dataset.splits[split], plan.preprocess,
                         device=plan.device, workers=plan.workers)]  # fmt: skip
        pixels = torch.cat([pixels.cpu() for pixels, _ in made]).clone()
        return pixels, torch.cat([labels for _, labels in made])


@dataclass
class LinearHead:
    """A linear head on the same features."""

    ground: SearchContext
    name: str = "linear"
    leaves_weights: bool = True

    def least(self) -> float:
        """For the fit with one penalty; the features are there already."""
        ground, spec = self.ground, self.ground.plan.spec
        inputs = torch.randn(len(ground.train), spec.width, device=ground.plan.device)
        weight = torch.zeros(spec.num_classes, spec.width, device=inputs.device).requires_grad_()
        targets = torch.zeros(len(inputs), dtype=torch.long, device=inputs.device)
        started = ground.clock()
        F.cross_entropy(F.linear(inputs, weight), targets).backward()
        wait_for(ground.plan.device)
        return ground.opening + (ground.clock() - started) * ITERATIONS

    def run(self, folder: Path, seconds: float) -> Outcome:
        """Fit it, as `--probe linear` does."""
        ground, started = self.ground, self.ground.clock()
        config = ground.config({"pretrained": ground.pretrained, "probe": "linear",
                                "output": str(folder)}, balance=False, compile=False)  # fmt: skip
        done = session.train(config)
        spec = ground.plan.spec
        trained = spec.num_classes * (spec.width + 1)
        return ground.outcome(self.name, "linear head on features", done.best, started, trained)


@dataclass(frozen=True)
class Throughput:
    """How fast a run is here.

    Attributes:
        epoch: seconds of an epoch, with its validation and what it writes.
        rest: seconds before the first and after the last.
        images_per_s: in its steps.
        arithmetic: the settings that were measured with.
    """

    epoch: float
    rest: float
    images_per_s: float
    arithmetic: Settings

    def epochs(self, seconds: float) -> int:
        """How many fit, with what a schedule must leave free."""
        return math.floor((seconds * SHARE - self.rest) / self.epoch)

    @property
    def least(self) -> float:
        """Seconds for one epoch, with the same."""
        return (self.epoch + self.rest) / SHARE


def measure_throughput(plan: Plan, ground: SearchContext) -> Throughput:
    """Time a few steps of a copy, with their loading, validation and writing."""
    clock, device = ground.clock, plan.device
    with torch.random.fork_rng():
        torch.manual_seed(plan.config.seed)
        model = make_model(plan.spec, plan.weights, plan.config, device)
        plan = plan.with_settings(try_out(plan, model, ground.say))
        step, loaded, taken = trial(plan, model), 0.0, 0.0
        for number in range(WARM_UP + TIMED):
            start = clock()
            batch = plan.steps[number % plan.total_steps]
            middle = clock()
            step(batch, number)
            wait_for(device)
            if number >= WARM_UP:
                loaded, taken = loaded + middle - start, taken + clock() - middle
    each = (taken + loaded / max(1, plan.workers)) / TIMED
    look = time_of(model.eval(), plan, clock)
    start = clock()
    with tempfile.TemporaryDirectory(prefix="vitkit-") as name:
        save(Path(name) / "model.safetensors", model, preprocess=plan.preprocess)
    written = FILES * (clock() - start)
    sizes = {name: len(split) for name, split in plan.dataset.splits.items()}
    epoch = plan.steps.steps_per_epoch * each + sizes["val"] * look + written
    rest = ground.opening + (3 * sizes["val"] + sizes.get("test", 0)) * look + written
    arithmetic = {name: getattr(plan.config, name) for name in ("amp", "attention_kernel")}
    return Throughput(epoch, rest, plan.config.batch_size / each, arithmetic)


@dataclass(frozen=True)
class Candidate:
    """One way to train in steps.

    Attributes:
        settings: all but the epochs.
        passes: over the images that must fit into the time, or a smaller one is taken.
    """

    settings: Settings
    passes: int = 0


@dataclass
class Steps:
    """Training in steps, for as many epochs as the time allows.

    Attributes:
        ground: what it stands on.
        name: of the rung.
        what: it is, in a word or two.
        candidates: from large to small; the first that fits is taken, and else the last.
        most: epochs that are worth it, by the steps of one.
    """

    ground: SearchContext
    name: str
    what: str
    candidates: Sequence[Candidate]
    most: Callable[[int], int]
    leaves_weights: bool = True
    _paces: dict[int, tuple[Plan, Throughput]] = field(default_factory=dict)

    def least(self) -> float:
        """For one epoch of the smallest."""
        return self._pace(len(self.candidates) - 1)[1].least

    def run(self, folder: Path, seconds: float) -> Outcome:
        """Train, and end in time."""
        ground, started = self.ground, self.ground.clock()
        number = self._fitting(seconds)
        settings, (plan, pace) = self.candidates[number].settings, self._pace(number)
        left = seconds - (ground.clock() - started)
        most = self.most(plan.steps.steps_per_epoch)
        epochs = max(1, min(most, pace.epochs(left)))
        why = "as many as pay" if epochs == most else "to fill the time"
        ground.say(
            f"{self.name}: {pace.images_per_s:,.0f} images/s, {pace.epoch:.2g} s an epoch; "
            f"{plural(epochs, 'epoch')}, {why}"
        )
        config = ground.config(settings, lasting(settings, epochs),
                               pace.arithmetic | {"output": str(folder)})  # fmt: skip
        deadline = ground.clock() + left
        done = session.train(config, [lambda: TimeLimit(deadline, ground.clock)])
        spec = plan.spec
        ran = round(load(done.last).metadata["epoch"])
        lasted = ("" if ran == epochs else f"{ran} of ") + plural(epochs, "epoch")
        what = f"{self.what}, width {spec.width}, {plural(spec.depth, 'block')}, {lasted}"
        return ground.outcome(self.name, what, done.best, started)

    def _fitting(self, seconds: float) -> int:
        """The place of the candidate that is taken."""
        deadline = self.ground.clock() + seconds
        for number, candidate in enumerate(self.candidates[:-1]):
            pace = self._pace(number)[1]
            if pace.epochs(deadline - self.ground.clock()) >= candidate.passes:
                return number
            spec = self._pace(number)[0].spec
            self.ground.say(
                f"{self.name}: width {spec.width} with {plural(spec.depth, 'block')} takes "
                f"{pace.epoch:.2g} s an epoch; {candidate.passes} passes over the images do "
                f"not fit"
            )
        return len(self.candidates) - 1

    def _pace(self, number: int) -> tuple[Plan, Throughput]:
        if number not in self._paces:
            settings = self.candidates[number].settings
            plan = make_plan(self.ground.config(settings, lasting(settings, 1)))
            self._paces[number] = plan, measure_throughput(plan, self.ground)
        return self._paces[number]


def lasting(settings: Settings, epochs: int) -> Settings:
    """Epochs, with no more than a tenth of them to warm up."""
    return {"epochs": epochs, "warmup_epochs": min(settings["warmup_epochs"], epochs / 10)}


class TimeLimit(Callback):
    """Ends a run after the epoch in which its time is over, where it was slower than estimated.

    Args:
        deadline: by the clock.
        clock: returns the time.
    """

    def __init__(self, deadline: float, clock: Clock) -> None:
        self._deadline, self._clock = deadline, clock

    def after_epoch(self, trainer: Trainer) -> None:
        """End the run where its time is over."""
        if self._clock() > self._deadline and trainer.progress.step < trainer.last_step:
            trainer.end(f"epoch {trainer.epoch}, as the time is over")


def finetuning(ground: SearchContext) -> Steps:
    """All weights from pretrained ones, by the recipe `finetune`."""
    recipe = finetune()
    side = min(ground.plan.spec.image_size)
    chosen = {"pretrained": ground.pretrained, "model": ground.settings.get("model"),
              "batch_size": batch_of(len(ground.train), recipe["batch_size"])}  # fmt: skip
    settings = recipe | ground.looks.augmentation(side) | chosen
    return Steps(ground, "finetune", "all weights", [Candidate(settings)],
                 lambda steps: max(FINETUNE_EPOCHS, math.ceil(FINETUNE_STEPS / steps)))  # fmt: skip


def from_scratch(ground: SearchContext) -> Steps:
    """A model from noise, of the largest size that suits the images and the time."""
    images = len(ground.train)

    def candidate(size: Size) -> Candidate:
        settings = scratch_settings(size, ground.looks)
        batch = {"batch_size": batch_of(images, settings["batch_size"])}
        return Candidate(settings | batch, size.passes)

    sizes = [candidate(size) for size in SIZES if size.images <= images]
    return Steps(ground, "scratch", "from noise", sizes, lambda steps: SCRATCH_EPOCHS)
