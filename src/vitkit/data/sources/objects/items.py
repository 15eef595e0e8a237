"""Items of a map-style dataset: an image of any usual kind and its label, checked by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from vitkit.data.sources.tables.columns import IMAGE_NAMES, LABEL_NAMES
from vitkit.errors import DataError
from vitkit.messages import did_you_mean, escape

Label: TypeAlias = int | str
"""A class number from 0, or a class name."""


@runtime_checkable
class MapStyle(Protocol):
    """Anything with a length and items (image, label): a `torch.utils.data.Dataset`, or a list."""

    def __len__(self) -> int:
        """Return the number of items N."""

    def __getitem__(self, index: int, /) -> Any:
        """Return the item of an index in [0, N): (image, label), or a mapping of both."""


def image_and_label(items: MapStyle, index: int, name: str) -> tuple[Any, Any]:
    """Return the two parts of an item.

    Raises:
        DataError: the dataset raises at this index, or the item is neither a pair nor a mapping
            with an image and a label.
    """
    try:
        item = items[index]
    except Exception as error:  # whatever a user's own dataset raises
        raise DataError(f"{name} raised {type(error).__name__}: {error}") from error
    if isinstance(item, Mapping):
        return _value(item, IMAGE_NAMES, "image", name), _value(item, LABEL_NAMES, "label", name)
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    got = f"a {type(item).__name__}"
    if isinstance(item, tuple | list):
        got += f" of {len(item)}"
    raise DataError(f"{name} is {got}; expected (image, label)")


def _value(item: Mapping[str, Any], names: Sequence[str], part: str, where: str) -> Any:
    for name in names:
        if name in item:
            return item[name]
    raise DataError(
        f"{where} has no {part}; expected one of the keys {', '.join(names)}, got "
        f"{escape(', '.join(map(str, item)))}"
    )


def as_label(label: Any, name: str) -> Label:
    """Return a label as a class number from 0 or a class name.

    Args:
        label: a whole number of any kind (Python, numpy, a tensor without axes), or text.
        name: the item's name in messages.

    Raises:
        DataError: none, a float, a negative number, empty text, or several values.
    """
    value = label
    # A number of numpy or torch has a shape, too: ().
    shape = getattr(label, "shape", ())
    if len(shape):
        raise DataError(
            f"{name}: the label has the shape {tuple(shape)}; expected one class number; for "
            "probabilities or one-hot labels pass the argmax"
        )
    if hasattr(label, "item"):
        value = label.item()
    # True is an int, too; as in tables it is the class 'True', not class 1.
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int) and value >= 0:
        return value
    if isinstance(value, str) and value.strip():
        return value
    got = "no label" if value is None else f"the label {value!r}"
    raise DataError(f"{name} has {got}; expected a class number from 0 or a class name")


def named(
    labels: Sequence[Label], classes: Sequence[str], name_of: Callable[[int], str]
) -> list[str]:
    """Return the class name of every label.

    Args:
        labels: numbers or names.
        classes: the names of the numbers; without any a number is its own name.
        name_of: an item's index -> its name, for messages.

    Raises:
        DataError: a number that has no name, or a name that is none of the classes.
    """
    known = set(classes)
    result = []
    for index, label in enumerate(labels):
        name = str(label)
        if known and isinstance(label, int):
            if label >= len(classes):
                raise DataError(
                    f"{name_of(index)} has the label {label}; expected 0 to {len(classes) - 1}, as "
                    f"there are {len(classes)} classes"
                )
            name = classes[label]
        elif known and name not in known:
            raise DataError(
                f"{name_of(index)} has the label {name!r}, which is not one of the classes"
                f"{did_you_mean(name, classes)}"
            )
        result.append(name)
    return result
