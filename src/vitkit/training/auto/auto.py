"""One call of `vitkit train DATA --auto`, from the data check to the table."""

from __future__ import annotations

import time
from collections.abc import Callable

from vitkit.devices import on_device
from vitkit.distributed import in_world
from vitkit.errors import CheckpointError, SettingError
from vitkit.evaluation.evaluate import examine, outputs
from vitkit.frozen import replace
from vitkit.io.atomic import write_bytes
from vitkit.training.auto.candidates import (
    LinearHead,
    Neighbours,
    SearchContext,
    finetuning,
    from_scratch,
)
from vitkit.training.auto.heuristics import Looks
from vitkit.training.auto.search import Climb, Clock, Outcome, Rung, refuse_small, seconds_of
from vitkit.training.config.train_config import Settings, TrainConfig, layered
from vitkit.training.initial_weights import CATALOGUE
from vitkit.training.interrupts import raise_on_signal
from vitkit.training.monitoring.terminal import Display
from vitkit.training.run_folder import RunFolder, check_output, new_folder
from vitkit.training.run_lock import locked
from vitkit.training.setup import Plan, make_plan
from vitkit.training.train import TrainResult
from vitkit.weights.formats.vitkit import DESCRIBED, save
from vitkit.weights.load import load

BUDGET = "10m"
YOURS = ("data", "data_root", "cache", "follow_links", "ignore_extra_classes", "bad_images",
         "val_fraction", "balance", "pretrained", "trust_pickle", "allow_partial", "model", "seed",
         "device", "threads", "workers", "amp",
         "attention_kernel", "compile", "logger", "quiet")  # fmt: skip
"""Settings that `--auto` leaves to the user, besides `OWN`."""
BY_PIXELS = {"image_size": 16, "patch_size": 16}
"""Images whose pixels are compared, where there are no weights, are brought to this size."""
OWN = ("auto", "budget", "output", "overwrite", "test")


def climb(config: TrainConfig, clock: Clock = time.monotonic) -> TrainResult:
    """Check the data, climb, look at the test split once with the winner, and say what came of it.

    The folder has `ladder.json`, the winner in `weights/best.safetensors`, and a run folder for
    each rung that trained something.

    Args:
        config: `data`, `budget`, and whatever `YOURS` names.
        clock: what time it is, in seconds.

    Returns:
        The folder, the winner's weights there, its last ones in its own run, the metrics of its
        validation and test, and why the climb ended.

    Raises:
        UserError: wrong settings or data, or a budget too small for one epoch; nothing is written.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1 came; what is done is kept.
        NonFiniteError: there is no winner, as training diverged.
    """
    started, budget = clock(), BUDGET if config.budget is None else config.budget
    total, settings = seconds_of(budget), _yours(config)
    display, lines = Display(total=0, done=0, quiet=config.quiet), list[str]()

    def say(line: str) -> None:
        lines.append(line)
        display.say(line)

    check_output(config)
    with raise_on_signal():
        ground = _ground(settings, say, clock)
        rungs = _rungs(ground)
        refuse_small(budget, started, clock, rungs)
        run = new_folder(replace(config, model="auto"), say)
        with locked(run.root):
            climbed = Climb(run, ground.plan.dataset.name, total, say, clock, started)
            try:
                winner = climbed.up(rungs)
                metrics = _tested(climbed, winner, ground, config.test)
                climbed.keep()
            finally:
                for line in climbed.table():
                    say(line)
                write_bytes(run.log, "".join(f"{line}\n" for line in lines).encode())
    return TrainResult(run.root, run.best, RunFolder(run.root / winner.name).last, metrics,
                       climbed.stopped)  # fmt: skip


def _yours(config: TrainConfig) -> Settings:
    """What the user has set of `YOURS`. Raises `SettingError` for anything else that is set."""
    if config.resume is not None:
        raise SettingError(
            "--auto starts afresh and takes no --resume; a rung that was stopped goes on as a run "
            "of its own, without --auto: vitkit train --resume RUN/RUNG"
        )
    given, usual = config.to_json(), TrainConfig(data=config.data).to_json()
    taken = [name for name in given if given[name] != usual[name] and name not in (*YOURS, *OWN)]
    if config.model is not None and config.pretrained is None:
        taken.append("model")
    if taken:
        raise SettingError(
            f"--auto decides {', '.join(taken)}; leave {'it' if len(taken) == 1 else 'them'} out, "
            f"or train without --auto"
        )
    if in_world():
        raise SettingError("--auto runs in one process; leave torchrun out")
    return {name: given[name] for name in YOURS if given[name] != usual[name] or name == "data"}


def _ground(settings: Settings, say: Callable[[str], None], clock: Clock) -> SearchContext:
    """The data, checked, and the weights to start from, where there are any."""
    started = clock()
    pretrained = settings.pop("pretrained", None)
    plan: Plan | None = None
    if pretrained is not None:
        try:
            plan = _plan(settings, {"pretrained": pretrained})
        except CheckpointError as error:
            if pretrained != CATALOGUE:
                raise
            say(f"no published weights within reach ({error}); from noise, then")
            pretrained = None
            settings.pop("model", None)
    if plan is None:
        plan = _plan(settings, {"spec": BY_PIXELS, "fit": "squash"})
    for line in plan.notes:
        say(line)
    if "val" not in plan.dataset.splits:
        raise SettingError("--auto chooses on validation, and there is none; set val_fraction")
    looks = Looks.of(plan.dataset.splits["train"])
    say(looks.says())
    return SearchContext(settings, pretrained, plan, looks, clock() - started, say, clock)


def _plan(settings: Settings, more: Settings) -> Plan:
    return make_plan(TrainConfig(**layered(settings, {"batch_size": 1}, more)))


def _rungs(ground: SearchContext) -> list[Rung]:
    if ground.pretrained is None:
        return [Neighbours(ground), from_scratch(ground)]
    return [Neighbours(ground), LinearHead(ground), finetuning(ground)]


def _tested(
    climbed: Climb, winner: Outcome, ground: SearchContext, asked: bool
) -> dict[str, dict[str, float]]:
    """Look at the test split with the winner, and write it with that; both splits' metrics."""
    best, dataset, plan = load(climbed.folder.best), ground.plan.dataset, ground.plan
    metrics: dict[str, dict[str, float]] = dict(best.metadata["metrics"])
    if not asked or "test" not in dataset.splits:
        return metrics
    made = outputs(on_device(best.model, plan.device), dataset.splits["test"], best.preprocess,
                   device=plan.device, workers=plan.workers)  # fmt: skip
    metrics["test"], _ = examine(made, len(dataset.classes), best.temperature)
    climbed.test = metrics["test"]
    climbed.say(f"test, {climbed.test['images']:.0f} images, read once, with {winner.name}:")
    rest = {key: v for key, v in best.metadata.items() if key not in DESCRIBED}
    save(climbed.folder.best, best.model, preprocess=best.preprocess, classes=best.classes,
         **rest | {"metrics": metrics})  # fmt: skip
    return metrics
