"""Letters of shapes, as in every docstring and annotation.

    B  batch              N  patches (N = gh * gw)        L  depth (blocks)
    C  channels           gh, gw  grid of patches         k  heads
    H  image height       R  register tokens              h  head width
    W  image width        T  tokens (prefix + N)          M  MLP width
    P  patch (height or width)    D  width                K  classes

Height comes before width everywhere. The aliases are checked while the tests run (jaxtyping and
beartype) and cost nothing otherwise. Layers, heads and rows are named by whole numbers from 0.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from jaxtyping import Float, Int64
from torch import Tensor

from vitkit.errors import SettingError, WrongValue

Images: TypeAlias = Float[Tensor, "B C H W"]
Tokens: TypeAlias = Float[Tensor, "B T D"]
Logits: TypeAlias = Float[Tensor, "B K"]
Pooled: TypeAlias = Float[Tensor, "B D"]
AttentionMaps: TypeAlias = Float[Tensor, "B k Q T"]
Grid: TypeAlias = tuple[int, int]
Targets: TypeAlias = Int64[Tensor, " B"] | Float[Tensor, "B K"]
"""Class numbers, or a probability for every class."""
Loss: TypeAlias = Callable[[Logits, Targets], Tensor]
"""A function of logits and targets that returns the mean over the images, in nats."""

__all__ = [
    "AttentionMaps",
    "Grid",
    "Images",
    "Logits",
    "Loss",
    "Pooled",
    "Targets",
    "Tokens",
    "refuse_absent",
    "resolve_layers",
    "whole_numbers",
]


def whole_numbers(name: str, numbers: Iterable[int]) -> tuple[int, ...]:
    """Return numbers as a tuple; `SettingError` for what is not a list of whole numbers.

    Args:
        name: name of the argument, for the message.
        numbers: NumPy's and torch's are fine, True and False are not.
    """
    try:
        listed = tuple(numbers)
        if any(isinstance(number, bool) for number in listed):
            raise TypeError
        return tuple(operator.index(number) for number in listed)
    except TypeError:
        expected = "must be a list of whole numbers, such as [0, -1]"
        raise SettingError.about(name, numbers, expected) from None


def refuse_absent(numbers: Sequence[int], count: int, noun: str) -> None:
    """Raise `SettingError` for a number that is not from 0 to `count` - 1.

    Args:
        numbers: numbers of heads or of query rows.
        count: how many there are.
        noun: one of them in words, such as `query row`.
    """
    for number in numbers:
        if not 0 <= number < count:
            raise _missing(noun, number, count)


def resolve_layers(layers: Sequence[int], depth: int) -> frozenset[int]:
    """Return layers by their numbers from 0; `SettingError` for one that does not exist."""
    for layer in layers:
        if not -depth <= layer < depth:
            raise _missing("layer", layer, depth)
    return frozenset(layer % depth for layer in layers)  # -1 is the last layer


def _missing(noun: str, number: int, count: int) -> SettingError:
    kind = noun.rpartition(" ")[2]
    expected = f"does not exist; {kind}s are 0 to {count - 1}"
    error = SettingError(f"{noun} {number} {expected}")
    error.wrong = WrongValue(noun, number, expected)  # for a message that names the flag
    return error
