"""Resuming a stopped run: its newest state, its settings, and which of them may change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from vitkit.data.sources.open import NAMES, DataSource, kept_data
from vitkit.errors import DataError, SettingError
from vitkit.frozen import field_names
from vitkit.io.results import given
from vitkit.training.config.meaning import Settings, fields_where
from vitkit.training.config.merging import MODEL_DEFAULT, layered, read_yaml, with_flat_spec
from vitkit.training.config.passed_objects import refuse_missing, with_names
from vitkit.training.config.train_config import RunConfig, TrainConfig, left_open
from vitkit.training.recipes import recipe_settings
from vitkit.training.run import Run
from vitkit.training.run_folder import RunFolder, resumed_folder
from vitkit.training.setup.unused_settings import resolve_defaults
from vitkit.training.state.manifest import manifest_of, step_of
from vitkit.training.state.state_folder import load_state, newest_state


class Change(NamedTuple):
    """A setting that differs from the one that a state was saved with, as JSON values."""

    name: str
    before: Any
    now: Any

    @property
    def flag(self) -> str:
        """The setting with its new value, as a flag: `--epochs 2`, `--no-test`."""
        name = self.name.replace("_", "-")
        if isinstance(self.now, bool):
            return f"--{name}" if self.now else f"--no-{name}"
        if isinstance(self.now, list | tuple):
            return " ".join([f"--{name}", *map(str, self.now)])
        return f"--{name} {self.now}"


@dataclass(frozen=True)
class StoppedRun:
    """A run that is resumed.

    Attributes:
        root: its folder.
        state: its newest undamaged state.
        unvalidated: true if the epoch that ends there is still to be validated.
        notes: lines to print.
        changes: settings that differ from those that the state was saved with.
    """

    root: Path
    state: Path
    unvalidated: bool
    notes: tuple[str, ...]
    changes: tuple[Change, ...]

    @property
    def step(self) -> int:
        """The number of steps done in the saved state."""
        return step_of(self.state)

    def describe_changes(self) -> list[str]:
        """Return lines on the changed settings of a run that continues training."""
        return [
            f"changed since the run started: {name} {before} -> {now}"
            for name, before, now in self.changes
        ]

    def describe_rate(self, run: Run) -> list[str]:
        """Return a line on a learning rate that rises, as the schedule spans more epochs now."""
        before = [change.before for change in self.changes if change.name == "epochs"]
        if not before or not 0 < self.step < run.plan.total_steps:
            return []
        last = run.plan.with_settings({"epochs": before[0]}).learning_rate(self.step - 1)
        following = run.plan.learning_rate(self.step)
        if following <= last:
            return []
        return [
            f"the learning rate rises from {last:.3g} to {following:.3g}: the "
            f"{run.plan.config.sched} schedule now spans {run.plan.config.epochs:,} epochs"
        ]

    def describe_end(self, config: RunConfig, steps_per_epoch: int, stale: int) -> list[str]:
        """Return lines on a run with nothing left to train, and on its changed settings.

        Args:
            config: the settings now.
            steps_per_epoch: optimizer steps of an epoch.
            stale: epochs without a higher validation top-1.
        """
        done = {"epochs": self.step // steps_per_epoch, "max_steps": self.step}
        before = config.to_json() | {change.name: change.before for change in self.changes}
        was_finished = any(before[name] and before[name] <= done[name] for name in done)
        was_finished |= before["patience"] is not None and stale >= before["patience"]
        lines, lowered = [], False
        for change in self.changes:
            reason = "has no effect: the run has ended"
            limit = done.get(change.name)
            if limit is not None and change.now is not None and change.now <= limit:
                if not was_finished:
                    lowered, reason = True, f"ends the run here: {limit:,} are done"
                elif change.now < limit:
                    lowered, reason = True, f"is below the {limit:,} that are done"
            lines.append(f"{change.flag} {reason}")
        # a user who lowered the length does not want to continue training
        mend = "" if lowered else "; to train on, raise --epochs or --max-steps"
        end = "this run is finished" if was_finished else "this run ends here"
        return [f"{end}: nothing is trained, and config.yaml is unchanged{mend}", *lines]


BEFORE_THEM: Settings = {"resizer": "pillow"}
"""Newer settings whose default differs from what runs did before they existed."""


def _stored_settings(run: RunFolder) -> Settings:
    """Return the settings in a run's config.yaml; newer ones get the values of that time."""
    return BEFORE_THEM | read_yaml(run.config)


def describe_stopped_run(run: RunFolder) -> dict[str, Any]:
    """Return JSON values that describe the run to resume, for all processes.

    Raises:
        SettingError: its settings cannot be read.
        CheckpointError: all of its states are damaged.
    """
    state, passed_over = newest_state(run.state)
    manifest = manifest_of(state)
    before = TrainConfig(**_stored_settings(run)).to_json()
    # the state's own settings count, should config.yaml have been edited
    # a state of another version may have settings that are gone
    known = field_names(TrainConfig)
    for name, value in (manifest["settings"] or {}).items():
        if name in known:
            before[name] = value
    progress = manifest["values"].get("progress", {})
    return {
        "root": str(run.root),
        "state": str(state),
        "notes": [*passed_over, *_other_versions(manifest["versions"])],
        "before": before,
        "unvalidated": progress.get("unvalidated", False),
    }


def _other_versions(versions: dict[str, str]) -> list[str]:
    """Return a line for each package whose version differs from the one that saved the state."""
    lines = []
    for name, saved_with in versions.items():
        installed = version(name)
        if saved_with != installed:
            lines.append(
                f"{name} was {saved_with} when the state was saved and is {installed} now: the "
                "run continues, perhaps not with the same bits"
            )
    return lines


def settings_to_resume(
    requested: TrainConfig, description: dict[str, Any]
) -> tuple[TrainConfig, StoppedRun]:
    """Merge the settings given now with those that the run decided when it began.

    Args:
        requested: settings given now.
        description: what `describe_stopped_run` returned.

    Returns:
        The settings to resume with, and the run.

    Raises:
        SettingError: a setting that would make it another run, or another folder.
    """
    before = TrainConfig(**description["before"])
    root = Path(description["root"])
    # settings left open now keep the values decided before
    config = _with_decisions(resolve_defaults(requested)[0], before)
    # the state has the weights; the initial ones are not needed any more
    config = replace(config, start=before.start, model=config.model or before.model)
    # a run keeps the labels that it began with
    config = replace(config, relabel=config.relabel or before.relabel)
    changes = _changes(root, before, config)
    notes = list(description["notes"])
    if requested.compile and not config.compile:
        notes.append("--compile: the run started without it, and continues without it")
    for flag, name in (("find_lr", "lr"), ("find_batch_size", "batch_size")):
        if getattr(requested, flag) and not getattr(before, flag):
            notes.append(
                f"--{flag.replace('_', '-')}: the run started with {name} "
                f"{getattr(config, name)}, and keeps it"
            )
    stopped = StoppedRun(
        root, Path(description["state"]), description["unvalidated"], tuple(notes), tuple(changes)
    )
    return config, stopped


def keep_earlier_decisions(config: TrainConfig) -> TrainConfig:
    """Return the settings with the decisions of a run that ended before its first state.

    With `resume: auto` such a run starts again, and so it ends with the bits that the first attempt
    would have had. Nothing is taken over from a run with other settings, or with a config.yaml that
    cannot be read.
    """
    if config.resume != "auto" or config.output is None:
        return config
    try:
        before = TrainConfig(**_stored_settings(RunFolder(Path(config.output))))
    except SettingError:
        return config
    merged = _with_decisions(config, before)
    # config.yaml has the settings after their defaults were resolved
    now = resolve_defaults(merged)[0].to_json()
    then = before.to_json()
    for name in fields_where(TrainConfig, resume="fixed"):
        if now[name] != then[name]:
            return config
    return merged


def _with_decisions(config: TrainConfig, before: TrainConfig) -> TrainConfig:
    """Return the settings; open ones get the values that an earlier attempt decided."""
    names = [name for name in ("amp", "attention_kernel") if getattr(config, name) == "auto"]
    if config.find_lr:
        names += ["lr", "min_lr"]
    if config.find_batch_size:
        names.append("batch_size")
    if config.threads is None:
        names.append("threads")
    names += left_open(config)
    return replace(
        config,
        **{name: getattr(before, name) for name in names},
        # a run that began without a compiler stays uncompiled
        compile=config.compile and before.compile,
        find_lr=False,
        find_batch_size=False,
    )


def _changes(root: Path, earlier: TrainConfig, config: TrainConfig) -> list[Change]:
    """Return each setting that may change, and differs from the run's.

    Raises:
        SettingError: a setting that would make it another run, or another folder.
    """
    # another folder would leave the run without its states
    if config.output is not None and Path(config.output).resolve() != root.resolve():
        raise SettingError(
            f"--resume {root} continues in that folder; leave out --output {config.output}"
        )
    if config.data != earlier.data and {config.data, earlier.data} & set(NAMES):
        raise SettingError(
            f"--resume {root}: that run was trained on {earlier.data}, not {config.data}; leave "
            "out DATA"
        )
    before = with_flat_spec(earlier.to_json())
    now = with_flat_spec(config.to_json())
    for settings in (before, now):  # --img-size names the same field
        if settings["img_size"] is not None:
            settings.setdefault("spec.image_size", settings["img_size"])
    different = []
    # either may name fields of the spec that the other leaves to the preset
    fields = [name for name in dict.fromkeys((*before, *now)) if name.startswith("spec.")]
    fields += [name for name in fields_where(TrainConfig, resume="fixed") if name != "spec"]
    for name in fields:
        old, new = before.get(name, MODEL_DEFAULT), now.get(name, MODEL_DEFAULT)
        if old != new:
            different.append(f"{name}: {old} -> {new}")
    if different:
        raise SettingError(
            f"--resume {root}: these settings differ from the run's: {'; '.join(different)}; "
            f"leave them out (or restore them in {root / 'config.yaml'}), or start afresh with "
            "another --output"
        )
    # the rest is not compared: paths, and settings of this machine
    changed = []
    for name in fields_where(TrainConfig, resume="may change"):
        if before[name] != now[name]:
            changed.append(Change(name, before[name], now[name]))
    return changed


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
    folder = None if resume is None else resumed_folder(resume, output)
    if folder is None:
        return {}
    settings = _stored_settings(folder)
    for name in ("resume", "overwrite"):  # of the call, not of the run
        settings.pop(name, None)
    return settings | {"output": str(folder.root)}


def _settings_of_call(given: Settings) -> TrainConfig:
    """Merge the settings of a call with those of its recipe and of the run that it resumes."""
    recipe = recipe_settings(given.get("recipe"))
    stored = resumed_settings(given.get("resume"), given.get("output"), recipe)
    if "data" not in given and "data" not in stored:
        raise SettingError("data is missing; it comes first: vitkit.train(data, ...)")
    return TrainConfig(**layered(stored, recipe, given))


def restore_state(run: Run, stopped: StoppedRun) -> None:
    """Load the state of the stopped run into the parts of this one.

    Raises:
        DataError: the images are not those that the run began with.
        CheckpointError: the state is of other parts.
    """
    # before the tensors, of which other classes need others
    manifest = manifest_of(stopped.state)
    began_with = manifest["values"].get("progress", {}).get("data")
    # a state without progress is refused by `load_state`
    if began_with not in (None, run.plan.dataset.identity):
        raise _other_data(run, (manifest["settings"] or {}).get("data"))
    load_state(stopped.state, run.registry)
    if run.held_out is not None and run.progress.best_epoch:
        run.held_out.load(run.folder.held_out)
    run.log.info(f"resuming from step {run.progress.step} ({stopped.state})")


def _other_data(run: Run, began_with: str | None) -> DataError:
    """Return an error that names the changes of the data since the run began.

    Args:
        run: the run, with the data as they are now.
        began_with: DATA of the run that is resumed, if its state names it.
    """
    data = run.plan.config.data
    mend = "pass the same object" if data.startswith("memory://") else "restore them"
    # a moved folder may lack images; another folder has different ones
    if began_with not in (None, data) and (began_with in NAMES or Path(began_with).exists()):
        mend = f"leave out DATA to continue with {began_with}"
    return DataError(
        f"{data}: the images, labels or classes differ from those that the run {run.folder.root} "
        f"started with; {mend}, or start afresh"
    )


# The settings of one call of `vitkit.train`, whose values may be Python objects.


@contextmanager
def settings_of_python_call(
    data: DataSource | None, settings: Mapping[str, Any]
) -> Iterator[TrainConfig]:
    """Yield the settings of a call; its objects are found by their names while the block runs.

    Args:
        data: as for `vitkit.train`; None for that of the run that is resumed.
        settings: the keywords, `recipe` among them.

    Raises:
        UserError: wrong settings or data; or the resumed run needs objects that were not passed.
    """
    texts, objects = with_names(settings)
    # names of objects have a meaning in this call alone
    with given(objects), kept_data(data) as address:
        if address is not None:
            texts["data"] = address
        config = _settings_of_call(texts)
        refuse_missing(config)
        yield config
