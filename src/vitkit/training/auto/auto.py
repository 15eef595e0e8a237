"""One call of `vitkit train DATA --auto`, from the check of the data to the table of results."""

from __future__ import annotations

import time
from dataclasses import replace

from vitkit.io.atomic import write_bytes
from vitkit.training.auto.context import SearchContext, make_context
from vitkit.training.auto.feature_candidates import LinearCandidate, NeighbourCandidate
from vitkit.training.auto.results import Clock
from vitkit.training.auto.search import (
    Candidate,
    CandidateSearch,
    check_budget,
    parse_budget,
)
from vitkit.training.auto.settings import shared_settings
from vitkit.training.auto.training_candidates import finetuning_candidate, scratch_candidate
from vitkit.training.auto.winner import evaluate_winner
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.interrupts import raise_on_signal
from vitkit.training.monitoring.terminal import Display
from vitkit.training.result import TrainResult
from vitkit.training.run_folder import RunFolder, check_output, locked, new_folder
from vitkit.training.train import train

BUDGET = "10m"
"""Default of the setting `budget`."""


def run_search(config: TrainConfig, clock: Clock = time.monotonic) -> TrainResult:
    """Search over candidates, and evaluate the winner once on the test split.

    The folder has `search.json`, the winner in `weights/best.safetensors`, and a run folder for
    each candidate that trained.

    Args:
        config: `data`, `budget`, and settings that are passed on to every candidate.
        clock: returns the current time, in seconds.

    Returns:
        The folder, the winner's weights there, its last weights in its own run, its metrics on
        validation and test, and why the search ended.

    Raises:
        UserError: wrong settings or data, or a budget too small for one epoch; nothing is written.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1 came; the results so far are kept.
        NonFiniteError: there is no winner, because training diverged.
    """
    started = clock()
    budget = BUDGET if config.budget is None else config.budget
    seconds = parse_budget(budget)
    settings = shared_settings(config)
    display = Display(total=0, done=0, quiet=config.quiet)
    lines = list[str]()

    def log(line: str) -> None:
        lines.append(line)
        display.print(line)

    # Refused before the data are read, which may take minutes.
    check_output(config)
    with raise_on_signal():
        context = make_context(settings, log, clock, train)
        candidates = _candidates(context)
        # needs measurements, but no folder: nothing is written for a budget that is too small
        check_budget(budget, started, clock, candidates)
        run = new_folder(replace(config, model="auto"), log)
        with locked(run.root):
            data = context.plan.dataset.name
            search = CandidateSearch(run, data, seconds, log, clock, started)
            try:
                winner = search.run(candidates)
                metrics = evaluate_winner(search, winner, context.plan, test=config.test)
                search.save()
            finally:  # the table of an interrupted search is written, too
                for line in search.table():
                    log(line)
                write_bytes(run.log, "".join(f"{line}\n" for line in lines).encode())
    last = RunFolder(run.root / winner.name).last
    return TrainResult(run.root, run.best, last, metrics, search.stopped)


def _candidates(context: SearchContext) -> list[Candidate]:
    """Return the candidates from cheap to expensive."""
    if context.pretrained is None:
        return [NeighbourCandidate(context), scratch_candidate(context)]
    return [NeighbourCandidate(context), LinearCandidate(context), finetuning_candidate(context)]
