"""True labels of predicted images: classes matched by name, and correct predictions counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from vitkit.data.datasets.splitting import match_classes
from vitkit.messages import percent, plural
from vitkit.prediction.images import (
    FoundImage,
)
from vitkit.weights.checkpoint import Checkpoint, names_for_data


def match_labels(checkpoint: Checkpoint, classes: Sequence[str]) -> dict[str, str]:
    """Match the classes of a dataset with those of a checkpoint.

    Args:
        checkpoint: if it has no class names and as many classes, its classes are the dataset's, in
            their order.
        classes: the classes of the dataset.

    Returns:
        Class of the dataset -> label of a `Prediction`; classes that the checkpoint lacks are left
        out.
    """
    names = names_for_data(checkpoint, classes)
    labels = checkpoint.classes or tuple(map(str, range(checkpoint.model.spec.num_classes)))
    if not names:
        # a head with assumed names has the names of another dataset
        if checkpoint.classes or len(labels) != len(classes):
            return {}
        return dict(zip(classes, labels, strict=True))
    return match_names(names, labels, classes)


def match_names(
    names: Sequence[str], labels: Sequence[str], classes: Sequence[str]
) -> dict[str, str]:
    """Match the classes of a dataset with the K classes of a model by their names.

    Args:
        names: the K classes, in the spelling of the dataset.
        labels: the K classes, as a `Prediction` has them.
        classes: the classes of the dataset.

    Returns:
        As `match_labels`.
    """
    # `indices` has no entry for a class that the model lacks
    match = match_classes(classes, names)
    matched = [name for name in dict.fromkeys(classes) if name not in match.unknown]
    return {
        name: labels[index]
        for name, index in zip(matched, match.indices, strict=True)
        if name not in match.ambiguous
    }


class RightAnswers:
    """A count of the images whose predicted class is their label, by split.

    Args:
        labels: class of the dataset -> label of a `Prediction`, as `match_labels` returns it.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._right: Counter[str] = Counter()
        self._all: Counter[str] = Counter()
        self._other_classes = 0

    def add(self, image: FoundImage, label: str) -> None:
        """Count an image; one without a true label is left out.

        Args:
            image: with its class in the dataset.
            label: label of its `Prediction`.
        """
        if not image.label:
            return
        if image.label not in self._labels:
            self._other_classes += 1
            return
        self._all[image.split] += 1
        self._right[image.split] += self.is_right(image, label)

    def is_right(self, image: FoundImage, label: str) -> bool:
        """Return True if a predicted label is the true one."""
        return self._labels.get(image.label) == label

    def lines(self) -> list[str]:
        """Describe the counts: a line for all, one for each split, and one for unknown classes."""
        lines: list[str] = []
        if self._all:
            lines.append(f"right: {_share(self._right.total(), self._all.total())}")
        if len(self._all) > 1:
            lines += (
                f"right in {split or 'the rest'}: {_share(self._right[split], count)}"
                for split, count in self._all.items()
            )
        if self._other_classes:
            lines.append(
                f"not counted: {plural(self._other_classes, 'image')} of classes that the "
                "checkpoint lacks"
            )
        return lines


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({percent(part / whole)})"
