"""The receipt of a recipe: what it scored, where, and how its curve went; is a run keeping up?

A receipt is a file of `reference_results/`, written by `benchmarks/recipes.py` from runs with
several seeds. A recipe of a paper, which was not run here, has none; its docstring quotes the
paper's score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from vitkit.evaluation.metrics import Metrics
from vitkit.training.config.train_config import Settings, TrainConfig
from vitkit.training.recipes import underlying

SLACK = 0.01
"""Top-1 by which a run may be below the worst seed before it counts as behind, at least."""
CHANCE = 2.0
"""So many standard deviations of a difference of two shares of the validation images may be."""
EARLY = 0.1
"""Part of a run in which curves say little."""
WITHOUT_WEIGHT = frozenset({
    "data", "recipe", "data_root", "cache", "output", "overwrite", "resume", "seed", "device",
    "devices", "parallel", "timeout", "threads", "workers", "log_interval", "log_histograms",
    "log_examples", "logger", "quiet", "save_every", "save_augmented_grid", "grad_checkpointing",
    "test", "attention_kernel",
})  # fmt: skip
"""Settings that do not change where a curve goes, beyond a seed's spread."""
NAMED = 3
OWN = "the model's own"
"""What a field of the spec is where no setting names it."""


@dataclass(frozen=True)
class Receipt:
    """What a recipe did.

    Attributes:
        recipe: its name.
        command: what was run.
        hardware: on what.
        date: when, as 2026-11-21.
        seconds: of a run, the lowest and the highest over the seeds.
        images: of the training split.
        test: top-1 of each seed on the test split, read once.
        curve: validation top-1 after each epoch, the lowest and the highest over the seeds.
        settings: all that was set.
    """

    recipe: str
    command: str
    hardware: str
    date: str
    seconds: tuple[float, float]
    images: int
    test: tuple[float, ...]
    curve: tuple[tuple[float, float], ...]
    settings: Settings

    def expected(self, share: float) -> float:
        """What any seed's best epoch had reached after a share of the epochs, in (0, 1]."""
        epoch = max(1, round(share * len(self.curve)))
        return max(low for low, _ in self.curve[:epoch])

    def says(self) -> str:
        """What to expect, in a line."""
        mean = sum(self.test) / len(self.test)
        low, high = (f"{seconds:,.0f}" for seconds in self.seconds)
        return (
            f"receipt of {self.recipe}: test top-1 {mean:.4f} ({min(self.test):.4f} to "
            f"{max(self.test):.4f} over {len(self.test)} seeds) in {low} to {high} s on "
            f"{self.hardware}"
        )


def receipt_of(recipe: str | None) -> Receipt | None:
    """The receipt of a recipe by name or YAML file; `None` where there is none."""
    recipe = underlying(recipe)
    file = files("vitkit.training.recipes") / "reference_results" / f"{recipe}.json"
    if recipe is None or "/" in recipe or not file.is_file():
        return None
    stored = json.loads(file.read_text(encoding="utf-8"))
    for name in ("seconds", "test"):
        stored[name] = tuple(stored[name])
    stored["curve"] = tuple((low, high) for low, high in stored["curve"])
    return Receipt(**stored)


class ReferenceMonitor:
    """Compares a run's best epoch with its receipt's, and speaks when it is behind or catches up.

    A single epoch may be a bad one, so the best ones so far are compared, and by more than what
    chance makes of so many validation images.

    Args:
        receipt: of the run's recipe.
        settings: of the run, all of them.
        images: of its training split.
    """

    def __init__(self, receipt: Receipt, settings: Mapping[str, Any], images: int) -> None:
        self.receipt, self._settings, self._images = receipt, settings, images
        self.is_behind = False

    def after_epoch(self, epoch: int, validation: Metrics, best: float, skipped: int) -> str | None:
        """A line where something has changed.

        Args:
            epoch: counted from 1.
            validation: the run's metrics.
            best: the highest validation top-1 so far.
            skipped: steps that were left out so far.
        """
        share = epoch / self._settings["epochs"]
        if "top1" not in validation or share < EARLY:
            return None
        expected = self.receipt.expected(min(share, 1.0))
        deviation = math.sqrt(2 * expected * (1 - expected) / validation["images"])
        slack = max(SLACK, CHANCE * deviation)
        was, self.is_behind = self.is_behind, best < expected - slack
        if self.is_behind and not was:
            return (
                f"behind the receipt of {self.receipt.recipe}: best validation top-1 {best:.4f} by "
                f"epoch {epoch}, there at least {expected:.4f}; {self._cause(skipped)}"
            )
        if was and not self.is_behind:
            return f"caught up with the receipt of {self.receipt.recipe} after epoch {epoch}"
        return None

    def _cause(self, skipped: int) -> str:
        """The likeliest reasons: numbers that were not finite, less data, other settings."""
        if skipped:
            return f"{skipped} steps were skipped; try a lower --lr"
        reasons = []
        data, trained_on = self._settings["data"], self.receipt.command.split()[2]
        if data != trained_on:
            reasons.append(f"data {data} instead of {trained_on}")
        if self._images < self.receipt.images:
            reasons.append(f"{self._images:,} training images instead of {self.receipt.images:,}")
        usual = TrainConfig(data=trained_on).to_json()  # for settings younger than the receipt
        here, there = _flat(self._settings), _flat(usual | dict(self.receipt.settings))
        reasons += [
            f"{name} {here.get(name, OWN)} instead of {there.get(name, OWN)}"
            for name in dict.fromkeys((*here, *there))
            if name not in WITHOUT_WEIGHT and here.get(name, OWN) != there.get(name, OWN)
        ]
        if not reasons:
            return "the settings are the same, so look at the labels: vitkit check DATA"
        more = len(reasons) - NAMED
        return "likely: " + ", ".join(reasons[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, each field of the spec one of them."""
    spec = {f"spec.{name}": value for name, value in settings.get("spec", {}).items()}
    return spec | {name: value for name, value in settings.items() if name != "spec"}
