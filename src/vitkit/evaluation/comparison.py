"""Compare models on the same images by McNemar's exact test."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.errors import DataError, SettingError
from vitkit.evaluation.evaluate import CLASSES_SHOWN, EvaluationChoice, evaluate_checkpoint
from vitkit.evaluation.intervals import SIGNIFICANCE_LEVEL, mcnemar
from vitkit.evaluation.result import Evaluation
from vitkit.messages import plural
from vitkit.plots.html import html_table, html_text
from vitkit.weights.checkpoint import stored_object
from vitkit.weights.load import load

TUNED_SETTINGS = frozenset({"amp", "attention_kernel", "compile"})
"""Settings that a timing before the first step may choose, differently for the next seed."""
StoredSettings = Mapping[str, Any]
"""Training settings as a checkpoint stores them."""


@dataclass(frozen=True)
class Pair:
    """Two models on the same images.

    Attributes:
        first: name of the first model.
        second: name of the second model.
        both: images that both classify correctly.
        only_first: images that only the first classifies correctly.
        only_second: images that only the second classifies correctly.
        neither: images that neither classifies correctly.
        p: of McNemar's exact test: the probability of a difference of the two middle numbers that
            is as large or larger, if both models are equally good.
    """

    first: str
    second: str
    both: int
    only_first: int
    only_second: int
    neither: int
    p: float

    @property
    def verdict(self) -> str:
        """One line: which model is better, or that no difference is significant."""
        right = (
            f"{self.second} alone is right on {plural(self.only_second, 'image')}, "
            f"{self.first} alone on {self.only_first:,} (McNemar, p = {self.p:.2g})"
        )
        if self.p >= SIGNIFICANCE_LEVEL:
            return f"No significant difference between {self.first} and {self.second}: {right}."
        better = "better" if self.only_second > self.only_first else "worse"
        return f"{self.second} is {better} than {self.first}: {right}."


@dataclass(frozen=True)
class Repeats:
    """Runs of the same settings that differ in their seeds.

    Attributes:
        names: names of the runs.
        mean: mean of their top-1.
        spread: the sample standard deviation of their top-1.
        low: the lowest.
        high: the highest.
    """

    names: tuple[str, ...]
    mean: float
    spread: float
    low: float
    high: float


@dataclass(frozen=True)
class Comparison:
    """Several models on the same images.

    Attributes:
        scores: name -> evaluation, in the order given.
        pairs: each of the others against the first.
        repeats: groups of runs that differ in their seeds alone.
    """

    scores: dict[str, Evaluation]
    pairs: tuple[Pair, ...]
    repeats: tuple[Repeats, ...] = ()

    def _repr_html_(self) -> str:
        """Return a table of the models and the verdicts, for a notebook."""
        rows = []
        for name, scores in self.scores.items():
            interval = f"{scores['top1_low']:.4f} to {scores['top1_high']:.4f}"
            rows.append([name, f"{scores['top1']:.4f}", interval, f"{scores['loss']:.4f}"])
        table = html_table(["model", "top1", "95 % interval", "loss"], rows)
        lines = [pair.verdict for pair in self.pairs]
        for group in self.repeats:
            lines.append(
                f"{plural(len(group.names), 'run')} of the same settings: top1 {group.mean:.4f}, "
                f"standard deviation {group.spread:.4f}"
            )
        return table + "".join(f"<div>{html_text(line)}</div>" for line in lines)


def compare_checkpoints(
    *checkpoints: str | Path,
    data: str | Path | None = None,
    data_root: str | Path | None = None,
    not_of_the_kind: Sequence[str] = (),
    device: str = "auto",
    **evaluation: Any,
) -> Comparison:
    """Evaluate checkpoints on the same images and compare the first with each of the others.

    Args:
        *checkpoints: two or more run folders (their best weights) or checkpoints.
        data: as for `evaluate`; default the training data, if it is the same for all.
        data_root: as for `evaluate`; default that of the first one's training.
        not_of_the_kind: settings that repeats of a run (other seeds) may differ in.
        device: as for `evaluate`.
        **evaluation: further fields of `EvaluationChoice`.

    Raises:
        DataError: other classes, other images, or data that changed where vitkit made the test
            split itself.
        SettingError: fewer than two, one of them twice, or no data named and not the same in all.
        CheckpointError, DeviceError: the message names the wrong value.
    """
    names = [str(path) for path in checkpoints]
    # a checkpoint compared with itself under another name would look like a tie
    paths = {os.path.realpath(name) for name in names}
    if len(paths) != len(names) or len(names) < 2:
        raise SettingError(f"expected two or more different checkpoints, got {' and '.join(names)}")
    loaded = [load(name) for name in names]
    settings = [stored_object(checkpoint, "recipe") for checkpoint in loaded]
    if data is None:
        data = _shared_data(dict(zip(names, settings, strict=True)))
        data_root = data_root or settings[0].get("data_root")
    chosen = EvaluationChoice(data_root=data_root, **evaluation)
    scores = {}
    for name, checkpoint in zip(names, loaded, strict=True):
        scores[name] = evaluate_checkpoint(checkpoint, data, chosen, device=device)
    seeds = []
    for values in settings:
        seed = values.get("seed")
        seeds.append(seed if isinstance(seed, int) else None)
    kinds = [_kind_of_run(values, not_of_the_kind) for values in settings]
    return compare_evaluations(scores, kinds, seeds)


def _kind_of_run(settings: StoredSettings, ignored: Sequence[str]) -> StoredSettings | None:
    """Return the settings in which two runs differ if one is not a repeat of the other."""
    kind = {name: value for name, value in sorted(settings.items()) if name not in ignored}
    start = kind.get("start")
    if isinstance(start, Mapping):
        # the same weights may come from another path
        kind["start"] = start.get("sha256")
        kind.pop("pretrained", None)
    return kind or None


def _shared_data(settings: Mapping[str, StoredSettings]) -> str:
    """Return the data that all runs were trained on, by the settings of each name."""
    trained_on = {name: values.get("data") for name, values in settings.items()}
    for name, data in trained_on.items():
        if data is None:
            raise SettingError(
                f"{name} does not record which data it was trained on; name the data to compare "
                "on with --data"
            )
    shared, *others = {str(data): None for data in trained_on.values()}
    if others:
        listed = ", ".join(f"{name} on {data}" for name, data in trained_on.items())
        raise SettingError(
            f"the checkpoints were trained on different data ({listed}); name the data to compare "
            "on with --data"
        )
    return shared


def compare_evaluations(
    scores: Mapping[str, Evaluation],
    settings: Sequence[StoredSettings | None] | None = None,
    seeds: Sequence[int | None] | None = None,
) -> Comparison:
    """Compare the first evaluation with each of the others.

    Args:
        scores: name -> evaluation, two or more.
        settings: training settings of each, without the seed; runs with equal settings, apart from
            `TUNED_SETTINGS`, are repeats, and None is like no other.
        seeds: seeds of each; of several runs with one seed, the first counts.

    Raises:
        DataError: they were not evaluated on the same images with the same classes.
    """
    (first, reference), *others = scores.items()
    # all are checked before the first is compared
    for name, evaluation in others:
        _check_same(first, reference, name, evaluation)
    pairs = []
    for name, evaluation in others:
        pairs.append(_pair(first, reference, name, evaluation))
    # without settings, none is a repeat of another
    unknown = [None] * len(scores)
    repeats = _repeats(scores, settings or unknown, seeds or unknown)
    return Comparison(dict(scores), tuple(pairs), repeats)


def _check_same(first: str, reference: Evaluation, second: str, evaluation: Evaluation) -> None:
    """Refuse two evaluations with different classes or images."""
    if different := sorted(set(reference.classes) ^ set(evaluation.classes)):
        raise DataError(
            f"{first} and {second} have different classes: only one of them has "
            f"{', '.join(different[:CLASSES_SHOWN])}; compare models of the same classes"
        )
    # McNemar's test pairs the images, so each must be in both, in the same order
    first_images = _names_and_labels(reference)
    second_images = _names_and_labels(evaluation)
    if first_images != second_images:
        raise DataError(
            f"{first} and {second} have different images in this split, {len(first_images):,} "
            f"and {len(second_images):,}, as their training split the data or skipped images "
            "differently; choose another --split"
        )


def _names_and_labels(evaluation: Evaluation) -> list[tuple[str, str]]:
    return [row[:2] for row in evaluation.rows()]


def _pair(first: str, reference: Evaluation, second: str, evaluation: Evaluation) -> Pair:
    # `right` is a boolean array over the same images in the same order
    only_first = int((reference.right & ~evaluation.right).sum())
    only_second = int((evaluation.right & ~reference.right).sum())
    return Pair(
        first,
        second,
        both=int((reference.right & evaluation.right).sum()),
        only_first=only_first,
        only_second=only_second,
        neither=int((~reference.right & ~evaluation.right).sum()),
        p=mcnemar(only_first, only_second),
    )


def _repeats(
    scores: Mapping[str, Evaluation],
    settings: Sequence[StoredSettings | None],
    seeds: Sequence[int | None],
) -> tuple[Repeats, ...]:
    """Group runs by their settings; groups of one seed are left out."""
    groups: dict[str, dict[int, str]] = {}
    for name, values, seed in zip(scores, settings, seeds, strict=True):
        if values is not None and seed is not None:
            key = {field: value for field, value in values.items() if field not in TUNED_SETTINGS}
            # the first run of a seed counts, so that a copy does not narrow the spread
            groups.setdefault(repr(key), {}).setdefault(seed, name)
    repeats = []
    for by_seed in groups.values():
        # one run has no spread
        if len(by_seed) < 2:
            continue
        names = tuple(by_seed.values())
        top1 = np.array([scores[name]["top1"] for name in names])
        repeats.append(
            Repeats(
                names,
                mean=float(top1.mean()),
                # of a sample: the sum of squares divided by n - 1
                spread=float(top1.std(ddof=1)),
                low=float(top1.min()),
                high=float(top1.max()),
            )
        )
    return tuple(repeats)
