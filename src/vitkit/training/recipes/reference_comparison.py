"""Reference results of recipes, and the comparison of a run with them.

A reference result is a file of `reference_results/`, written by `benchmarks/recipes.py` from runs
with several seeds: scores, times, the range of the validation curves, all settings. A recipe of a
paper, which was not run here, has none; its docstring quotes the paper's score.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from vitkit.evaluation.metrics import Metrics
from vitkit.training.config.field_types import Settings
from vitkit.training.config.meaning import fields_where
from vitkit.training.config.merging import MODEL_DEFAULT, with_flat_spec
from vitkit.training.config.run_config import USUAL
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.recipes import base_recipe

SLACK = 0.01
"""Top-1 by which a run may at least be below the worst seed before it counts as behind."""
CHANCE = 2.0
"""Standard deviations that two top-1 scores on the same number of images may differ by chance."""
EARLY = 0.1
"""Share of a run in which the validation curve is too noisy to compare."""
MOST_REASONS = 3
"""Reasons that are written out; more are counted."""


@dataclass(frozen=True)
class ReferenceResult:
    """Results of a recipe's reference runs, one for each seed.

    Attributes:
        recipe: its name.
        command: the command that was run.
        hardware: the machine, in words.
        date: of the runs, as 2026-11-21.
        seconds: duration of a run, the lowest and the highest over the seeds.
        images: number of training images.
        test: top-1 of each seed on the test split, read once.
        curve: validation top-1 after each epoch, the lowest and the highest over the seeds.
        settings: all settings of the runs.
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

    @property
    def data(self) -> str:
        """The data that the runs were trained on, by name."""
        return self.command.split()[2]  # vitkit train DATA ...

    def expected(self, share: float) -> float:
        """Return the best top-1 that every seed had reached by then.

        Args:
            share: part of the epochs that is done, in (0, 1].
        """
        epoch = max(1, round(share * len(self.curve)))
        # the curve of a seed may fall again
        return max(low for low, _ in self.curve[:epoch])

    def summary(self) -> str:
        """Return the expected test score and duration, in one line."""
        mean = sum(self.test) / len(self.test)
        low, high = self.seconds
        return (
            f"reference runs of {self.recipe}: test top-1 {mean:.4f} ({min(self.test):.4f} to "
            f"{max(self.test):.4f} over {len(self.test)} seeds) in {low:,.0f} to {high:,.0f} s on "
            f"{self.hardware}"
        )


def comparable_result(
    recipe: str | None, data: str, images: int | None = None
) -> ReferenceResult | None:
    """Return the result of a recipe if it was measured on these data, else `None`.

    Args:
        recipe: its name, or the path of a YAML file that names it.
        data: the setting `data` of the run.
        images: number of training images, which must be the same; default any number.

    Raises:
        SettingError: a file that is not valid YAML.
    """
    result = reference_result(recipe)
    # scores on other data are higher or lower whatever the settings
    if result is None or result.data != data:
        return None
    return result if images in (None, result.images) else None


def reference_result(recipe: str | None) -> ReferenceResult | None:
    """Return the result of a recipe by name or YAML file, or `None` if it has none."""
    recipe = base_recipe(recipe)
    # a name with a slash would lead out of the folder
    if recipe is None or "/" in recipe:
        return None
    file = files("vitkit.training.recipes") / "reference_results" / f"{recipe}.json"
    if not file.is_file():
        return None
    stored = json.loads(file.read_text(encoding="utf-8"))
    for name in ("seconds", "test"):
        stored[name] = tuple(stored[name])
    stored["curve"] = tuple((low, high) for low, high in stored["curve"])
    return ReferenceResult(**stored)


class ReferenceMonitor:
    """A comparison of a run's best epoch with the reference runs, made after every epoch.

    The best epochs so far are compared, since a single one may be a bad one, and the margin grows
    as the number of validation images falls.

    Args:
        reference: result of the run's recipe.
        settings: all settings of the run.
        images: number of its training images.

    Attributes:
        is_behind: true if the run was behind after the last epoch.
    """

    def __init__(
        self, reference: ReferenceResult, settings: Mapping[str, Any], images: int
    ) -> None:
        self.reference = reference
        self._settings = settings
        self._images = images
        self.is_behind = False

    def after_epoch(self, epoch: int, validation: Metrics, best: float, skipped: int) -> str | None:
        """Return a line where the run falls behind or catches up, else `None`.

        Args:
            epoch: counted from 1.
            validation: the run's metrics.
            best: the highest validation top-1 so far.
            skipped: steps that were left out so far.
        """
        share = epoch / self._settings["epochs"]
        if "top1" not in validation or share < EARLY:
            return None
        expected = self.reference.expected(min(share, 1.0))
        # of the difference of two shares, each of this many images
        deviation = math.sqrt(2 * expected * (1 - expected) / validation["images"])
        slack = max(SLACK, CHANCE * deviation)
        recipe = self.reference.recipe
        # report changes, not every epoch that is behind
        was_behind = self.is_behind
        self.is_behind = best < expected - slack
        if self.is_behind and not was_behind:
            return (
                f"behind the reference runs of {recipe}: best validation top-1 {best:.4f} by "
                f"epoch {epoch}, where they have at least {expected:.4f}; {self._cause(skipped)}"
            )
        if was_behind and not self.is_behind:
            return f"level with the reference runs of {recipe} again after epoch {epoch}"
        return None

    def _cause(self, skipped: int) -> str:
        """Return the likeliest reasons: skipped steps, less data, other settings."""
        if skipped:
            return f"{skipped} steps were skipped; try a lower --lr"
        reasons = []
        if self._images < self.reference.images:
            reasons.append(f"{self._images:,} training images instead of {self.reference.images:,}")
        reasons += self._other_settings()
        if not reasons:
            return "the settings are the same, so check the labels: vitkit check DATA"
        likely = "likely: " + ", ".join(reasons[:MOST_REASONS])
        if len(reasons) > MOST_REASONS:
            likely += f" and {len(reasons) - MOST_REASONS} more"
        return likely

    def _other_settings(self) -> list[str]:
        """Return a few words on each setting that differs and can change the result."""
        # settings that are newer than the reference result had their defaults
        defaults = TrainConfig(data=self.reference.data).to_json() | USUAL
        own = with_flat_spec(self._settings)
        reference = with_flat_spec(defaults | dict(self.reference.settings))
        without_weight = fields_where(TrainConfig, changes_result=False)
        differences = []
        for name in dict.fromkeys((*own, *reference)):
            value = own.get(name, MODEL_DEFAULT)
            expected = reference.get(name, MODEL_DEFAULT)
            if name not in without_weight and value != expected:
                differences.append(f"{name} {value} instead of {expected}")
        return differences
