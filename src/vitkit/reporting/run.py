"""`ReportedRun`: what the folder of a run has for its report, with its predictions and images."""

from __future__ import annotations

import csv
import json
import re
import shlex
import warnings
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64, UInt8
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import Split
from vitkit.errors import DataError, ImageError, OutputError, SettingError, VitkitError
from vitkit.evaluation import evaluate, prediction_table
from vitkit.evaluation.metrics import Metrics
from vitkit.evaluation.temperature import HeldOutLogits
from vitkit.io.results import MEMORY_PREFIX
from vitkit.messages import escape, nearest_parent, plural
from vitkit.training.config import meaning, merging
from vitkit.training.monitoring.figures import LearningCurves
from vitkit.training.run_folder import RunFolder
from vitkit.weights.checkpoint import Checkpoint
from vitkit.weights.load import load

VALIDATION_LOGITS = (
    "the validation logits of the run, with the temperature if there is one; each fifth of the "
    "images by the epoch that the other four choose"
)
"""The origin of predictions that no file has."""
SPLITS = {"test": "test", "val": "validation"}
"""Splits with scores, the most reliable first, and their names in the page."""
DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


class Missing(Exception):
    """A section cannot be shown; the report says why, and how to change that.

    Args:
        reason: what is missing, a sentence.
        command: the command that makes it; empty where there is none.
    """

    def __init__(self, reason: str, command: str = "") -> None:
        super().__init__(reason)
        self.reason, self.command = reason, command


class ReportedRun:
    """The files of a run.

    Args:
        run: its folder.

    Raises:
        OutputError: no such folder; or not that of a run, as a folder of `--auto` with its
            candidates.
    """

    def __init__(self, run: str | Path) -> None:
        self.root = Path(run)
        self.folder = RunFolder(self.root)
        self.problem = ""
        """Why there are no images, a sentence; empty where there are."""
        if not self.folder.config.is_file():
            hint = "name the folder that the run named at its start, such as runs/photos-vit-1"
            for config in sorted(self.root.glob("*/config.yaml"))[:1]:
                hint = f"its candidates have; name one of them, such as {escape(config.parent)}"
            problem = f"not a run folder, it has no config.yaml of a run; {hint}"
            if not self.root.is_dir():
                problem = f"no such run folder; {nearest_parent(self.root)}"
            raise OutputError(f"{escape(self.root)}: {problem}")

    @property
    def name(self) -> str:
        """The name of the folder."""
        return escape(self.root.resolve().name)

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
        day = ""
        if ends and DAY.fullmatch(ends[0]):
            day = f", {ends[0]}"
        return escape(f"{model} on {self.data}{day}")

    @cached_property
    def settings(self) -> meaning.Settings:
        """The settings of config.yaml; empty where it cannot be read."""
        try:
            return merging.read_yaml(self.folder.config)
        except SettingError:
            return {}

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """The best weights, or the last ones where no epoch was complete; None without any."""
        # a damaged file is passed over: most of the page needs no weights
        for path in (self.folder.best, self.folder.last):
            try:
                if path.is_file():
                    return load(path)
            except VitkitError:
                continue
        return None

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the weights; empty without them."""
        if self.checkpoint is None:
            return {}
        return self.checkpoint.metadata

    @cached_property
    def dataset(self) -> Dataset | None:
        """The data, split as in the training; None, and a `problem`, if they cannot be opened."""
        checkpoint, data = self.checkpoint, self.settings.get("data")
        if checkpoint is None or not data:
            self.problem = "The run has no weights or no settings, so its data are not known."
            return None
        root, relabel = self.settings.get("data_root"), self.relabel_file
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the training has shown them
                return evaluate.open_as_in_training(checkpoint, str(data), root, None, relabel)
        except (VitkitError, OSError) as error:
            self.problem = f"The images are not shown: {error}."
            return None

    def split(self, name: str) -> Split | None:
        """Return a split whose images can be read; None, and a `problem`, without one."""
        split = self.dataset.splits.get(name) if self.dataset else None
        if split is None and self.dataset:
            self.problem = f"The images are not shown: the data have no {name} split."
        return split

    def split_of(self, predictions: Predictions) -> Split | None:
        """Return the split that predictions are of; None if the data have changed since."""
        split, names = self.split(predictions.split), predictions.names
        last = int(predictions.places[-1])
        if split is None or self.dataset is None or self.checkpoint is None:
            return None
        if names and len(split) == len(names):
            if (split.name(0), split.name(last)) == (names[0], names[last]):
                return split
        elif not names and last < len(split):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                labels = evaluate.with_labels_of(
                    self.checkpoint, self.dataset, predictions.split
                ).labels
            if np.array_equal(labels[predictions.places], predictions.labels):
                return split
        self.problem = "The images are not shown: the data have changed since the run."
        return None

    def thumbnail(self, split: Split | None, place: int) -> str:
        """Return the address of a small copy of an image, `data:...`; empty without one.

        Args:
            split: the images; None for none.
            place: number of the image in it.
        """
        if split is None:
            return ""
        try:
            return _thumbnail(split.read(place))
        except (ImageError, OSError):
            return ""

    @cached_property
    def scores(self) -> dict[str, Metrics]:
        """The scores of the best weights by split, as their file has them."""
        stored = self.metadata.get("metrics")
        found = stored.items() if isinstance(stored, dict) else ()
        return {str(split): _numbers(scores) for split, scores in found}

    @cached_property
    def lines(self) -> list[Metrics]:
        """The numbers in the objects of metrics.jsonl; lines that are damaged are left out."""
        found = []
        for line in _text(self.folder.lines).splitlines():
            with suppress(ValueError, RecursionError):
                found.append(_numbers(json.loads(line)))
        return found

    @cached_property
    def log(self) -> list[str]:
        """The lines of train.log."""
        return _text(self.folder.log).splitlines()

    @cached_property
    def curves(self) -> LearningCurves:
        """The values of each epoch.

        Raises:
            Missing: there are none.
        """
        try:
            return LearningCurves.read(self.root)
        except DataError as error:
            raise Missing(f"There are no curves: {error}.") from None

    @cached_property
    def held_out(self) -> tuple[Float[Tensor, "N K"], Int64[Tensor, " N"]] | None:
        """The logits and labels that the temperature is fitted on; None if there are none.

        Each fold of the validation images has those of the model that the other folds choose, so a
        few may come from other epochs than that of the best weights.
        """
        try:
            with safe_open(self.folder.held_out, "pt") as file:
                logits, labels = file.get_tensor("logits"), file.get_tensor("labels").long()
        except (OSError, SafetensorError):
            return None
        fits = logits.ndim == 2 and labels.shape == logits.shape[:1] and len(labels)
        if not fits or labels.min() < 0 or labels.max() >= logits.shape[1]:
            return None
        return logits.double(), labels

    @property
    def temperature(self) -> float:
        """The stored temperature; 1 without any."""
        if self.checkpoint is None:
            return 1.0
        return self.checkpoint.temperature

    @cached_property
    def predictions(self) -> Predictions:
        """The predictions of the test images, else of the validation images.

        Raises:
            Missing: neither predictions.csv nor validation logits.
        """
        classes = () if self.checkpoint is None else self.checkpoint.classes
        counts, table = self.image_counts, self.folder.predictions
        if table.exists():
            found = _read_predictions(table, classes)
            # `vitkit eval --split val --predictions` may have written them
            if counts.get("val") == len(found.labels) != counts.get("test"):
                found = replace(found, split="val")
            return found
        if self.held_out is None:
            raise Missing(
                "The folder has neither the predictions of the test images nor the logits of the "
                "validation images. This command writes the predictions; make the report again "
                "afterwards.",
                self.command("eval", self.root, self.data, "--predictions", table),
            )
        logits, labels = self.held_out
        count, num_classes = logits.shape
        if len(classes) != num_classes:
            classes = tuple(map(str, range(num_classes)))
        probabilities = (logits / self.temperature).softmax(1)
        confidence, predicted = probabilities.max(1)
        own = probabilities.gather(1, labels[:, None])[:, 0]
        # logits i are those of image i * n of the split
        places = np.arange(count) * HeldOutLogits.step(counts.get("val", count), num_classes)
        columns = [column.numpy() for column in (labels, predicted, confidence, own)]
        return Predictions("val", VALIDATION_LOGITS, classes, (), places, *columns)

    @property
    def image_counts(self) -> dict[str, int]:
        """The number of images of each split in training; empty where the weights do not say."""
        stored = self.metadata.get("data")
        counts = _numbers(stored.get("images") if isinstance(stored, dict) else None)
        return {name: int(count) for name, count in counts.items() if count > 0}

    @property
    def data(self) -> str:
        """The data, as they were named; DATA where they were an object of Python."""
        data = str(self.settings.get("data") or "DATA")
        if data.startswith(MEMORY_PREFIX):
            return "DATA"
        return data

    @property
    def relabel_file(self) -> Path | None:
        """The copy of the corrected labels that the run was trained with; None without them."""
        # another relabel.csv may lie there, saved from the page for the next run
        if self.settings.get("relabel") is None or not self.folder.relabel.is_file():
            return None
        return self.folder.relabel

    @property
    def relabel_words(self) -> list[str | Path]:
        """The flag that names the corrected labels of the run; none without them."""
        if self.relabel_file is None:
            return []
        return ["--relabel", self.relabel_file]

    def command(self, verb: str, *words: str | Path) -> str:
        """Return a command line of vitkit, with the folder of the data where one was named."""
        # the run's data are found only below that folder
        root = self.settings.get("data_root")
        more = []
        if root and self.data in map(str, words):
            more = ["--data-root", str(root)]
        return f"vitkit {verb} {escape(shlex.join([*map(str, words), *more]))}"


def _text(path: Path) -> str:
    """Return the text of a file that a killed run may have cut anywhere; empty without one."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _numbers(scores: object) -> Metrics:
    """Return the entries of a JSON object that are numbers."""
    found = scores.items() if isinstance(scores, dict) else ()
    return {str(name): float(value) for name, value in found if type(value) in (int, float)}


# Predictions.


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of N images.

    Attributes:
        split: `test` or `val`.
        origin: where they come from, a sentence.
        classes: the K names.
        names: names of the images (N); empty where they are not stored.
        places: number of each image in its split (N,).
        labels: true classes (N,).
        predicted: most probable classes (N,).
        probability: probability of the predicted classes (N,), in [0, 1].
        label_probability: probability of the true classes (N,), in [0, 1].
    """

    split: str
    origin: str
    classes: tuple[str, ...]
    names: Sequence[str]
    places: Int64[np.ndarray, " N"]
    labels: Int64[np.ndarray, " N"]
    predicted: Int64[np.ndarray, " N"]
    probability: Float64[np.ndarray, " N"]
    label_probability: Float64[np.ndarray, " N"]

    @property
    def right(self) -> Bool[np.ndarray, " N"]:
        """True for each image (N,) whose class is the predicted one."""
        return self.labels == self.predicted

    @property
    def images(self) -> str:
        """The number of images and their split, such as `359 test images`."""
        return f"{len(self.labels):,} {SPLITS[self.split]} images"


def _read_predictions(path: Path, classes: Sequence[str]) -> Predictions:
    """Read a table of predictions, as a run or `vitkit eval --predictions` writes it.

    Classes that the table has and `classes` lacks come after them. Raises `Missing`.
    """
    try:
        # not `splitlines`, which also splits at characters such as U+2028, which a name may have
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
        if tuple(header) != prediction_table.PREDICTIONS_HEADER or not rows:
            raise ValueError
        numbers = {name: number for number, name in enumerate(classes)}
        labels, predicted = (
            np.array([numbers.setdefault(row[column], len(numbers)) for row in rows])
            for column in (1, 2)
        )
        probability = np.array([[float(row[3]), float(row[4])] for row in rows])
        if not ((probability >= 0) & (probability <= 1)).all():  # NaN is neither
            raise ValueError
    except (OSError, ValueError, IndexError, csv.Error):
        raise Missing(f"{path.name} is not a table of predictions of vitkit, or damaged.") from None
    return Predictions(
        "test",
        f"{path.name}: the weights of the run, with their temperature if they have one",
        tuple(numbers),
        [row[0] for row in rows],
        np.arange(len(rows)),
        labels,
        predicted,
        probability[:, 0],
        probability[:, 1],
    )


# Images in the page.

THUMBNAIL = 96
"""Pixels of the longer side of an image in the page at most."""
SHARP = 48
"""Images with no side longer than this are kept bit by bit, and enlarged without blur."""
QUALITY = 78
"""Of JPEG files, up to 95."""


def _thumbnail(pixels: UInt8[np.ndarray, "H W C"]) -> str:
    """Return an image as an address that contains it."""
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    if max(image.size) <= SHARP:
        return data_address(image, "png")
    image.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    return data_address(image, "jpeg")


def data_address(image: Image.Image | bytes, kind: str) -> str:
    """Return an image as `data:image/KIND;base64,...`.

    Args:
        image: RGB or grey, or an encoded file.
        kind: `png` or `jpeg`.
    """
    if isinstance(image, Image.Image):
        content = BytesIO()
        image.save(content, format=kind, optimize=True, quality=QUALITY)
        image = content.getvalue()
    return f"data:image/{kind};base64,{b64encode(image).decode('ascii')}"
