"""Resuming of a stopped run: its newest state, its settings, and which of them may change."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vitkit.errors import SettingError
from vitkit.frozen import field_names, replace
from vitkit.training.config.meaning import fields_where
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.config.yaml_files import read_yaml
from vitkit.training.run_folder import RunFolder
from vitkit.training.setup import resolve_defaults
from vitkit.training.state.manifest import manifest_of, step_of
from vitkit.training.state.save import newest_state


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
    changes: tuple[str, ...]

    @property
    def step(self) -> int:
        """The number of steps done in the saved state."""
        return step_of(self.state)

    def describe_changes(self, *, finished: bool) -> list[str]:
        """Return lines on the changed settings, which have no effect on a finished run."""
        if not finished:
            return [f"changed since the start: {change}" for change in self.changes]
        without = [f"without effect: {change}" for change in self.changes]
        return [
            "this run is finished: nothing is trained, and config.yaml stays as it is; "
            "to train on, raise --epochs or --max-steps",
            *without,
        ]


def describe_stopped_run(run: RunFolder) -> dict[str, Any]:
    """Return JSON values that describe the run to resume, for all processes.

    Raises:
        SettingError: its settings cannot be read.
        CheckpointError: all of its states are damaged.
    """
    state, passed_over = newest_state(run.state)
    manifest = manifest_of(state)
    before = TrainConfig(**read_yaml(run.config)).to_json()
    # the state's own settings count, should config.yaml have been edited
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
                f"{name} was {saved_with} when the state was saved and is {installed} now: the run "
                f"goes on, perhaps not with the same bits"
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
    # what is left open now must not be decided in another way than before
    config = _with_decisions(resolve_defaults(requested)[0], before)
    # the state has the weights; those it started from are not looked up again
    config = replace(config, start=before.start, model=config.model or before.model)
    changes = _changes(root, before, config)
    notes = list(description["notes"])
    if requested.compile and not config.compile:
        notes.append("compile: the run began without it, and continues without it")
    for flag, name in (("find_lr", "lr"), ("find_batch_size", "batch_size")):
        if getattr(requested, flag) and not getattr(before, flag):
            notes.append(f"{flag}: the run began with {name} {getattr(config, name)}, and keeps it")
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
        before = TrainConfig(**read_yaml(RunFolder(Path(config.output)).config))
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
    """Return the settings; what they leave open is as an earlier attempt decided it."""
    names = [name for name in ("amp", "attention_kernel") if getattr(config, name) == "auto"]
    if config.find_lr:
        names += ["lr", "min_lr"]
    if config.find_batch_size:
        names.append("batch_size")
    if config.threads is None:
        names.append("threads")
    return replace(
        config,
        **{name: getattr(before, name) for name in names},
        # a run that had no compiler at its start goes on without one
        compile=config.compile and before.compile,
        find_lr=False,
        find_batch_size=False,
    )


def _changes(root: Path, earlier: TrainConfig, config: TrainConfig) -> list[str]:
    """Return a few words on each setting that may change, and differs from the run's.

    Raises:
        SettingError: a setting that would make it another run, or another folder.
    """
    # another folder would leave the run without its states
    if config.output is not None and Path(config.output).resolve() != root.resolve():
        raise SettingError(
            f"--resume {root} goes on in that folder; leave out --output {config.output}"
        )
    before = earlier.to_json()
    now = config.to_json()
    different = []
    for name in fields_where(TrainConfig, resume="fixed"):
        if before[name] != now[name]:
            different.append(f"{name}: {before[name]} -> {now[name]}")
    if different:
        raise SettingError(
            f"--resume {root}: these settings differ from the run's: {'; '.join(different)}; "
            f"leave them out (or undo them in {root / 'config.yaml'}), or start afresh with "
            f"another --output"
        )
    # the rest is not compared: paths, and what is about this machine
    changed = []
    for name in fields_where(TrainConfig, resume="may change"):
        if before[name] != now[name]:
            changed.append(f"{name} {before[name]} -> {now[name]}")
    return changed
