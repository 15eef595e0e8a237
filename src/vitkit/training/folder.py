"""The folder of a run before its first step, and the first lines of its log."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vitkit.distributed import ProcessGroup
from vitkit.messages import plural
from vitkit.models.vit import ViT
from vitkit.training.config.merging import with_flat_spec, write_yaml
from vitkit.training.config.passed_objects import refuse_missing
from vitkit.training.config.train_config import USUAL, RunConfig, TrainConfig
from vitkit.training.monitoring.figures import save_augmented_grid
from vitkit.training.monitoring.run_log import RunLog, epochs_per_line
from vitkit.training.monitoring.trackers import drop_rows_after
from vitkit.training.plan import Plan, make_transform
from vitkit.training.resume import (
    StoppedRun,
    describe_stopped_run,
    keep_earlier_decisions,
    settings_to_resume,
)
from vitkit.training.run import Run
from vitkit.training.run_folder import RunFolder, check_output, locked, new_folder, resumed_folder
from vitkit.training.setup.unused_settings import note_on_probe
from vitkit.training.state.data_record import record_data
from vitkit.training.state.state_folder import (
    remove_unfinished,
    remove_unfinished_files,
    set_aside_damaged,
)


def find_stopped_run(
    config: TrainConfig, world: ProcessGroup, stack: ExitStack
) -> tuple[TrainConfig, StoppedRun | None]:
    """Find the stopped run to resume, with its settings; else check the new run's folder.

    The stopped run is locked first, by `stack`: another process may be about to end there.

    Raises:
        UserError: the run cannot be resumed with these settings, or a new one cannot be there.
    """
    refuse_missing(config)

    def find() -> dict[str, Any] | None:
        folder = None if config.resume is None else resumed_folder(config.resume, config.output)
        if folder is None:
            return None
        # before its state is read, which another process may replace
        stack.enter_context(locked(folder.root))
        return describe_stopped_run(folder)

    description = world.broadcast_from_main(find)
    if description is not None:
        return settings_to_resume(config, description)
    world.broadcast_from_main(lambda: check_output(config))
    return TrainConfig(
        **world.broadcast_from_main(lambda: keep_earlier_decisions(config).to_json())
    ), None


def claim_folder(
    config: TrainConfig, stopped: StoppedRun | None, world: ProcessGroup, stack: ExitStack
) -> tuple[RunFolder, list[str]]:
    """Return the folder of the run, locked by `stack`, and lines to print.

    It is the stopped run's, or a new one.
    """
    # the log is in this folder, so lines are kept until it is open
    notes: list[str] = []
    if stopped is not None:
        return RunFolder(stopped.root), notes
    folder = RunFolder(
        Path(world.broadcast_from_main(lambda: str(new_folder(config, notes.append).root)))
    )
    world.broadcast_from_main(lambda: stack.enter_context(locked(folder.root)))
    return folder, notes


def prepare_folder(run: Run, stopped: StoppedRun | None, *, finished: bool = False) -> None:
    """Write the settings, put the folder in order, and log how the run continues.

    Args:
        run: the run.
        stopped: the run that is resumed in this folder, if any.
        finished: the run has nothing left to train; its record stays as it is.
    """
    log, world, config = run.log, run.world, run.plan.config
    if stopped is None and config.resume == "auto":
        log.info(f"nothing to resume in {run.folder.root}; starting a new run")
    stored = run.plan.settings_to_store(run.folder.root)
    world.broadcast_from_main(lambda: _write_record(run, stopped, None if finished else stored))
    if stopped is not None:
        lines = [*stopped.describe_changes(), *stopped.describe_rate(run)]
        if finished:
            per_epoch = run.plan.steps.steps_per_epoch
            lines = stopped.describe_end(config, per_epoch, run.progress.stale)
        for line in lines:
            log.info(line)
    if not finished:
        _log_settings(run)
    # services are started by one process, too
    world.broadcast_from_main(lambda: log.track(config.logger, stored.to_json()))
    if config.save_augmented_grid and stopped is None:
        world.broadcast_from_main(lambda: _save_grid(run))


def _write_record(run: Run, stopped: StoppedRun | None, stored: RunConfig | None) -> None:
    """Begin the record of a run: TensorBoard's file, the data of a new run, the settings.

    Half-written files are removed. The metrics of a stopped run are cut back to its last state.

    Args:
        run: the run.
        stopped: the run that is resumed there, if any.
        stored: the settings to write; `None` for a finished run, whose record stays as it is.
    """
    folder = run.folder
    run.log.open_curves()
    _remove_unfinished_files(folder)
    if stopped is None:
        record_data(
            run.plan.dataset,
            run.plan.check,
            check_file=folder.check,
            relabel_file=folder.relabel,
        )
    else:
        # the run continues from an older state, and will write these again
        set_aside_damaged(folder.state, stopped.state)
        trains_on = stored is not None
        drop_rows_after(folder, stopped.step, unvalidated=stopped.unvalidated, trains_on=trains_on)
    if stored is not None:
        write_yaml(folder.config, stored.to_json())


def _remove_unfinished_files(folder: RunFolder) -> None:
    """Remove the files that a killed process left half written."""
    remove_unfinished(folder.state)
    remove_unfinished_files((folder.root, folder.best.parent))


def _save_grid(run: Run) -> None:
    plan = run.plan
    batch = next(plan.steps[0].parts(plan.config.grad_accum_steps))
    save_augmented_grid(run.folder.augmented, make_transform(plan), batch, plan.dataset.classes)


# The first lines of a run's log: the data, the model, the settings.

IN_OTHER_LINES = ("output", "start")
IN_LINE_ON_TRAINING = ("epochs", "batch_size", "lr")
"""Settings that are logged in lines of their own; a probe has no line on training."""
IN_LINE_ON_MODEL = (
    "spec.patch_size",
    "spec.width",
    "spec.mlp_width",
    "spec.depth",
    "spec.num_heads",
)


def open_log(
    plan: Plan, folder: RunFolder, stopped: StoppedRun | None, world: ProcessGroup
) -> RunLog:
    """Return the log of a new or resumed run; only the first process writes it."""
    return RunLog(
        folder,
        total=plan.last_step,
        done=0 if stopped is None else stopped.step,
        quiet=plan.config.quiet,
        writes=world.is_main,
    )


def log_model(plan: Plan, log: RunLog, model: ViT) -> None:
    """Log the data and the model, which tuning does not change."""
    spec = plan.spec
    parts = ", ".join(f"{len(part):,} {name}" for name, part in plan.dataset.splits.items())
    log.info(f"data: {plan.dataset.name}, {len(plan.dataset.classes)} classes, images: {parts}")
    # counted before the model is sharded
    parameters = sum(p.numel() for p in model.parameters())
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    counts = f"{parameters:,} parameters"
    if frozen:
        counts += f" ({frozen:,} of them frozen)"
    patches = "patch" if spec.num_patches == 1 else "patches"
    log.info(
        f"model: {counts}, {spec.num_patches:,} {patches} of {spec.patch_size[0]} x "
        f"{spec.patch_size[1]}, width {spec.width}, MLP width {spec.mlp_width}, "
        f"{plural(spec.depth, 'block')}, {plural(spec.num_heads, 'head')}"
    )


def _log_settings(run: Run) -> None:
    """Log all settings, including the tuned ones, and the steps."""
    plan, log, world = run.plan, run.log, run.world
    config = plan.config
    log.info(f"settings: {_settings_shown(config)}")
    if config.probe is not None:
        note = note_on_probe(config)
        if note is not None:
            log.info(note)
    else:
        log.info(
            f"training: {plural(config.epochs, 'epoch')} of "
            f"{plural(plan.steps.steps_per_epoch, 'step')}, "
            f"batch {config.batch_size}, lr {config.lr:g}, on {plan.device}, into {run.folder.root}"
        )
        every = epochs_per_line(config.epochs)
        if every > 1:
            best = " and the best ones" if "val" in plan.dataset.splits else ""
            log.info(f"epochs shown below: 1 of {every}{best}; {run.folder.log.name} has all")
    if world.size > 1:
        each = config.batch_size // world.size
        parts = f" in {config.grad_accum_steps} parts" if config.grad_accum_steps > 1 else ""
        log.info(
            f"processes: {world.size} ({config.parallel}), {plural(each, 'image')} each{parts} "
            f"make a batch of {config.batch_size}"
        )


def _settings_shown(config: TrainConfig) -> str:
    """Return the settings that differ from the defaults and are in no other line of the log."""
    # a setting that was left open is shown where it got another value than usual
    usual = TrainConfig(data=config.data).to_json() | USUAL
    hidden: tuple[str, ...] = IN_OTHER_LINES
    if config.probe is None:
        hidden += IN_LINE_ON_TRAINING
    shown = {k: v for k, v in config.to_json().items() if v != usual[k] and k not in hidden}
    # a model of another size is not the named one
    if {"width", "depth"} <= config.spec.keys():
        shown.pop("model", None)
    if "image_size" in config.spec:
        shown.pop("img_size", None)
    changed = [
        f"{name} {_short(value)}"
        for name, value in with_flat_spec(shown).items()
        if name not in IN_LINE_ON_MODEL
    ]
    return ", ".join(changed) or "all have their defaults"


def _short(value: object) -> str:
    """Format a value without the digits that come from rounding, such as 2.3000000000000003."""
    return f"{value:.10g}" if isinstance(value, float) else str(value)
