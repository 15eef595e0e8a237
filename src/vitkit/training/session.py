"""One call of `vitkit train`, from the settings to the test score."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import torch

from vitkit.devices import resolve_device
from vitkit.errors import SettingError, counted
from vitkit.frozen import replace as replaced
from vitkit.models.vit import ViT
from vitkit.training.augmenting import save_augmented_grid
from vitkit.training.calibration import fit_temperature
from vitkit.training.checkpointing import clean, newest_state, step_of
from vitkit.training.config import Settings, TrainConfig, read_yaml, to_yaml
from vitkit.training.confusion import LARGEST, confusion_matrix, png
from vitkit.training.distributed import World, in_world, joined
from vitkit.training.evaluation import Output, examine, tallied
from vitkit.training.finding import no_compiler, try_out
from vitkit.training.lock import locked
from vitkit.training.log import RunLog, Silence
from vitkit.training.loop import Trainer
from vitkit.training.metrics import Metrics, headline
from vitkit.training.plan import Plan, make_plan, suited
from vitkit.training.precision import Precision
from vitkit.training.probing import PROBES, NeighbourProbe, without_effect
from vitkit.training.receipt import WITHOUT_WEIGHT, receipt_of
from vitkit.training.records import drop_rows_after
from vitkit.training.run_folder import RunFolder, new_folder, resumed_folder
from vitkit.training.signals import left_at_once, stop_flag
from vitkit.training.starting import make_model
from vitkit.training.trackers import check_trackers
from vitkit.weights.files import write_bytes
from vitkit.weights.load import load
from vitkit.weights.own import DESCRIBED, save

FIXED = ("model", "spec", "pretrained", "freeze", "freeze_blocks", "probe", "img_size",
         "progressive", "balance", "drop_path", "batch_size", "grad_accum_steps", "seed", "amp",
         "attention_kernel", "threads", "opt", "momentum", "layer_decay", "loss", "bce_threshold",
         "compile", "model_ema", "model_ema_decay", "weight_decay", "beta1", "beta2",
         "val_fraction", "bad_images", "ignore_extra_classes", "mean", "std", "fit",
         "interpolation", "crop_ratio", "distill", "distill_alpha", "distill_temperature",
         "distill_views", "aa", "color_jitter", "reprob", "repeated_aug", "mixup", "cutmix",
         "mixup_prob", "mixup_switch_prob", "mixup_off_epoch", "flip", "shift", "crop_scale",
         "label_smoothing")  # fmt: skip
"""Settings that a resumed run cannot change without being another run."""
WHEREABOUTS = ("data", "data_root", "cache", "follow_links", "recipe", "output", "overwrite",
               "teacher", "resume", "device", "timeout", "workers", "quiet", "test")  # fmt: skip
"""Settings that say where things are, not what the run is."""
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
        Interrupted: SIGINT or SIGTERM came; everything is saved.
    """
    check_trackers(config.logger)
    if config.devices > 1 and not in_world():
        return _launched(config, trainer)
    with joined(resolve_device(config.device), config.timeout) as world:
        return _train(config, trainer, world)


def _launched(config: TrainConfig, trainer: type[Trainer]) -> TrainResult:
    """The same, by `devices` processes of their own."""
    from vitkit.training.launch import launch

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
    config, run, state, notes = _beginning(config, world)
    plan = _planned(config, world, goes_on=state is not None)
    if run is None:
        run = RunFolder(Path(world.decided(lambda: str(new_folder(config).root))))
    world.announce(run.root)
    config = replaced(plan.config, threads=config.threads or torch.get_num_threads())
    plan = replace(plan, config=config)
    torch.set_num_threads(config.threads or 1)
    torch.manual_seed(config.seed)
    model = make_model(plan.spec, plan.weights, config, plan.device)
    plan = replace(plan, weights=None)  # the model has them
    done = 0 if state is None else step_of(state)
    with ExitStack() as stack:
        world.decided(lambda: stack.enter_context(locked(run.root)))
        log = stack.enter_context(
            RunLog(run, total=plan.last_step, done=done, quiet=config.quiet)
            if world.first
            else Silence()
        )
        stop = stack.enter_context(stop_flag())
        for line in (*plan.notes, *notes):
            log.say(line)
        _say_model(plan, log, model)
        if state is not None and config.compile and (missing := no_compiler(plan.device)):
            raise SettingError(f"the run is compiled and {missing}; go on where there is one")
        if config.probe is None and "auto" in (config.amp, config.attention_kernel):
            log.say("trying which arithmetic is fastest ...")
        with left_at_once():
            plan = plan.settled(world.decided(lambda: try_out(plan, model, log.say)))
        log.lasts(plan.last_step)
        precision = cast(Precision, "off" if config.probe else plan.config.amp)
        kind = PROBES[config.probe] if config.probe else trainer
        loop = kind(plan, run, log, model, precision, stop, world)
        if state is not None:
            loop.resume(state)
        elif config.resume == "auto":
            log.say(f"nothing to resume in {run.root}; starting afresh")
        kept = replaced(plan.config, output=str(run.root), resume=None, overwrite=False)
        world.decided(lambda: _prepare(run, done, kept))
        _say_plan(plan, run, log, world)
        world.decided(lambda: log.track(config.logger, kept.to_json()))
        if config.save_augmented_grid and state is None:
            world.decided(lambda: save_augmented_grid(run.augmented, plan))
        with left_at_once() if config.probe else nullcontext():
            loop.train()
        metrics = loop.scores if isinstance(loop, NeighbourProbe) else _finish(loop, run, log)
    return TrainResult(run.root, run.best, run.last, metrics, loop.stopped)


def _beginning(
    config: TrainConfig, world: World
) -> tuple[TrainConfig, RunFolder | None, Path | None, list[str]]:
    """The settings with what a stopped run found out, its folder, its state, what to say of it."""
    found = world.decided(lambda: _stopped_run(config))
    if found is None:
        return config, None, None, []
    before, asked = TrainConfig(**found["config"]), config
    config, _ = suited(config)
    # What was tried or found out when the run began stays as it was found.
    found_out = [name for name in ("amp", "attention_kernel") if getattr(config, name) == "auto"]
    found_out += ["lr", "min_lr"] * config.find_lr + ["batch_size"] * config.find_batch_size
    found_out += ["threads"] * (config.threads is None)
    config = replaced(
        config,
        **{name: getattr(before, name) for name in ("start", *found_out)},
        model=config.model or before.model,
        compile=config.compile and before.compile,
        find_lr=False,
        find_batch_size=False,
    )
    run = RunFolder(Path(found["run"]))
    notes = [*_changes(run, before, config), *found["passed_over"]]
    if asked.compile and not config.compile:
        notes.append("compile: the run began without it, and goes on so")
    for flag, name in (("find_lr", "lr"), ("find_batch_size", "batch_size")):
        if getattr(asked, flag) and not getattr(before, flag):
            notes.append(f"{flag}: the run began with {name} {getattr(config, name)}, and keeps it")
    return config, run, Path(found["state"]), notes


def _stopped_run(config: TrainConfig) -> dict[str, Any] | None:
    """The run to go on with, as JSON values; `None` where there is none."""
    run = None if config.resume is None else resumed_folder(config.resume, config.output)
    if run is None:
        return None
    state, passed_over = newest_state(run.state)
    before = TrainConfig(**read_yaml(run.config))
    return {"run": str(run.root), "state": str(state), "passed_over": passed_over,
            "config": before.to_json()}  # fmt: skip


def _planned(config: TrainConfig, world: World, *, goes_on: bool) -> Plan:
    """The plan; the first process makes it first, and the others find what it has looked up."""
    plans: list[Plan] = []
    world.decided(lambda: plans.append(make_plan(config, world, goes_on=goes_on)))
    return plans[0] if plans else make_plan(config, world, goes_on=goes_on)


def _prepare(run: RunFolder, done: int, kept: TrainConfig) -> None:
    """Put the folder in order: what a killed process left, rows to write again, the settings."""
    clean(run.state)
    if done:
        drop_rows_after(run, done)
    write_bytes(run.config, to_yaml(kept.to_json()).encode())


def resumed_settings(resume: str | None, output: str | None) -> Settings:
    """On resume, the settings the run was started with; else none.

    Raises:
        OutputError, SettingError: a run that is not there, or whose settings cannot be read.
    """
    run = None if resume is None else resumed_folder(resume, output)
    if run is None:
        return {}
    stored = read_yaml(run.config)
    kept = {key: value for key, value in stored.items() if key not in ("resume", "overwrite")}
    return kept | {"output": str(run.root)}


def _changes(run: RunFolder, earlier: TrainConfig, config: TrainConfig) -> list[str]:
    """What differs from the run that goes on, a line each.

    Raises:
        SettingError: something that would make it another run, or another folder.
    """
    before, now = earlier.to_json(), config.to_json()
    if config.output is not None and Path(config.output).resolve() != run.root.resolve():
        raise SettingError(
            f"--resume {run.root} goes on in that folder; leave out --output {config.output}"
        )
    free = [key for key in now if key not in (*FIXED, *WHEREABOUTS) and before[key] != now[key]]
    changed = [f"{key}: {before[key]} -> {now[key]}" for key in FIXED if before[key] != now[key]]
    if changed:
        raise SettingError(
            f"--resume {run.root}: these settings differ from the run's: {'; '.join(changed)}; "
            f"leave them out, or start afresh with another --output"
        )
    return [f"changed since the start: {key} {before[key]} -> {now[key]}" for key in free]


def _say_model(plan: Plan, log: RunLog, model: ViT) -> None:
    """Data and model, which nothing that is tried out changes."""
    spec = plan.spec
    parts = ", ".join(f"{len(part):,} {name}" for name, part in plan.dataset.splits.items())
    log.say(f"data: {plan.dataset.name}, {len(plan.dataset.classes)} classes, pictures: {parts}")
    parameters = sum(p.numel() for p in model.parameters())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    said = f"{parameters:,} parameters" + (f" ({frozen:,} of them frozen)" if frozen else "")
    log.say(
        f"model: {said}, {spec.num_patches} patches of {spec.patch_size[0]} x "
        f"{spec.patch_size[1]}, width {spec.width}, {spec.depth} blocks, {spec.num_heads} heads"
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
            f"training: {counted(config.epochs, 'epoch')} of {plan.steps.steps_per_epoch} steps, "
            f"batch {config.batch_size}, lr {config.lr:g}, on {plan.device}, into {run.root}"
        )
    if world.size > 1:
        each = config.batch_size // world.size
        parts = f" in {config.grad_accum_steps} parts" if config.grad_accum_steps > 1 else ""
        log.say(
            f"processes: {world.size} ({config.parallel}), {each} pictures each{parts} make a batch"
            f" of {config.batch_size}"
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
    """
    world = loop.world
    if not world.decided(run.best.exists):  # stopped before the first epoch ended
        log.say(f"ended after {loop.stopped}; weights: {run.last}")
        return {}
    best = load(run.best)
    metrics: dict[str, Metrics] = dict(best.metadata["metrics"])
    model, splits = best.model.to(loop.plan.device), loop.plan.dataset.splits
    temperature = _look_at_validation(loop, model, run, log) if "val" in splits else None
    if "test" in splits and loop.plan.config.test:
        how = "read before" if "test" in metrics else "read once"
        if "test" not in metrics:
            made = loop.outputs("test", model)
            metrics["test"], _ = examine(
                made, loop.plan.spec.num_classes, temperature or 1.0, world
            )
        test = metrics["test"]
        shown = "  ".join(headline(test))
        log.say(f"test, {test['pictures']:.0f} pictures, {how}, best weights: {shown}")
        log.scored("test", loop.progress.step, test)
    rest = {key: v for key, v in best.metadata.items() if key not in (*DESCRIBED, "temperature")}
    rest |= {"metrics": metrics} | ({"temperature": temperature} if temperature else {})
    described = {"preprocess": best.preprocess, "classes": best.classes, **rest}
    world.decided(lambda: str(save(run.best, model, **described)))
    if loop.progress.skipped:
        log.say(f"{loop.progress.skipped} steps were skipped: a number was not finite")
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
    """Fit the temperature on the validation pictures, and draw what they are taken for."""
    plan, world = loop.plan, loop.world
    classes = plan.spec.num_classes
    every = -(-len(plan.dataset.splits["val"]) * classes // MOST_LOGITS)
    held: list[Output] = []

    def kept() -> Iterator[Output]:
        for number, made in enumerate(loop.outputs("val", model)):
            if number % every == 0:
                held.append((made[0].cpu(), made[1]))
            yield made

    tally = tallied(kept(), classes)
    temperature = fit_temperature(held, world)
    if temperature is not None:
        log.say(f"temperature of the best weights, fitted on validation: {temperature:.3f}")
    if classes <= LARGEST:
        drawn = confusion_matrix(tally.confusion(world), plan.dataset.classes, "validation")
        world.decided(lambda: write_bytes(run.confusion, png(drawn)))
        if plan.config.log_examples:
            log.picture("val/confusion_matrix", drawn, loop.progress.step)
    return temperature
