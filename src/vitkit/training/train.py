"""One call of `vitkit train`, from the settings to the test score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import torch

from vitkit.data.sources.open import Dataset
from vitkit.devices import resolve_device
from vitkit.distributed import World, in_world, is_launched, joined
from vitkit.errors import SettingError, plural
from vitkit.evaluation.calibration import calibrate
from vitkit.evaluation.confusion_plot import LARGEST, confusion_matrix, png
from vitkit.evaluation.evaluate import Output, count_predictions, examine
from vitkit.evaluation.metrics import Metrics, headline
from vitkit.frozen import replace as replaced
from vitkit.io.atomic import remove_temporaries, write_bytes
from vitkit.models.vit import ViT
from vitkit.training.build import make_transform
from vitkit.training.callbacks.missing_images import saved_when_images_fail
from vitkit.training.config.train_config import Settings, TrainConfig, read_yaml, to_yaml
from vitkit.training.initial_weights import make_model
from vitkit.training.interrupts import raise_on_signal, stop_on_signal
from vitkit.training.monitoring.augmented_grid import save_augmented_grid
from vitkit.training.monitoring.metric_files import drop_rows_after, tested_at
from vitkit.training.monitoring.run_log import RunLog, Silence
from vitkit.training.monitoring.trackers import check_trackers
from vitkit.training.optimization.precision import Precision
from vitkit.training.parallel.fsdp import placed_as, unsharded_model
from vitkit.training.probe import PROBES, NeighbourProbe, without_effect
from vitkit.training.recipes.reference import WITHOUT_WEIGHT, receipt_of
from vitkit.training.resume import WHEREABOUTS, StoppedRun, decided_before, going_on, stopped_run
from vitkit.training.run_folder import (
    RunFolder,
    check_output,
    new_folder,
    resumed_folder,
    what_is_left,
)
from vitkit.training.run_lock import locked
from vitkit.training.setup import Plan, make_plan
from vitkit.training.state.image_list import write_image_list
from vitkit.training.state.save import clean, set_aside_damaged
from vitkit.training.trainer import Trainer
from vitkit.training.tuning.trials import no_compiler, try_out
from vitkit.weights.formats.vitkit import DESCRIBED, save
from vitkit.weights.load import load

MOST_LOGITS = 2**28
"""Validation logits that the temperature is fitted on at most, 1 GB; of more, every n-th batch."""


@dataclass(frozen=True)
class TrainResult:
    """What a run left.

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
        """JSON values, for another process."""
        return {name: str(v) if isinstance(v, Path) else v for name, v in vars(self).items()}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainResult:
        """What `to_json` gave."""
        paths = {name: Path(values[name]) for name in ("run", "best", "last")}
        return cls(**values | paths)


def train(config: TrainConfig, trainer: type[Trainer] = Trainer) -> TrainResult:
    """Train, or go on training, and evaluate the best weights once on the test split.

    Args:
        config: every setting.
        trainer: the loop; a subclass may add to its steps. With `devices` above 1 the processes
            import it by its name: it must be in a module, not in a script or a function.

    Raises:
        UserError: anything wrong with the settings, the data or the place to write, before the
            first step.
        NonFiniteError: the loss or the gradient is not a finite number.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1 came; everything is saved.
    """
    check_trackers(config.logger)
    if config.devices > 1 and not in_world():
        return _launched(config, trainer)
    with joined(resolve_device(config.device), config.timeout) as world:
        return _train(config, trainer, world)


def _launched(config: TrainConfig, trainer: type[Trainer]) -> TrainResult:
    """The same, by `devices` processes of their own."""
    from vitkit.training.parallel.launch import launch

    return TrainResult.from_json(launch(config, _importable(trainer)))


def _importable(trainer: type[Trainer]) -> str:
    """`module:qualname`, by which another process finds a loop. Raises `SettingError`."""
    name = f"{trainer.__module__}:{trainer.__qualname__}"
    try:
        found = None if trainer.__module__ == "__main__" else resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not trainer:
        raise SettingError(
            f"--devices starts processes that import the loop, and {name} cannot be imported; put "
            f"{trainer.__name__} at the top of a module of its own, or start with torchrun"
        )
    return name


def _train(config: TrainConfig, trainer: type[Trainer], world: World) -> TrainResult:
    """One process's part of it."""
    with ExitStack() as stack:
        config, stopped = _beginning(config, world, stack)
        plan = _planned(config, world, goes_on=stopped is not None)
        aside: list[str] = []
        if stopped is not None:
            run = RunFolder(stopped.root)
        else:
            made = world.decided(lambda: str(new_folder(config, aside.append).root))
            run = RunFolder(Path(made))
            world.decided(lambda: stack.enter_context(locked(run.root)))
        world.announce(run.root)
        config = replaced(plan.config, threads=config.threads or torch.get_num_threads())
        plan = replace(plan, config=config)
        torch.set_num_threads(config.threads or 1)
        torch.manual_seed(config.seed)
        model = make_model(plan.spec, plan.weights, config, plan.device)
        plan = replace(plan, weights=None)  # the model has them
        done = 0 if stopped is None else stopped.step
        log = stack.enter_context(
            RunLog(run, total=plan.last_step, done=done, quiet=config.quiet,
                   unvalidated=stopped is not None and stopped.unvalidated)
            if world.first
            else Silence()
        )  # fmt: skip
        speaks = world.first and not is_launched()
        stop = stack.enter_context(stop_on_signal(partial(_left, run, log) if speaks else None))
        for line in (*aside, *plan.notes, *(stopped.notes if stopped else ())):
            log.say(line)
        _say_model(plan, log, model)
        if stopped is not None and config.compile and (missing := no_compiler(plan.device)):
            raise SettingError(f"the run is compiled and {missing}; go on where there is one")
        left = partial(what_is_left, run)
        with raise_on_signal(left):
            plan = plan.with_settings(world.decided(lambda: try_out(plan, model, log.say)))
        log.lasts(plan.last_step)
        precision = cast(Precision, "off" if config.probe else plan.config.amp)
        kind = PROBES[config.probe] if config.probe else trainer
        loop = kind(plan, run, log, model, precision, stop, world)
        if stopped is not None:
            loop.resume(stopped.state)
        elif config.resume == "auto":
            log.say(f"nothing to resume in {run.root}; starting afresh")
        finished = stopped is not None and loop.is_finished
        kept = replaced(plan.config, output=str(run.root), resume=None, overwrite=False)
        world.decided(lambda: _prepare(run, stopped, None if finished else kept, plan.dataset))
        for line in stopped.says_changes(finished=finished) if stopped else ():
            log.say(line)
        if not finished:
            _say_plan(plan, run, log, world)
        world.decided(lambda: log.track(config.logger, kept.to_json()))
        if config.save_augmented_grid and stopped is None:
            world.decided(lambda: _show_augmented(run, plan))
        with raise_on_signal(left) if config.probe else nullcontext():
            loop.train()
        with nullcontext() if config.probe else saved_when_images_fail(loop):
            metrics = loop.scores if isinstance(loop, NeighbourProbe) else _finish(loop, run, log)
    return TrainResult(run.root, run.best, run.last, metrics, loop.stopped)


def _show_augmented(run: RunFolder, plan: Plan) -> None:
    batch = next(plan.steps[0].parts(plan.config.grad_accum_steps))
    save_augmented_grid(run.augmented, make_transform(plan), batch, plan.dataset.classes)


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
        return stopped_run(run)

    found = world.decided(find)
    if found is not None:
        return going_on(config, found)
    world.decided(lambda: check_output(config))
    return TrainConfig(**world.decided(lambda: decided_before(config).to_json())), None


def _planned(config: TrainConfig, world: World, *, goes_on: bool) -> Plan:
    """The plan; the first process makes it first, and the others find what it has looked up."""
    plans: list[Plan] = []
    world.decided(lambda: plans.append(make_plan(config, world, goes_on=goes_on)))
    return plans[0] if plans else make_plan(config, world, goes_on=goes_on)


def _prepare(
    run: RunFolder, stopped: StoppedRun | None, kept: TrainConfig | None, dataset: Dataset
) -> None:
    """Put the folder in order: what a killed process left, rows to write again, the settings.

    Args:
        run: the folder.
        stopped: what goes on there, if anything does.
        kept: the settings to write; `None` for a finished run, whose record stays as it is.
        dataset: whose images a fresh run lists.
    """
    clean(run.state)
    for folder in (run.root, run.best.parent, run.teacher):
        remove_temporaries(folder)
    if stopped is not None:
        set_aside_damaged(run.state, stopped.state)
        drop_rows_after(
            run, stopped.step, unvalidated=stopped.unvalidated, goes_on=kept is not None
        )
    else:
        write_image_list(run.images, dataset)
    if kept is not None:
        write_bytes(run.config, to_yaml(kept.to_json()).encode())


def _left(run: RunFolder, log: RunLog) -> str:
    """What a run that is left at once can go on from, in a line."""
    log.display.stop()
    return what_is_left(run)


def resumed_settings(
    resume: str | None, output: str | None, recipe: Settings | None = None
) -> Settings:
    """On resume, the settings the run was started with; else none.

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


def _say_model(plan: Plan, log: RunLog, model: ViT) -> None:
    """Data and model, which nothing that is tried out changes."""
    spec = plan.spec
    parts = ", ".join(f"{len(part):,} {name}" for name, part in plan.dataset.splits.items())
    log.say(f"data: {plan.dataset.name}, {len(plan.dataset.classes)} classes, images: {parts}")
    parameters = sum(p.numel() for p in model.parameters())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    said = f"{parameters:,} parameters" + (f" ({frozen:,} of them frozen)" if frozen else "")
    log.say(
        f"model: {said}, {spec.num_patches} patches of {spec.patch_size[0]} x "
        f"{spec.patch_size[1]}, width {spec.width}, {plural(spec.depth, 'block')}, "
        f"{plural(spec.num_heads, 'head')}"
    )


def _say_plan(plan: Plan, run: RunFolder, log: RunLog, world: World) -> None:
    """All settings, with what was found out, and how the steps go."""
    config = plan.config
    log.say(f"settings: {_settings_shown(config)}")
    if config.probe is not None and (said := without_effect(config)) is not None:
        log.say(said)
    if config.probe is None and (receipt := receipt_of(config.recipe)) is not None:
        log.say(receipt.says())
    if config.probe is None:
        log.say(
            f"training: {plural(config.epochs, 'epoch')} of "
            f"{plural(plan.steps.steps_per_epoch, 'step')}, "
            f"batch {config.batch_size}, lr {config.lr:g}, on {plan.device}, into {run.root}"
        )
    if world.size > 1:
        each = config.batch_size // world.size
        parts = f" in {config.grad_accum_steps} parts" if config.grad_accum_steps > 1 else ""
        log.say(
            f"processes: {world.size} ({config.parallel}), {plural(each, 'image')} each{parts} "
            f"make a batch of {config.batch_size}"
        )


def _settings_shown(config: TrainConfig) -> str:
    """Everything that is not as usual; the run's config.yaml has the rest."""
    usual = TrainConfig(data=config.data).to_json()
    hidden = ("output", "start")
    changed = {k: v for k, v in config.to_json().items() if v != usual[k] and k not in hidden}
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or "the usual ones"


def _finish(loop: Trainer, run: RunFolder, log: RunLog) -> dict[str, Metrics]:
    """Read the best weights back, look at the test split once, and write its score beside them.

    A finished run that is resumed has looked already; only other weights are looked at again.

    Raises:
        Interrupted: a signal came; the run goes on with this.
        OutputError: the run folder cannot be written.
    """
    world = loop.world
    if not world.decided(run.best.exists):  # stopped before the first epoch ended
        log.say(f"ended after {loop.stopped}; weights: {run.last}")
        return {}
    best = load(run.best)
    metrics: dict[str, Metrics] = dict(best.metadata["metrics"])
    splits = loop.plan.dataset.splits
    model = placed_as(best.model, loop.model, world, loop.plan.device)
    temperature = _look_at_validation(loop, model, run, log) if "val" in splits else None
    if "test" in splits and loop.plan.config.test:
        before = world.decided(lambda: tested_at(run))
        how = f"read again (with other weights after step {before[-1]})" if before else "read once"
        if "test" in metrics:
            how = "read before"
        else:
            made = loop.outputs("test", model)
            metrics["test"], _ = examine(
                made, loop.plan.spec.num_classes, temperature or 1.0, world
            )
        test = metrics["test"]
        shown = "  ".join(headline(test))
        log.say(f"test, {plural(int(test['images']), 'image')}, {how}, best weights: {shown}")
        log.scored("test", loop.progress.step, test)
    rest = {key: v for key, v in best.metadata.items() if key not in (*DESCRIBED, "temperature")}
    rest |= {"metrics": metrics} | ({"temperature": temperature} if temperature else {})
    described = {"preprocess": best.preprocess, "classes": best.classes, **rest}
    whole = unsharded_model(model, world)
    world.decided(lambda: str(save(run.best, whole, **described)))
    if loop.progress.skipped:
        skipped = plural(loop.progress.skipped, "step")
        log.say(f"{skipped} skipped: a number was not finite")
    log.say(f"ended after {loop.stopped}; best weights: {run.best}")
    return metrics


def kind_of_run(recipe: Mapping[str, Any]) -> dict[str, Any] | None:
    """Of a checkpoint's stored settings, those that make it a run of another kind; not the seed."""
    elsewhere = {*WHEREABOUTS, *WITHOUT_WEIGHT} - {"data", "teacher"}
    kept = {name: value for name, value in recipe.items() if name not in elsewhere}
    if isinstance(start := kept.get("start"), Mapping):
        kept["start"] = start.get("sha256")  # the same weights from another place
        kept.pop("pretrained", None)
    return kept or None


def _look_at_validation(loop: Trainer, model: ViT, run: RunFolder, log: RunLog) -> float | None:
    """Fit the temperature on the validation images, and draw what they are taken for."""
    plan, world = loop.plan, loop.world
    classes = plan.spec.num_classes
    every = -(-len(plan.dataset.splits["val"]) * classes // MOST_LOGITS)
    held: list[Output] = []

    def kept() -> Iterator[Output]:
        for number, made in enumerate(loop.outputs("val", model)):
            if number % every == 0:
                held.append((made[0].cpu(), made[1]))
            yield made

    tally = count_predictions(kept(), classes)
    found = calibrate(held, world)
    log.say(f"best weights: {found.said}")
    if classes <= LARGEST:
        drawn = confusion_matrix(tally.confusion(world), plan.dataset.classes, "validation")
        world.decided(lambda: write_bytes(run.confusion, png(drawn)))
        if plan.config.log_examples:
            log.image("val/confusion_matrix", drawn, loop.progress.step, at_end=True)
    return found.temperature
