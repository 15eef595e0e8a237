"""`train`: from the settings to the test score, in the order in which a run is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import torch

from vitkit.data.loading.loader import Batch, batches
from vitkit.devices import resolve_device
from vitkit.distributed import World, in_world, is_launched, joined
from vitkit.errors import SettingError
from vitkit.evaluation.metrics import Metrics
from vitkit.frozen import replace as replaced
from vitkit.io.atomic import remove_temporaries, write_bytes
from vitkit.messages import plural
from vitkit.training.build import Run, make_run, make_transform, schedule_of
from vitkit.training.callbacks.ema import AverageWeights, TrainMode
from vitkit.training.callbacks.evaluate import Evaluate
from vitkit.training.callbacks.missing_images import other_data, saved_when_images_fail
from vitkit.training.callbacks.report import Report, log_model, log_plan
from vitkit.training.callbacks.save import Save, SaveBeforeValidation
from vitkit.training.callbacks.stop import HandleBadNumbers, Stop
from vitkit.training.config.field_types import Settings
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.config.yaml_files import read_yaml, to_yaml
from vitkit.training.finish import finish
from vitkit.training.initial_weights import make_model
from vitkit.training.interrupts import raise_on_signal, stop_on_signal
from vitkit.training.monitoring.augmented_grid import save_augmented_grid
from vitkit.training.monitoring.metric_files import drop_rows_after
from vitkit.training.monitoring.run_log import RunLog
from vitkit.training.monitoring.trackers import check_trackers
from vitkit.training.optimization.precision import Precision
from vitkit.training.probe import linear_probe, nearest_neighbours
from vitkit.training.resume import (
    StoppedRun,
    describe_stopped_run,
    keep_earlier_decisions,
    settings_to_resume,
)
from vitkit.training.run_folder import (
    RunFolder,
    check_output,
    locked,
    new_folder,
    resume_hint,
    resumed_folder,
)
from vitkit.training.setup import Plan, make_plan
from vitkit.training.state.image_list import write_image_list
from vitkit.training.state.save import load_state, remove_unfinished, set_aside_damaged
from vitkit.training.trainer import Callback, Trainer
from vitkit.training.tuning.compilation import compiler_problem
from vitkit.training.tuning.tune import tune_settings


@dataclass(frozen=True)
class TrainResult:
    """The results of a run.

    Attributes:
        run: its folder.
        best: weights of the best epoch by validation top-1.
        last: weights of the last step.
        metrics: split -> metrics of the best weights: `val`, and `test` where there is one.
        stopped: why the run ended.
    """

    run: Path
    best: Path
    last: Path
    metrics: dict[str, Metrics] = field(default_factory=dict)
    stopped: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values, for another process."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in vars(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainResult:
        """Build the result from the values of `to_json`."""
        paths = {name: Path(values[name]) for name in ("run", "best", "last")}
        return cls(**values | paths)


def train(config: TrainConfig, callbacks: Sequence[Callable[[], Callback]] = ()) -> TrainResult:
    """Train or resume, and evaluate the best weights once on the test split.

    Args:
        config: every setting.
        callbacks: further concerns of the run, called before its own: classes, or functions
            without arguments that build one. With `devices` above 1 the processes import them by
            name: they must be in a module, not in a script or a function.

    Raises:
        UserError: anything wrong with the settings, the data or the place to write, before the
            first step.
        NonFiniteError: the loss or the gradient is not a finite number.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1 came; everything is saved.
    """
    check_trackers(config.logger)
    if config.devices > 1 and not in_world():
        return _launched(config, callbacks)
    with joined(resolve_device(config.device), config.timeout) as world:
        return _train(config, callbacks, world)


def _launched(config: TrainConfig, callbacks: Sequence[Callable[[], Callback]]) -> TrainResult:
    """Train in `devices` processes of their own."""
    from vitkit.training.parallel.launch import launch

    names = [_importable(callback) for callback in callbacks]
    return TrainResult.from_json(launch(config, names))


def _importable(callback: Callable[[], Callback]) -> str:
    """Return `module:qualname`, by which another process imports it. Raises `SettingError`."""
    name = f"{callback.__module__}:{callback.__qualname__}"
    try:
        found = None if callback.__module__ == "__main__" else resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not callback:
        raise SettingError(
            f"--devices starts processes that import the callbacks, and {name} cannot be "
            f"imported; put {callback.__name__} at the top of a module of its own, or start with "
            f"torchrun"
        )
    return name


def callbacks_of(run: Run, report: Report, stop: Stop, save: Save) -> list[Callback]:
    """List the concerns of a run, in the order that exact resuming needs."""
    return [
        *run.further,
        TrainMode(run.model),
        HandleBadNumbers(run),
        *([AverageWeights(run.ema, run.model)] if run.ema else []),
        SaveBeforeValidation(save),  # validation may be long, and be killed
        Evaluate(run, save),
        report,
        stop,  # decides before `save`, which writes what an ending run leaves
        save,
    ]


def _train(
    config: TrainConfig, callbacks: Sequence[Callable[[], Callback]], world: World
) -> TrainResult:
    """Train as one process of the run."""
    with ExitStack() as stack:
        config, stopped = _beginning(config, world, stack)
        plan = _planned(config, world, goes_on=stopped is not None)
        aside: list[str] = []
        folder = _folder(config, stopped, world, stack, aside)
        world.announce(folder.root)
        config = replaced(plan.config, threads=config.threads or torch.get_num_threads())
        torch.set_num_threads(config.threads or 1)
        torch.manual_seed(config.seed)
        model = make_model(plan.spec, plan.weights, config, plan.device)
        plan = replace(plan, config=config, weights=None)  # the model has them
        log = stack.enter_context(_log(plan, folder, stopped, world))
        speaks = world.first and not is_launched()
        stop = stack.enter_context(stop_on_signal(partial(_left, folder, log) if speaks else None))
        for line in (*aside, *plan.notes, *(stopped.notes if stopped else ())):
            log.say(line)
        log_model(plan, log, model)
        if stopped is not None and config.compile and (missing := compiler_problem(plan.device)):
            raise SettingError(f"the run is compiled and {missing}; go on where there is one")
        with raise_on_signal(partial(resume_hint, folder)):
            plan = plan.with_settings(world.decided(lambda: tune_settings(plan, model, log.say)))
        log.set_total(plan.last_step)
        precision = cast(Precision, "off" if config.probe else plan.config.amp)
        run = make_run(plan, folder, log, model, precision, stop, world)
        if config.probe:
            return _probed(run)
        return _trained(run, stopped, [make() for make in callbacks])


def _probed(run: Run) -> TrainResult:
    """Fit a probe on features; the backbone stays as it is."""
    folder, config = run.folder, run.plan.config
    _prepare(run, None)
    with raise_on_signal(partial(resume_hint, folder)):
        if config.probe == "knn":
            stopped = "a look at the nearest neighbours"
            metrics = nearest_neighbours(run)
            return TrainResult(folder.root, folder.best, folder.last, metrics, stopped)
        stopped, scores = "a linear probe", linear_probe(run)
        for path in (folder.best, folder.last):
            Save(run).save_weights(path, scores)
    metrics = finish(run, stopped)
    return TrainResult(folder.root, folder.best, folder.last, metrics, stopped)


def _trained(run: Run, stopped: StoppedRun | None, further: list[Callback]) -> TrainResult:
    """Make the steps that remain, and finish."""
    plan, folder, progress = run.plan, run.folder, run.progress
    run.further = further
    report, stop, save = Report(run), Stop(run), Save(run)
    if stopped is not None:
        load_state(stopped.state, run.registry)
        if what := plan.dataset.difference(progress.data):
            raise other_data(run, what)
        save.saved_step = progress.step
        run.log.say(f"going on from step {progress.step} ({stopped.state})")
    over = progress.step >= plan.last_step or stop.out_of_patience() is not None
    finished = stopped is not None and over and not progress.unvalidated
    _prepare(run, stopped, finished=finished)
    callbacks = callbacks_of(run, report, stop, save)
    trainer = Trainer(
        run.training_step,
        progress,
        partial(_batches, run, report),
        schedule=schedule_of(plan),
        steps_per_epoch=plan.steps.steps_per_epoch,
        epochs=plan.config.epochs,
        last_step=plan.last_step,
        callbacks=callbacks,
    )
    for part in (run, *callbacks):
        run.registry.check_all_registered(part)
    run.restart_clock()
    with saved_when_images_fail(run, save):
        trainer.run()
        ended = trainer.stopped or _planned_end(plan)
        metrics = finish(run, ended)
    return TrainResult(folder.root, folder.best, folder.last, metrics, ended)


def _planned_end(plan: Plan) -> str:
    if plan.last_step < plan.total_steps:
        return plural(plan.last_step, "step")
    epochs = plan.config.epochs
    return "the epoch" if epochs == 1 else f"all {epochs} epochs"


def _batches(run: Run, report: Report, steps: range) -> Iterable[Batch]:
    """Return the batches of the steps that remain; what comes before them is not training time."""
    if run.targets is not None:
        run.targets.prepare(steps, run.log.say)
    plan = run.plan
    arriving = batches(plan.steps, steps, workers=plan.workers, stopped=run.stops_alone)
    run.restart_clock()
    return report.watched(arriving)


def _beginning(
    config: TrainConfig, world: World, stack: ExitStack
) -> tuple[TrainConfig, StoppedRun | None]:
    """Find the stopped run that goes on, with its settings; else check the new run's folder.

    A run that goes on is locked first, by `stack`: another process may be about to end there.

    Raises:
        UserError: the run cannot go on so, or a new one cannot be there.
    """

    def find() -> dict[str, Any] | None:
        run = None if config.resume is None else resumed_folder(config.resume, config.output)
        if run is None:
            return None
        stack.enter_context(locked(run.root))
        return describe_stopped_run(run)

    found = world.decided(find)
    if found is not None:
        return settings_to_resume(config, found)
    world.decided(lambda: check_output(config))
    return TrainConfig(**world.decided(lambda: keep_earlier_decisions(config).to_json())), None


def _planned(config: TrainConfig, world: World, *, goes_on: bool) -> Plan:
    """Make the plan on the first process first, so that the others read its caches."""
    plans: list[Plan] = []
    world.decided(lambda: plans.append(make_plan(config, world, goes_on=goes_on)))
    return plans[0] if plans else make_plan(config, world, goes_on=goes_on)


def _folder(
    config: TrainConfig,
    stopped: StoppedRun | None,
    world: World,
    stack: ExitStack,
    aside: list[str],
) -> RunFolder:
    """Return the folder of the run: the stopped one's, or a new one, locked by `stack`."""
    if stopped is not None:
        return RunFolder(stopped.root)
    folder = RunFolder(Path(world.decided(lambda: str(new_folder(config, aside.append).root))))
    world.decided(lambda: stack.enter_context(locked(folder.root)))
    return folder


def _log(plan: Plan, folder: RunFolder, stopped: StoppedRun | None, world: World) -> RunLog:
    return RunLog(
        folder,
        total=plan.last_step,
        done=0 if stopped is None else stopped.step,
        quiet=plan.config.quiet,
        writes=world.first,
        unvalidated=stopped is not None and stopped.unvalidated,
    )


def _prepare(run: Run, stopped: StoppedRun | None, *, finished: bool = False) -> None:
    """Write the settings, put the folder in order, and log how the run goes on.

    Args:
        run: the run.
        stopped: what goes on in its folder, if anything does.
        finished: the run has nothing left to train; its record stays as it is.
    """
    plan, log, world = run.plan, run.log, run.world
    config = plan.config
    if stopped is None and config.resume == "auto":
        log.say(f"nothing to resume in {run.folder.root}; starting afresh")
    kept = replaced(config, output=str(run.folder.root), resume=None, overwrite=False)
    world.decided(lambda: _order(run, stopped, None if finished else kept))
    if stopped is not None:
        for line in stopped.describe_changes(finished=finished):
            log.say(line)
    if not finished:
        log_plan(run)
    world.decided(lambda: log.track(config.logger, kept.to_json()))
    if config.save_augmented_grid and stopped is None:
        world.decided(lambda: _show_augmented(run))


def _show_augmented(run: Run) -> None:
    plan = run.plan
    batch = next(plan.steps[0].parts(plan.config.grad_accum_steps))
    save_augmented_grid(run.folder.augmented, make_transform(plan), batch, plan.dataset.classes)


def _order(run: Run, stopped: StoppedRun | None, kept: TrainConfig | None) -> None:
    """Remove what a killed process left, restore or list, and write the settings.

    Args:
        run: the run.
        stopped: what goes on there, if anything does.
        kept: the settings to write; `None` for a finished run, whose record stays as it is.
    """
    folder = run.folder
    remove_unfinished(folder.state)
    for place in (folder.root, folder.best.parent, folder.teacher):
        remove_temporaries(place)
    if stopped is not None:
        set_aside_damaged(folder.state, stopped.state)
        drop_rows_after(
            folder, stopped.step, unvalidated=stopped.unvalidated, goes_on=kept is not None
        )
    else:
        write_image_list(folder.images, run.plan.dataset)
    if kept is not None:
        write_bytes(folder.config, to_yaml(kept.to_json()).encode())


def _left(run: RunFolder, log: RunLog) -> str:
    """Return the line on how to resume a run that is left at once."""
    log.display.stop()
    return resume_hint(run)


def resumed_settings(
    resume: str | None, output: str | None, recipe: Settings | None = None
) -> Settings:
    """Return the settings that a resumed run was started with; empty for a new run.

    Args:
        resume: as in `TrainConfig`, as a flag or keyword.
        output: the same.
        recipe: settings of a recipe or a YAML file, which may have an `output`, too.

    Raises:
        OutputError, SettingError: a run that is not there, or whose settings cannot be read.
    """
    output = output or (recipe or {}).get("output")
    run = None if resume is None else resumed_folder(resume, output)
    if run is None:
        return {}
    stored = read_yaml(run.config)
    kept = {key: value for key, value in stored.items() if key not in ("resume", "overwrite")}
    return kept | {"output": str(run.root)}
