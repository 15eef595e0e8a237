"""Words as sequences of token ids: what the Transformer's two tasks are made of."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

LETTERS = "abcdefghijkl"
"""A letter's id is its place here."""
PADDING, START, END = (len(LETTERS) + special for special in range(3))
SHORTEST, LONGEST = 3, 6


def draw(many: int, generator: torch.Generator, *, held_out: bool = False) -> Tensor:
    """Sources (B, 6): letters, then padding. Of `many` words about a fifth is held out."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (many, 1), generator=generator)
    letters = torch.randint(len(LETTERS), (many, LONGEST), generator=generator)
    filled = torch.arange(LONGEST) < lengths
    chosen = ((letters * filled).sum(1) % 5 == 0) == held_out
    return letters.masked_fill(~filled, PADDING)[chosen]


def backwards(source: Tensor) -> Tensor:
    """Each word from its last letter to its first, (B, 6)."""
    turned = source.flip(1)
    order = (turned == PADDING).sort(dim=1, stable=True).indices  # padding goes last again
    return turned.gather(1, order)


def in_order(source: Tensor) -> Tensor:
    """The letters of each word by the alphabet, (B, 6)."""
    return source.sort(dim=1).values  # padding is above every letter


def with_end(written: Tensor) -> Tensor:
    """Targets (B, 7): letters, the end, padding."""
    lengths = (written != PADDING).sum(1, keepdim=True)
    return F.pad(written, (0, 1), value=PADDING).scatter(1, lengths, END)


def as_text(ids: Tensor) -> str:
    """The letters among ids (T,), without the marks.

    >>> as_text(torch.tensor([START, 2, 0, 1, END, PADDING]))
    'cab'
    """
    return "".join(LETTERS[number] for number in ids.tolist() if number < len(LETTERS))
