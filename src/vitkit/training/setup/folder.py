"""The folder of a run before its first step: found or created, locked, cleaned up."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from vitkit.distributed import ProcessGroup
from vitkit.training.config.config_yaml import write_yaml
from vitkit.training.config.passed_objects import refuse_missing
from vitkit.training.config.run_config import RunConfig
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.monitoring.augmented_grid import save_augmented_grid
from vitkit.training.monitoring.metric_files import drop_rows_after
from vitkit.training.resume import (
    StoppedRun,
    describe_stopped_run,
    keep_earlier_decisions,
    settings_to_resume,
)
from vitkit.training.run import Run
from vitkit.training.run_folder import (
    RunFolder,
    check_output,
    locked,
    new_folder,
    resumed_folder,
)
from vitkit.training.setup.build_augmentation import make_transform
from vitkit.training.setup.summary import log_settings
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
        log_settings(run)
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
