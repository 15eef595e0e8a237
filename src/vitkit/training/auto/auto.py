"""One call of `vitkit train DATA --auto`, from the check of the data to the table of results."""

from __future__ import annotations

import time
from collections.abc import Callable

from vitkit.devices import on_device
from vitkit.distributed import in_world
from vitkit.errors import CheckpointError, SettingError
from vitkit.evaluation.predict import evaluate_outputs, predict_batches
from vitkit.frozen import replace
from vitkit.io.atomic import write_bytes
from vitkit.training.auto.context import SearchContext
from vitkit.training.auto.feature_candidates import LinearCandidate, NeighbourCandidate
from vitkit.training.auto.heuristics import ImageStatistics
from vitkit.training.auto.results import CandidateResult
from vitkit.training.auto.search import (
    Candidate,
    CandidateSearch,
    Clock,
    check_budget,
    parse_budget,
)
from vitkit.training.auto.training_candidates import finetuning_candidate, scratch_candidate
from vitkit.training.config.field_types import Settings
from vitkit.training.config.meaning import fields_where
from vitkit.training.config.merging import layered
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.initial_weights import CATALOGUE
from vitkit.training.interrupts import raise_on_signal
from vitkit.training.monitoring.terminal import Display
from vitkit.training.run_folder import RunFolder, check_output, locked, new_folder
from vitkit.training.setup import Plan, make_plan
from vitkit.training.train import TrainResult
from vitkit.weights.formats.vitkit import DESCRIBED, save
from vitkit.weights.load import load

BUDGET = "10m"
"""Default of the setting `budget`."""
PIXEL_SPEC = {"image_size": 16, "patch_size": 16}
"""Size to which images are resized before their pixels are compared."""


def run_search(config: TrainConfig, clock: Clock = time.monotonic) -> TrainResult:
    """Search over candidates, and evaluate the winner once on the test split.

    The folder has `ladder.json`, the winner in `weights/best.safetensors`, and a run folder for
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
    settings = _user_settings(config)
    display = Display(total=0, done=0, quiet=config.quiet)
    lines = list[str]()

    def say(line: str) -> None:
        lines.append(line)
        display.say(line)

    # Refused before the data are read, which may take minutes.
    check_output(config)
    with raise_on_signal():
        context = _make_context(settings, say, clock)
        candidates = _candidates(context)
        check_budget(budget, started, clock, candidates)
        run = new_folder(replace(config, model="auto"), say)
        with locked(run.root):
            data = context.plan.dataset.name
            search = CandidateSearch(run, data, seconds, say, clock, started)
            try:
                winner = search.run(candidates)
                metrics = _evaluate_winner(search, winner, context, test=config.test)
                search.save()
            finally:  # the table of an interrupted search is written, too
                for line in search.table():
                    say(line)
                write_bytes(run.log, "".join(f"{line}\n" for line in lines).encode())
    last = RunFolder(run.root / winner.name).last
    return TrainResult(run.root, run.best, last, metrics, search.stopped)


def _user_settings(config: TrainConfig) -> Settings:
    """Return the user's settings for the candidates.

    Raises:
        SettingError: a setting is set that the search decides.
    """
    if config.resume is not None:
        raise SettingError(
            "--auto starts afresh and takes no --resume; a candidate that was stopped goes on as a "
            "run of its own, without --auto: vitkit train --resume RUN/CANDIDATE"
        )
    given = config.to_json()
    defaults = TrainConfig(data=config.data).to_json()
    changed = {name for name in given if given[name] != defaults[name]}
    refused = fields_where(TrainConfig, with_auto="refused")
    decided = [name for name in refused if name in changed]
    # With weights, `model` selects published ones; from scratch, the search chooses the size.
    if config.model is not None and config.pretrained is None:
        decided.append("model")
    if decided:
        pronoun = "it" if len(decided) == 1 else "them"
        raise SettingError(
            f"--auto decides {', '.join(decided)}; leave {pronoun} out, or train without --auto"
        )
    if in_world():
        raise SettingError("--auto runs in one process; leave torchrun out")
    passed_on = fields_where(TrainConfig, with_auto="passed on")
    return {name: given[name] for name in passed_on if name in changed or name == "data"}


def _make_context(settings: Settings, say: Callable[[str], None], clock: Clock) -> SearchContext:
    """Open and check the data, and the weights to start from, if any."""
    started = clock()
    pretrained = settings.pop("pretrained", None)
    plan: Plan | None = None
    if pretrained is not None:
        try:
            plan = _make_plan(settings, {"pretrained": pretrained})
        except CheckpointError as error:
            if pretrained != CATALOGUE:  # a file that the user named must be readable
                raise
            say(f"no published weights within reach ({error}); from noise, then")
            pretrained = None
            settings.pop("model", None)
    if plan is None:
        plan = _make_plan(settings, {"spec": PIXEL_SPEC, "fit": "squash"})
    for line in plan.notes:
        say(line)
    if "val" not in plan.dataset.splits:
        raise SettingError("--auto chooses on validation, and there is none; set val_fraction")
    statistics = ImageStatistics.of(plan.dataset.splits["train"])
    say(statistics.describe())
    return SearchContext(settings, pretrained, plan, statistics, clock() - started, say, clock)


def _make_plan(settings: Settings, layer: Settings) -> Plan:
    return make_plan(TrainConfig(**layered(settings, {"batch_size": 1}, layer)))


def _candidates(context: SearchContext) -> list[Candidate]:
    """Return the candidates from cheap to expensive."""
    if context.pretrained is None:
        return [NeighbourCandidate(context), scratch_candidate(context)]
    return [NeighbourCandidate(context), LinearCandidate(context), finetuning_candidate(context)]


def _evaluate_winner(
    search: CandidateSearch, winner: CandidateResult, context: SearchContext, *, test: bool
) -> dict[str, dict[str, float]]:
    """Evaluate the winner on the test split, and store the metrics with its weights.

    Returns:
        Split -> metrics, of validation and test.
    """
    plan = context.plan
    # The only evaluation on test, after all choices are made.
    best = load(search.folder.best)
    metrics: dict[str, dict[str, float]] = dict(best.metadata["metrics"])
    if not test or "test" not in plan.dataset.splits:
        return metrics
    batches = predict_batches(
        on_device(best.model, plan.device),
        plan.dataset.splits["test"],
        best.preprocess,
        device=plan.device,
        workers=plan.workers,
    )
    metrics["test"], _ = evaluate_outputs(batches, len(plan.dataset.classes), best.temperature)
    search.test = metrics["test"]
    search.say(f"test, {search.test['images']:.0f} images, read once, with {winner.name}:")
    # `save` writes the metadata that it describes itself.
    metadata = {key: value for key, value in best.metadata.items() if key not in DESCRIBED}
    metadata["metrics"] = metrics
    save(
        search.folder.best,
        best.model,
        preprocess=best.preprocess,
        classes=best.classes,
        **metadata,
    )
    return metrics
