"""True labels of predicted images: classes matched by name, and correct predictions counted."""

from collections import Counter
from collections.abc import Sequence

from vitkit.messages import percent, plural
from vitkit.prediction.images import FoundImage
from vitkit.weights.checkpoint import LabelledModel, names_for_data


def match_labels(model: LabelledModel, classes: Sequence[str]) -> dict[str, str]:
    """Match the classes of a dataset with those of a model.

    Args:
        model: if it has no class names and as many classes, its classes are the dataset's, in their
            order.
        classes: the classes of the dataset.

    Returns:
        Class of the dataset -> label of a `Prediction`, without names that several classes have.
    """
    names = names_for_data(model, classes)
    labels = model.classes or tuple(map(str, range(model.num_classes)))
    if not model.classes and model.num_classes == len(classes):
        names = tuple(classes)
    counts = Counter(names)
    matched = dict(zip(names, labels, strict=False))  # no names: nothing is known
    return {name: label for name, label in matched.items() if counts[name] == 1}


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
