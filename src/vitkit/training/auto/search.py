"""`--auto`: from the cheapest answer upwards, as long as the next one pays.

All is chosen on validation; the test split is read once, at the end, for the winner. A rung pays
where it is better on the validation images than the best so far by McNemar's exact test, or by
more than half the width of that one's interval.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool
from rich.console import Console
from rich.table import Table

from vitkit.errors import Interrupted, NonFiniteError, SettingError
from vitkit.evaluation.comparison import LEVEL, mcnemar
from vitkit.evaluation.metrics import Metrics, wilson
from vitkit.io.atomic import replacing, write_bytes
from vitkit.training.run_folder import RunFolder

Clock = Callable[[], float]
"""Seconds that only ever grow."""
UNITS = {"s": 1, "m": 60, "h": 3600}
ROOM = 1.2
"""The budget named to the user is so many times what was measured."""
TOP = "the ladder has no more rungs"


@dataclass(frozen=True)
class Outcome:
    """What a rung came to.

    Attributes:
        name: of the rung, and of its folder.
        what: it is, in a few words.
        trained: parameters that were trained.
        right: whether each validation image's class was the predicted one (N,).
        best: its weights; `None` where it leaves none.
        seconds: it took.
    """

    name: str
    what: str
    trained: int
    right: Bool[np.ndarray, " N"]
    best: Path | None
    seconds: float

    @property
    def errors(self) -> int:
        """Validation images that are wrong."""
        return int((~self.right).sum())

    def scores(self) -> Metrics:
        """Of validation: `top1`, its interval of 95 % (Wilson), and how many images there are."""
        low, high = wilson(int(self.right.sum()), len(self.right))
        return {"top1": float(self.right.mean()), "top1_low": low, "top1_high": high,
                "images": float(len(self.right))}  # fmt: skip


@runtime_checkable
class Rung(Protocol):
    """One way to an answer; the next one costs more."""

    @property
    def name(self) -> str:
        """Of the rung and its folder."""

    @property
    def leaves_weights(self) -> bool:
        """Whether it can win; what leaves none is there to be compared with."""

    def least(self) -> float:
        """Seconds that the smallest of it takes, as measured here."""

    def run(self, folder: Path, seconds: float) -> Outcome:
        """Do it in a new folder, in about so many seconds."""


def seconds_of(budget: str) -> float:
    """`90s`, `10m` and `1.5h` in seconds. Raises `SettingError`.

    >>> seconds_of("1.5h")
    5400.0
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", budget.strip())
    if found is None or float(found[1]) == 0:
        raise SettingError(
            f"budget {budget!r} is no time; write a number above 0 with s, m or h: 90s, 10m, 1h"
        )
    return float(found[1]) * UNITS[found[2]]


def p_value(one: Outcome, other: Outcome) -> float:
    """Of McNemar's exact test between two rungs on the validation images."""
    return mcnemar(int((one.right & ~other.right).sum()), int((other.right & ~one.right).sum()))


def pays(best: Outcome, rung: Outcome) -> bool:
    """Whether a rung is better than the best before it, and not only luckier."""
    return rung.errors < best.errors and _told(best, best.errors - rung.errors, p_value(best, rung))


def can_pay(best: Outcome) -> bool:
    """Whether a rung without any error would be told to be better."""
    return _told(best, best.errors, mcnemar(0, best.errors))


def _told(best: Outcome, gained: int, p: float) -> bool:
    """By McNemar's test, or a gain beyond half the width of the interval of the best.

    With few images the test needs six that only one of them has right, whatever the share; there
    the width is the milder rule, with many images the stricter.
    """
    scores = best.scores()
    half = (scores["top1_high"] - scores["top1_low"]) / 2
    return p < LEVEL or gained / len(best.right) > half


def winner_of(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Of the rungs that leave weights, the last one that paid; the first one always does."""
    winner = None
    for outcome in outcomes:
        if outcome.best is not None and (winner is None or pays(winner, outcome)):
            winner = outcome
    return winner


@dataclass
class Climb:
    """A climb and how far it has come.

    Attributes:
        folder: where everything lies.
        data: name of the data set.
        budget: seconds.
        say: told what is done, a line each.
        clock: what time it is.
        started: by the clock; what came before the first rung counts, too.
    """

    folder: RunFolder
    data: str
    budget: float
    say: Callable[[str], None]
    clock: Clock
    started: float

    def __post_init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.stopped = ""
        self.test: Metrics = {}

    def up(self, rungs: Sequence[Rung]) -> Outcome:
        """Take one rung after the other, until the next one does not pay or does not fit.

        After every rung the folder has the table and the weights of the best so far.

        Returns:
            The winner.

        Raises:
            Interrupted: a signal came; what is done is kept.
            NonFiniteError: the first rung that could have left weights diverged.
        """
        try:
            self.stopped = next(
                (why for rung in rungs if (why := self._not_taken(rung)) is not None), TOP
            )
        except Interrupted as error:
            self.stopped = error.name
            self.keep()
            best = winner_of(self.outcomes)
            kept = f"; the best so far, {best.name}, is kept in {self.folder.best}" if best else ""
            raise Interrupted(error.signum, f"{error}{kept}") from None
        winner = winner_of(self.outcomes)
        assert winner is not None, "the first rung that leaves weights is always taken"
        self.say(f"stopping here: {self.stopped}")
        ahead = [one for one in self.outcomes if one.best is None and one.errors < winner.errors]
        if ahead:
            self.say(
                f"{ahead[0].name} had fewer wrong, but leave no weights to use; a longer --budget "
                f"may bring {winner.name} past that"
            )
        self.keep()
        return winner

    def _not_taken(self, rung: Rung) -> str | None:
        """Take a rung; why the climb ends here, or `None` where it goes on."""
        best = winner_of(self.outcomes)
        if best is not None and not can_pay(best):
            return (
                f"{rung.name} cannot be told to pay: {best.name} has {best.errors} of "
                f"{len(best.right)} validation images wrong, too few to show a gain; more "
                f"validation images could tell"
            )
        needed, left = rung.least(), self.started + self.budget - self.clock()
        if best is not None and needed > left:
            return f"{rung.name} needs {needed:.0f} s at least, and {max(left, 0):.0f} s are left"
        try:
            outcome = rung.run(self.folder.root / rung.name, left)
        except NonFiniteError as error:
            if best is None:
                raise
            return f"{rung.name} diverged: {error}"
        self.outcomes.append(outcome)
        self.keep()
        self.say(self._said(outcome, best))
        if best is not None and not pays(best, outcome):
            return f"{rung.name} does not pay"
        return None

    def _said(self, outcome: Outcome, best: Outcome | None) -> str:
        line = f"{outcome.name}: validation top-1 {_shown(outcome.scores())}"
        against = best or (self.outcomes[-2] if len(self.outcomes) > 1 else None)
        if against is None:
            return line
        verdict = "no difference to be told to"
        p = p_value(against, outcome)
        if pays(against, outcome) or pays(outcome, against):
            verdict = "better than" if outcome.errors < against.errors else "worse than"
        return f"{line}; {verdict} {against.name} (McNemar's p = {p:.2g})"

    def keep(self) -> None:
        """Write the table as JSON, and the winner's weights unless its test is in them."""
        winner = winner_of(self.outcomes)
        write_bytes(self.folder.ladder, json.dumps(self.to_json(), indent=1).encode())
        if winner is not None and winner.best is not None and not self.test:
            self.folder.best.parent.mkdir(exist_ok=True)
            with replacing(self.folder.best, needed=winner.best.stat().st_size) as temporary:
                shutil.copyfile(winner.best, temporary)

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON values; seconds, shares and counts."""
        winner = winner_of(self.outcomes)
        rungs = []
        for number, one in enumerate(self.outcomes):
            best = winner_of(self.outcomes[:number]) or (self.outcomes[0] if number else None)
            rungs.append({
                "name": one.name, "what": one.what, "trained": one.trained,
                "seconds": round(one.seconds, 1), "validation": one.scores(),
                "compared_with": best.name if best else None,
                "p": p_value(best, one) if best else None,
                "pays": pays(best, one) if best else None,
                "leaves_weights": one.best is not None,
            })  # fmt: skip
        return {
            "data": self.data, "budget": self.budget,
            "seconds": round(self.clock() - self.started, 1), "rungs": rungs,
            "stopped": self.stopped, "winner": winner.name if winner else None, "test": self.test,
        }  # fmt: skip

    def table(self) -> list[str]:
        """The same for people, line by line."""
        table = Table(box=None, pad_edge=False)
        for column in ("rung", "what it is", "trained", "seconds"):
            right = column in ("trained", "seconds")
            table.add_column(column, justify="right" if right else "left", no_wrap=True)
        for column in ("validation top-1, 95 %", "test top-1, 95 %"):
            table.add_column(column, no_wrap=True)
        winner = winner_of(self.outcomes)
        for one in self.outcomes:
            test = _shown(self.test) if one is winner and self.test else ""
            table.add_row(one.name, one.what, f"{one.trained:,}", f"{one.seconds:.0f}",
                          _shown(one.scores()), test)  # fmt: skip
        text = StringIO()
        Console(file=text, width=200).print(table)
        return [line.rstrip() for line in text.getvalue().splitlines()]


def _shown(scores: Metrics) -> str:
    return f"{scores['top1']:.4f} ({scores['top1_low']:.4f} to {scores['top1_high']:.4f})"


def refuse_small(budget: str, started: float, clock: Clock, rungs: Sequence[Rung]) -> None:
    """Raise `SettingError` where the first rung that leaves weights does not fit.

    Args:
        budget: as it was written.
        started: when its time began, by the clock.
        clock: what time it is.
        rungs: in their order; those before that one count.
    """
    needed = 0.0
    for rung in rungs:
        needed += rung.least()
        if rung.leaves_weights:
            needed += clock() - started
            if needed > seconds_of(budget):
                raise SettingError(
                    f"budget {budget} is too small for one epoch of {rung.name} on this machine; "
                    f"pass --budget {math.ceil(needed * ROOM)}s or more"
                )
            return
