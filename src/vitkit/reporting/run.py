"""`ReportedRun`: what the folder of a run has for its report."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from vitkit.data.datasets.splitting import natural_order
from vitkit.errors import CheckpointError, DataError, OutputError, SettingError
from vitkit.evaluation.metrics import Metrics
from vitkit.io.results import MEMORY_PREFIX
from vitkit.messages import escape, nearest_parent, plural
from vitkit.reporting.predictions import (
    HeldOut,
    Missing,
    Predictions,
    RunImages,
    read_held_out,
    read_predictions,
    validation_predictions,
)
from vitkit.training.config.meaning import Settings
from vitkit.training.config.merging import read_yaml
from vitkit.training.monitoring.figures import LearningCurves
from vitkit.training.run_folder import RunFolder
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import load

DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


class ReportedRun:
    """The files of a run.

    Args:
        run: its folder.

    Raises:
        OutputError: no such folder; or not that of a run, as a folder of `--auto` with its
            candidates.
    """

    def __init__(self, run: str | Path) -> None:
        self.folder = RunFolder(Path(run))
        root = self.folder.root
        if not root.is_dir():
            raise OutputError(f"{escape(root)}: no such run folder; {nearest_parent(root)}")
        if not self.folder.config.is_file():
            raise OutputError(
                f"{escape(root)}: not a run folder, it has no config.yaml{_hint(root)}"
            )

    @property
    def name(self) -> str:
        """The name of the folder."""
        return escape(self.folder.root.resolve().name)

    @property
    def summary(self) -> str:
        """The model, the data and the last day of the run; empty without settings."""
        model, data = self.settings.get("model"), self.settings.get("data")
        if not model or not data:
            return ""
        spec = self.settings.get("spec") or {}
        # a model of another size is not the named one
        if {"width", "depth"} <= spec.keys():
            model = f"ViT of width {spec['width']} with {plural(spec['depth'], 'block')}"
        ends = [line.partition("T")[0] for line in self.log[-1:]]
        day = f", {ends[0]}" if ends and DAY.fullmatch(ends[0]) else ""
        return escape(f"{model} on {self.data}{day}")

    @cached_property
    def settings(self) -> Settings:
        """The settings of config.yaml; empty where it cannot be read."""
        try:
            return read_yaml(self.folder.config)
        except SettingError:
            return {}

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The best weights, or the last ones where no epoch was complete; None without any."""
        # A damaged file is passed over: most of the page needs no weights.
        for path in (self.folder.best, self.folder.last):
            if not path.is_file():
                continue
            try:
                return load(path)
            except CheckpointError:
                continue
        return None

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the weights; empty without them."""
        return {} if self.checkpoint is None else self.checkpoint.metadata

    @cached_property
    def images(self) -> RunImages:
        """The images of the data."""
        return RunImages(self.checkpoint, self.settings, self.relabel_file)

    @cached_property
    def scores(self) -> dict[str, Metrics]:
        """The scores of the best weights by split: of the weights' file, else of metrics.jsonl."""
        stored = self.metadata.get("metrics")
        if isinstance(stored, dict) and stored:
            return {str(split): _numbers(scores) for split, scores in stored.items()}
        found: dict[str, Metrics] = {}
        for line in self.lines:
            kind = line.get("kind")
            if kind in ("val", "test"):
                begin = f"{kind}_"
                named = {name.removeprefix(begin): value for name, value in line.items()}
                found[kind] = _numbers(named)
        return found

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """The objects of metrics.jsonl; lines that are damaged are left out."""
        try:
            # A killed run may leave half a line, also in the middle of a letter.
            text = self.folder.lines.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        found = []
        for line in text.splitlines():
            try:
                document = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(document, dict):
                found.append(document)
        return found

    @cached_property
    def log(self) -> list[str]:
        """The lines of train.log."""
        try:
            return self.folder.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []

    @cached_property
    def curves(self) -> LearningCurves:
        """The values of each epoch.

        Raises:
            Missing: there are none.
        """
        try:
            return LearningCurves.read(self.folder.root)
        except DataError as error:
            raise Missing(f"There are no curves: {error}.") from None

    @cached_property
    def held_out(self) -> HeldOut | None:
        """The validation logits that are kept for the temperature."""
        return read_held_out(self.folder.held_out)

    @property
    def temperature(self) -> float:
        """The stored temperature; 1 without any."""
        return 1.0 if self.checkpoint is None else self.checkpoint.temperature

    @cached_property
    def predictions(self) -> Predictions:
        """The predictions of the test images, else of the validation images.

        Raises:
            Missing: neither predictions.csv nor validation logits.
        """
        classes = () if self.checkpoint is None else self.checkpoint.classes
        if self.folder.predictions.exists():
            found = read_predictions(self.folder.predictions, classes)
            if self.checkpoint is None:
                # without weights, only the class names in the table are known
                found = read_predictions(self.folder.predictions, natural_order(found.classes))
            # `vitkit eval --split val --predictions` may have written them
            if self.image_counts.get("val") == len(found.labels) != self.image_counts.get("test"):
                found = replace(found, split="val")
            return found
        if self.held_out is None:
            raise Missing(
                "The folder has neither the predictions of the test images nor the logits of the "
                "validation images. This command writes the predictions; make the report again "
                "afterwards.",
                self.command(
                    "eval", self.root, self.data, "--predictions", self.folder.predictions
                ),
            )
        count = self.image_counts.get("val", len(self.held_out.labels))
        return validation_predictions(self.held_out, classes, self.temperature, count)

    @property
    def image_counts(self) -> dict[str, int]:
        """The number of images of each split in training; empty where the weights do not say."""
        stored = self.metadata.get("data")
        images = stored.get("images") if isinstance(stored, dict) else None
        if not isinstance(images, dict):
            return {}
        return {name: count for name, count in images.items() if type(count) is int and count > 0}

    @property
    def root(self) -> Path:
        """The folder."""
        return self.folder.root

    @property
    def data(self) -> str:
        """The data, as they were named; DATA where they were an object of Python."""
        data = str(self.settings.get("data") or "DATA")
        return "DATA" if data.startswith(MEMORY_PREFIX) else data

    @property
    def relabel_file(self) -> Path | None:
        """The copy of the corrected labels that the run was trained with; None without them."""
        # another relabel.csv may lie there, saved from the page for the next run
        if self.settings.get("relabel") is None or not self.folder.relabel.is_file():
            return None
        return self.folder.relabel

    @property
    def relabel_words(self) -> list[str]:
        """The flag that names the corrected labels of the run; none without them."""
        return [] if self.relabel_file is None else ["--relabel", str(self.relabel_file)]

    def command(self, verb: str, *words: str | Path) -> str:
        """Return a command line of vitkit, with the folder of the data where one was named."""
        # The run's data are found only below that folder.
        root = self.settings.get("data_root")
        more = ["--data-root", str(root)] if root and self.data in map(str, words) else []
        return f"vitkit {verb} {escape(shlex.join([*map(str, words), *more]))}"


def _numbers(scores: object) -> Metrics:
    """Return the entries of a JSON object that are numbers."""
    if not isinstance(scores, dict):
        return {}
    return {
        str(name): float(value)
        for name, value in scores.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _hint(root: Path) -> str:
    """Name the candidates of a search, each of which has a report of its own."""
    for config in sorted(root.glob("*/config.yaml")):
        return f", but its candidates have; name one of them, such as {escape(config.parent)}"
    return " of a run; name the folder that the run named at its start, such as runs/photos-vit-1"
