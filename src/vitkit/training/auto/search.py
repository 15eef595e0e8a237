"""The search of `--auto`: candidates from cheap to expensive, while each one is better.

Candidates are compared on validation; the test split is read once, at the end, for the winner. A
candidate is better if it is better than the best one so far by McNemar's exact test, or by more
than half the width of that one's confidence interval.
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

from rich.console import Console
from rich.table import Table

from vitkit.errors import Interrupted, NonFiniteError, SettingError
from vitkit.evaluation.mcnemar import SIGNIFICANCE_LEVEL
from vitkit.evaluation.metrics import Metrics
from vitkit.io.atomic import replacing, write_bytes
from vitkit.training.auto.results import (
    CandidateResult,
    Clock,
    best_result,
    can_be_better,
    is_better,
    p_value,
)
from vitkit.training.run_folder import RunFolder

UNITS = {"s": 1, "m": 60, "h": 3600}
MARGIN = 1.2
"""Factor between the measured time and the budget that an error message suggests."""
WIDTH = 80
"""Characters of a line of the table, in a terminal and in the log."""
NO_MORE_CANDIDATES = "nothing further to try"


@runtime_checkable
class Candidate(Protocol):
    """A way to a classifier; each candidate of a search is more expensive than the one before."""

    @property
    def name(self) -> str:
        """The name of the candidate and of its folder."""

    @property
    def leaves_weights(self) -> bool:
        """True if it can win; a candidate without weights is a baseline for comparison."""

    def minimum_seconds(self) -> float:
        """Measure how long its smallest variant takes on this machine, in seconds."""

    def run(self, folder: Path, seconds: float) -> CandidateResult:
        """Run the candidate in a new folder, in about so many seconds.

        Raises:
            NonFiniteError: its training diverged.
            Interrupted: a signal came.
        """


def parse_budget(budget: str) -> float:
    """Convert `90s`, `10m` or `1.5h` to seconds. Raises `SettingError`.

    >>> parse_budget("1.5h")
    5400.0
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", budget.strip())
    if match is None or float(match[1]) == 0:
        raise SettingError(
            f"--budget {budget!r} is not a time; write a number above 0 with s, m or h, such "
            "as 90s, 10m or 1h"
        )
    return float(match[1]) * UNITS[match[2]]


def check_budget(
    budget: str, started: float, clock: Clock, candidates: Sequence[Candidate]
) -> None:
    """Raise `SettingError` if the budget is too small for the first candidate with weights.

    Args:
        budget: the setting, as it was written.
        started: start of the budget, by the clock.
        clock: the current time.
        candidates: all candidates in their order; those before the first with weights count, too.
    """
    needed = 0.0
    for candidate in candidates:
        needed += candidate.minimum_seconds()
        if not candidate.leaves_weights:
            continue
        # The preparation has used a part of the budget, too.
        needed += clock() - started
        if needed > parse_budget(budget):
            raise SettingError(
                f"--budget {budget} is too short for one epoch of {candidate.name} on this "
                f"machine; pass --budget {math.ceil(needed * MARGIN)}s or more"
            )
        return


@dataclass
class CandidateSearch:
    """A search over candidates, and its results so far.

    Attributes:
        folder: folder of the search.
        data: name of the dataset.
        budget: time for the whole search, in seconds.
        log: called with a line for every result.
        clock: the current time.
        started: start of the budget, by the clock; the preparation counts, too.
        results: results of the candidates that ended, in their order.
        stopped: why the search ended; empty while it lasts.
        test: metrics of the winner on the test split, once they are known.
    """

    folder: RunFolder
    data: str
    budget: float
    log: Callable[[str], None]
    clock: Clock
    started: float

    def __post_init__(self) -> None:
        self.results: list[CandidateResult] = []
        self.stopped = ""
        self.test: Metrics = {}

    def run(self, candidates: Sequence[Candidate]) -> CandidateResult:
        """Run one candidate after another, until one is not better or the budget is used up.

        After every candidate the folder has the table and the weights of the best one so far.

        Returns:
            The winner.

        Raises:
            Interrupted: a signal came; the results so far are kept.
            NonFiniteError: the first candidate with weights diverged.
        """
        self.stopped = NO_MORE_CANDIDATES
        try:
            for candidate in candidates:
                reason = self._try(candidate)
                if reason is not None:
                    self.stopped = reason
                    break
        except Interrupted as error:
            self.stopped = error.name
            self.save()  # with the reason of the end
            best = best_result(self.results)
            message = str(error)
            if best is not None:
                message += f"; the best so far, {best.name}, is kept in {self.folder.best}"
            raise Interrupted(error.signum, message) from None
        winner = best_result(self.results)
        assert winner is not None, "the first candidate with weights always runs"
        self.log(f"finished: {self.stopped}")
        for result in self.results:
            # A baseline that surpassed the winner.
            if result.weights is None and result.errors < winner.errors:
                self.log(
                    f"{result.name} had fewer errors, but it has no weights to use; with a "
                    f"longer --budget {winner.name} may do better"
                )
                break
            if result.weights is None and not is_better(result, winner):
                self.log(_narrow_win(winner, result))
        self.save()
        return winner

    def _try(self, candidate: Candidate) -> str | None:
        """Run a candidate; return the reason if the search ends here."""
        # None before the first candidate with weights, which always runs
        best = best_result(self.results)
        if best is not None and not can_be_better(best):
            return (
                f"{candidate.name} cannot be significantly better: {best.name} is wrong on only "
                f"{best.errors} of {len(best.correct)} validation images, too few to show a gain; "
                "use more validation images"
            )
        # Measuring takes time, so the clock is read afterwards.
        needed = candidate.minimum_seconds()
        left = self.started + self.budget - self.clock()
        if best is not None and needed > left:
            return (
                f"{candidate.name} needs at least {needed:.0f} s, and {max(left, 0):.0f} s are left"
            )
        try:
            result = candidate.run(self.folder.root / candidate.name, left)
        except NonFiniteError as error:
            if best is None:  # there is nothing to fall back to
                raise
            return f"{candidate.name} diverged: {error}"
        self.results.append(result)
        self.save()
        self.log(self._describe(result, best))
        if best is not None and not is_better(best, result):
            return f"{candidate.name} is not significantly better"
        return None

    def _describe(self, result: CandidateResult, best: CandidateResult | None) -> str:
        """Return one line on a result, and its comparison with the best one before it."""
        line = f"{result.name}: validation top-1 {top1_with_interval(result.scores())}"
        if best is None and len(self.results) > 1:
            best = self.results[-2]  # a baseline without weights
        if best is None:
            return line
        verdict = "no significant difference to"
        p = p_value(best, result)
        if is_better(best, result):
            verdict = "better than"
            if p >= SIGNIFICANCE_LEVEL:  # by the other rule, for few images
                verdict = "better, by more than half the width of its interval, than"
        elif is_better(result, best):
            verdict = "worse than"
        return f"{line}; {verdict} {best.name} (McNemar, p = {p:.2g})"

    def save(self) -> None:
        """Write the results as JSON, and the winner's weights.

        The weights are not written again after the test: they have its metrics.

        Raises:
            OutputError: a file cannot be written.
        """
        winner = best_result(self.results)
        write_bytes(self.folder.search, json.dumps(self.to_json(), indent=1).encode())
        if winner is not None and winner.weights is not None and not self.test:
            self.folder.best.parent.mkdir(exist_ok=True)
            needed = winner.weights.stat().st_size
            # All or nothing: a killed search leaves the previous winner.
            with replacing(self.folder.best, needed=needed) as temporary:
                shutil.copyfile(winner.weights, temporary)

    def to_json(self) -> dict[str, Any]:
        """Return the search as JSON values: seconds, shares and counts."""
        winner = best_result(self.results)
        return {
            "data": self.data,
            "budget": self.budget,
            "seconds": round(self.clock() - self.started, 1),
            "candidates": [self._row(number) for number in range(len(self.results))],
            "stopped": self.stopped,
            "winner": winner.name if winner else None,
            "test": self.test,
        }

    def _row(self, number: int) -> dict[str, Any]:
        """Return a result as JSON values, compared with the best one before it."""
        result = self.results[number]
        best = best_result(self.results[:number])
        if best is None and number > 0:  # a baseline without weights came first
            best = self.results[0]
        row = {
            "name": result.name,
            "description": result.description,
            "trained": result.trained,
            "seconds": round(result.seconds, 1),
            "validation": result.scores(),
            "compared_with": None,
            "p": None,
            "better": None,
            "leaves_weights": result.weights is not None,
        }
        if best is not None:
            row["compared_with"] = best.name
            row["p"] = p_value(best, result)
            row["better"] = is_better(best, result)
        return row

    def table(self) -> list[str]:
        """Return the results as lines of a table."""
        table = Table(box=None, pad_edge=False)
        for column in ("candidate", "validation top-1, 95 %"):
            table.add_column(column, no_wrap=True)
        for column in ("trained", "seconds"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("description")  # folded, the others are not
        for result in self.results:
            table.add_row(
                result.name,
                top1_with_interval(result.scores()),
                f"{result.trained:,}",
                f"{result.seconds:.0f}",
                result.description,
            )
        text = StringIO()
        Console(file=text, width=WIDTH).print(table)
        return [line.rstrip() for line in text.getvalue().splitlines()]


def _narrow_win(winner: CandidateResult, baseline: CandidateResult) -> str:
    """Say why the winner won without being significantly better than a baseline."""
    if winner.errors == baseline.errors:
        return (
            f"{winner.name} and {baseline.name} have the same validation top-1; {winner.name} "
            "leaves weights to use"
        )
    return (
        f"{winner.name} has a higher validation top-1 than {baseline.name}; the difference is not "
        "significant"
    )


def top1_with_interval(scores: Metrics) -> str:
    """Return a top-1 with its 95 % interval, in words."""
    return f"{scores['top1']:.4f} ({scores['top1_low']:.4f} to {scores['top1_high']:.4f})"
