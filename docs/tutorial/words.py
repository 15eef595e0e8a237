"""Words as sequences of token ids, for the two tasks of the Transformer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LETTERS = "abcdefghijkl"
"""The id of a letter is its index here."""
PADDING, START, END = (len(LETTERS) + special for special in range(3))
SHORTEST, LONGEST = 3, 6


def draw(many: int, generator: torch.Generator, *, held_out: bool = False) -> Tensor:
    """Draw sources (B, 6), letters and then padding; about a fifth of `many` words is held out."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (many, 1), generator=generator)
    letters = torch.randint(len(LETTERS), (many, LONGEST), generator=generator)
    real = torch.arange(LONGEST) < lengths
    chosen = ((letters * real).sum(1) % 5 == 0) == held_out
    return letters.masked_fill(~real, PADDING)[chosen]


def backwards(source: Tensor) -> Tensor:
    """Reverse the letters of each word, (B, 6)."""
    reversed_ids = source.flip(1)
    order = (
        (reversed_ids == PADDING).sort(dim=1, stable=True).indices
    )  # padding last again
    return reversed_ids.gather(1, order)


def ordered(source: Tensor) -> Tensor:
    """Sort the letters of each word alphabetically, (B, 6)."""
    return source.sort(
        dim=1
    ).values  # the id of padding is larger than that of every letter


def with_end(written: Tensor) -> Tensor:
    """Append the end token: (B, 7), letters, end, padding."""
    lengths = (written != PADDING).sum(1, keepdim=True)
    return F.pad(written, (0, 1), value=PADDING).scatter(1, lengths, END)


def as_text(ids: Tensor) -> str:
    """Return the letters of ids (T,), without special tokens.

    >>> as_text(torch.tensor([START, 2, 0, 1, END, PADDING]))
    'cab'
    """
    return "".join(LETTERS[number] for number in ids.tolist() if number < len(LETTERS))
