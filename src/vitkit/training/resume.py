"""Resuming a stopped run: its newest state, its settings, and which of them may change."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vitkit import distributed, errors, frozen
from vitkit.data.sources.open import NAMES
from vitkit.io.atomic import write_bytes
from vitkit.training.config import contradictions, meaning, merging
from vitkit.training.config.train_config import TrainConfig, left_open
from vitkit.training.monitoring.trackers import drop_rows_after
from vitkit.training.recipes import RECIPES, recipe_settings
from vitkit.training.run import Run
from vitkit.training.run_folder import RunFolder, locked, resumed_folder
from vitkit.training.state import state_folder

BEFORE_THEM: meaning.Settings = {"resizer": "pillow"}
"""Newer settings whose default differs from what runs did before they existed."""
IMAGES_OF_A_FINDING = 20
"""Images that check.json lists of a finding; `more` counts the others."""


@dataclass(frozen=True)
class StoppedRun:
    """A run that is resumed.

    Attributes:
        root: its folder.
        state: its newest undamaged state.
        unvalidated: true if the epoch that ends there is still to be validated.
        before: the settings that it began with.
        notes: lines to print.
        changes: settings that differ from those that the state was saved with: name -> value before
            and now, as JSON values.
    """

    root: Path
    state: Path
    unvalidated: bool
    before: TrainConfig
    notes: tuple[str, ...]
    changes: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The number of steps done in the saved state."""
        return state_folder.step_of(self.state)


def find_stopped_run(
    config: TrainConfig, world: distributed.ProcessGroup, stack: ExitStack
) -> StoppedRun | None:
    """Find the stopped run to resume, if there is one; `stack` holds the lock of its folder.

    Raises:
        UserError: no such run, or its settings cannot be read.
        CheckpointError: all of its states are damaged.
    """

    def find() -> StoppedRun | None:
        folder = None if config.resume is None else resumed_folder(config.resume, config.output)
        if folder is None:
            return None
        # before its state is read, which another process may replace
        stack.enter_context(locked(folder.root))
        state, notes = state_folder.newest_state(folder.state)
        manifest = state_folder.read_manifest(state)
        for name, saved_with in manifest["versions"].items():
            if saved_with != version(name):
                notes.append(
                    f"{name} was {saved_with} when the state was saved and is {version(name)} now: "
                    "the run continues, perhaps not with the same bits"
                )
        settings = _stored_settings(folder)
        # the state's own settings count, should config.yaml have been edited
        for name, value in manifest["settings"].items():
            # a state of another version may have settings that are gone
            if name in frozen.field_names(TrainConfig) and value not in merging.GONE.get(name, ()):
                settings[name] = value
        before = TrainConfig(**settings)
        unvalidated = manifest["values"].get("progress", {}).get("unvalidated", False)
        return StoppedRun(folder.root, state, unvalidated, before, tuple(notes))

    return world.broadcast_from_main(find)


def _stored_settings(run: RunFolder) -> meaning.Settings:
    """Return the settings in a run's config.yaml; newer ones get the values of that time."""
    return BEFORE_THEM | merging.read_yaml(run.config)


def resumed_settings(
    resume: str | None, output: str | None, recipe: meaning.Settings | None = None
) -> meaning.Settings:
    """Return the settings that a resumed run was started with; empty for a new run.

    Args:
        resume: as in `TrainConfig`, as a flag or keyword.
        output: the same.
        recipe: settings of a recipe or a YAML file, which may have an `output`, too.

    Raises:
        OutputError, SettingError: a run that is not there, or whose settings cannot be read.
    """
    output = output or (recipe or {}).get("output")
    folder = None if resume is None else resumed_folder(resume, output)
    if folder is None:
        return {}
    settings = _stored_settings(folder)
    for name in ("resume", "overwrite"):  # of the call, not of the run
        settings.pop(name, None)
    return settings | {"output": str(folder.root)}


def settings_to_resume(
    requested: TrainConfig, stopped: StoppedRun
) -> tuple[TrainConfig, StoppedRun]:
    """Merge the settings given now with those that the run decided when it began.

    Returns:
        The settings to resume with, and the run with notes on them.

    Raises:
        SettingError: a setting that would make it another run, or another folder.
    """
    before, root = stopped.before, stopped.root
    recipe = requested.recipe or ""
    # the run goes on without the file that its recipe was in
    is_there = recipe in RECIPES or Path(recipe).is_file()
    config, _ = contradictions.resolve_defaults(
        requested, recipe_settings(recipe) if is_there else {}
    )
    # settings left open now keep the values decided before
    names = [name for name in ("amp", "attention_kernel") if getattr(config, name) == "auto"]
    names += ["threads"] if config.threads is None else []
    config = replace(
        config,
        **{name: getattr(before, name) for name in [*names, *left_open(config)]},
        # a run that began without a compiler stays uncompiled
        compile=config.compile and before.compile,
    )
    config = replace(
        config,
        # the state has the weights, and a run keeps the labels that it began with
        start=before.start,
        model=config.model or before.model,
        relabel=config.relabel or before.relabel,
    )
    changes = _changes(root, before, config)
    notes = list(stopped.notes)
    if requested.compile and not config.compile:
        notes.append("--compile: the run started without it, and continues without it")
    return config, replace(stopped, notes=tuple(notes), changes=changes)


def _changes(root: Path, earlier: TrainConfig, config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return each setting that may change, and differs from the run's.

    Raises:
        SettingError: a setting that would make it another run, or another folder.
    """
    # another folder would leave the run without its states
    if config.output is not None and Path(config.output).resolve() != root.resolve():
        raise errors.SettingError(
            f"--resume {root} continues in that folder; leave out --output {config.output}"
        )
    if config.data != earlier.data and {config.data, earlier.data} & set(NAMES):
        raise errors.SettingError(
            f"--resume {root}: that run was trained on {earlier.data}, not {config.data}; leave "
            "out DATA"
        )
    before = merging.with_flat_spec(earlier.to_json())
    now = merging.with_flat_spec(config.to_json())
    for settings in (before, now):  # --img-size names the same field
        if settings["img_size"] is not None:
            settings.setdefault("spec.image_size", settings["img_size"])
    different = []
    # either may name fields of the spec that the other leaves to the preset
    fields = [name for name in dict.fromkeys((*before, *now)) if name.startswith("spec.")]
    fields += [name for name in meaning.fields_where(TrainConfig, resume="fixed") if name != "spec"]
    for name in fields:
        old, new = before.get(name, merging.MODEL_DEFAULT), now.get(name, merging.MODEL_DEFAULT)
        if old != new:
            different.append(f"{name}: {old} -> {new}")
    if different:
        raise errors.SettingError(
            f"--resume {root}: these settings differ from the run's: {'; '.join(different)}; "
            f"leave them out (or restore them in {root / 'config.yaml'}), or start afresh with "
            "another --output"
        )
    # the rest is not compared: paths, and settings of this machine
    changes = {}
    for name in meaning.fields_where(TrainConfig, resume="may change"):
        if before[name] != now[name]:
            changes[name] = before[name], now[name]
    return changes


def log_changes(run: Run, stopped: StoppedRun, *, finished: bool) -> None:
    """Log the changed settings of a resumed run; one with nothing left to train is finished."""
    if finished:
        run.log.info(
            "this run is finished: nothing is trained, and config.yaml is unchanged; to train on, "
            "raise --epochs or --max-steps"
        )
    for name, (before, now) in stopped.changes.items():
        effect = ""
        if finished:
            effect = " has no effect: the run has ended"
        run.log.info(f"changed since the run started: {name} {before} -> {now}{effect}")
    if "epochs" not in stopped.changes or finished or stopped.step == 0:
        return
    epochs, _ = stopped.changes["epochs"]
    last = run.plan.with_settings({"epochs": epochs}).learning_rate(stopped.step - 1)
    following = run.plan.learning_rate(stopped.step)
    if following > last:
        run.log.info(
            f"the learning rate rises from {last:.3g} to {following:.3g}: the "
            f"{run.plan.config.sched} schedule now spans {run.plan.config.epochs:,} epochs"
        )


def begin_record(run: Run, stopped: StoppedRun | None, *, finished: bool) -> None:
    """Begin the files of a run; metrics of a stopped run are cut back to its last state.

    Args:
        run: the run.
        stopped: the run that is resumed in this folder, if any.
        finished: the run has nothing left to train; config.yaml stays as it is.
    """
    folder, plan = run.folder, run.plan
    run.log.open_curves()
    # what a killed process left half written
    state_folder.remove_unfinished(folder.state, folder.root, folder.best.parent)
    if stopped is None:
        if plan.check is not None:
            document = json.dumps(plan.check.as_dict(most=IMAGES_OF_A_FINDING), indent=1)
            write_bytes(folder.check, f"{document}\n".encode())
        if plan.dataset.relabelled is not None:
            write_bytes(folder.relabel, plan.dataset.relabelled.to_csv())
    else:
        # the run continues from an older state, and will write these again
        state_folder.set_aside_damaged(folder.state, stopped.state)
        drop_rows_after(
            folder, stopped.step, unvalidated=stopped.unvalidated, trains_on=not finished
        )
    if not finished:
        merging.write_yaml(folder.config, run.settings_to_store())


def restore_state(run: Run, stopped: StoppedRun) -> None:
    """Load the state of the stopped run into the parts of this one.

    Raises:
        DataError: the images are not those that the run began with.
        CheckpointError: the state is of other parts.
    """
    # before the tensors, of which other classes need others
    manifest = state_folder.read_manifest(stopped.state)
    began_with = manifest["values"].get("progress", {}).get("data")
    # a state without progress is refused by `load_state`
    if began_with not in (None, run.plan.dataset.identity):
        raise _other_data(run, manifest["settings"].get("data"))
    state_folder.load_state(stopped.state, run.registry)
    if run.held_out is not None and run.progress.best_epoch:
        run.held_out.load(run.folder.held_out)
    run.log.info(f"resuming from step {run.progress.step} ({stopped.state})")


def _other_data(run: Run, began_with: str | None) -> errors.DataError:
    """Return an error that names the changes of the data since the run began.

    Args:
        run: the run, with the data as they are now.
        began_with: DATA of the run that is resumed, if its state names it.
    """
    data = run.plan.config.data
    mend = "restore them"
    if data.startswith("memory://"):
        mend = "pass the same object"
    # a moved folder may lack images; another folder has different ones
    if began_with not in (None, data) and (began_with in NAMES or Path(began_with).exists()):
        mend = f"leave out DATA to continue with {began_with}"
    return errors.DataError(
        f"{data}: the images, labels or classes differ from those that the run {run.folder.root} "
        f"started with; {mend}, or start afresh"
    )
