"""Compare models on the same images by McNemar's exact test."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitkit.errors import DataError, SettingError
from vitkit.evaluation import evaluate, intervals, result
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
        if self.p >= intervals.SIGNIFICANCE_LEVEL:
            return f"No significant difference between {self.first} and {self.second}: {right}."
        better = "worse"
        if self.only_second > self.only_first:
            better = "better"
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

    scores: dict[str, result.Evaluation]
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
    chosen = evaluate.EvaluationChoice(data_root=data_root, **evaluation)
    scores = {}
    groups: dict[str, dict[int, str]] = {}
    for name, checkpoint, values in zip(names, loaded, settings, strict=True):
        scores[name] = evaluate.evaluate_checkpoint(checkpoint, data, chosen, device=device)
        seed, kind = values.get("seed"), dict(sorted(values.items()))
        for other in (*TUNED_SETTINGS, *not_of_the_kind):
            kind.pop(other, None)
        start = kind.get("start")
        if isinstance(start, Mapping):
            # the same weights may come from another path
            kind["start"] = start.get("sha256")
            kind.pop("pretrained", None)
        if kind and isinstance(seed, int):
            # the first run of a seed counts, so that a copy does not narrow the spread
            groups.setdefault(repr(kind), {}).setdefault(seed, name)
    return compare_evaluations(scores, [[*by_seed.values()] for by_seed in groups.values()])


def _shared_data(settings: Mapping[str, StoredSettings]) -> str:
    """Return the data that all runs were trained on, by the settings of each name."""
    trained_on = {name: values.get("data") for name, values in settings.items()}
    shared = {str(data) for data in trained_on.values()}
    if None in trained_on.values() or len(shared) > 1:
        listed = []
        for name, data in trained_on.items():
            listed.append(f"{name} on {data or 'data that it does not record'}")
        raise SettingError(
            f"the checkpoints were not trained on the same data ({', '.join(listed)}); name the "
            "data to compare on with --data"
        )
    return shared.pop()


def compare_evaluations(
    scores: Mapping[str, result.Evaluation], groups: Iterable[Sequence[str]] = ()
) -> Comparison:
    """Compare the first evaluation with each of the others.

    Args:
        scores: name -> evaluation, two or more.
        groups: the names of runs that differ in their seeds alone; one run has no spread.

    Raises:
        DataError: they were not evaluated on the same images with the same classes.
    """
    (first, reference), *others = scores.items()
    pairs = [_pair(first, reference, name, evaluation) for name, evaluation in others]
    repeats = []
    for names in groups:
        if len(names) > 1:
            top1 = np.array([scores[name]["top1"] for name in names])
            mean, low, high = map(float, (top1.mean(), top1.min(), top1.max()))
            # of a sample: the sum of squares divided by n - 1
            repeats.append(Repeats(tuple(names), mean, float(top1.std(ddof=1)), low, high))
    return Comparison(dict(scores), tuple(pairs), tuple(repeats))


def _pair(
    first: str, reference: result.Evaluation, second: str, evaluation: result.Evaluation
) -> Pair:
    """Compare two evaluations; refuse different classes or images."""
    if different := sorted(set(reference.classes) ^ set(evaluation.classes)):
        raise DataError(
            f"{first} and {second} have different classes: only one of them has "
            f"{', '.join(different[: evaluate.CLASSES_SHOWN])}; compare models of the same classes"
        )
    # McNemar's test pairs the images, so each must be in both, in the same order
    images, others = ([row[:2] for row in one.rows()] for one in (reference, evaluation))
    if images != others:
        raise DataError(
            f"{first} and {second} have different images in this split, {len(images):,} "
            f"and {len(others):,}, as their training split the data or skipped images "
            "differently; choose another --split"
        )
    # images that neither, the first alone, the second alone and both classify correctly
    kinds = reference.right + 2 * evaluation.right
    neither, only_first, only_second, both = np.bincount(kinds, minlength=4).tolist()
    p = intervals.mcnemar(only_first, only_second)
    return Pair(first, second, both, only_first, only_second, neither, p)
