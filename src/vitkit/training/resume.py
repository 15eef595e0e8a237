"""How a stopped run goes on: with which settings, from which state, and what has changed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vitkit.errors import SettingError
from vitkit.frozen import field_names
from vitkit.frozen import replace as replaced
from vitkit.training.config.train_config import TrainConfig, read_yaml
from vitkit.training.run_folder import RunFolder
from vitkit.training.setup import resolve_defaults
from vitkit.training.state.manifest import manifest_of
from vitkit.training.state.save import newest_state, step_of

FIXED = ("model", "spec", "pretrained", "freeze", "freeze_blocks", "probe", "img_size",
         "progressive", "balance", "drop_path", "batch_size", "grad_accum_steps", "seed", "amp",
         "attention_kernel", "threads", "opt", "momentum", "layer_decay", "loss", "bce_threshold",
         "compile", "model_ema", "model_ema_decay", "weight_decay", "beta1", "beta2",
         "val_fraction", "ignore_extra_classes", "mean", "std", "fit",
         "interpolation", "crop_ratio", "distill", "distill_alpha", "distill_temperature",
         "distill_views", "aa", "color_jitter", "reprob", "repeated_aug", "mixup", "cutmix",
         "mixup_prob", "mixup_switch_prob", "mixup_off_epoch", "flip", "shift", "crop_scale",
         "label_smoothing")  # fmt: skip
"""Settings that a resumed run cannot change without being another run."""
WHEREABOUTS = ("data", "data_root", "cache", "follow_links", "recipe", "output", "overwrite",
               "teacher", "resume", "device", "timeout", "workers", "quiet", "test")  # fmt: skip
"""Settings that say where things are, not what the run is."""


@dataclass(frozen=True)
class StoppedRun:
    """A run that goes on.

    Attributes:
        root: its folder.
        state: the newest whole one.
        unvalidated: whether the epoch that ends there is still to be validated.
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
        """The last step that it made."""
        return step_of(self.state)

    def says_changes(self, *, finished: bool) -> list[str]:
        """Lines on the changed settings; a run that is finished already does nothing with them."""
        if not finished:
            return [f"changed since the start: {change}" for change in self.changes]
        without = [f"without effect: {change}" for change in self.changes]
        return [
            "this run is finished: nothing is trained, and config.yaml stays as it is; "
            "to train on, raise --epochs or --max-steps",
            *without,
        ]


def stopped_run(run: RunFolder) -> dict[str, Any]:
    """Describe the run to go on with, as JSON values.

    Raises:
        SettingError: its settings cannot be read.
        CheckpointError: no state of it is whole.
    """
    state, passed_over = newest_state(run.state)
    manifest, written = manifest_of(state), TrainConfig(**read_yaml(run.config))
    known, sealed = field_names(TrainConfig), manifest["settings"] or {}
    before = written.to_json() | {name: v for name, v in sealed.items() if name in known}
    progress = manifest["values"].get("progress", {})
    notes = [*passed_over, *_other_versions(manifest["versions"])]
    return {"root": str(run.root), "state": str(state), "notes": notes, "before": before,
            "unvalidated": progress.get("unvalidated", False)}  # fmt: skip


def _other_versions(versions: dict[str, str]) -> list[str]:
    """A line for every package that is another one than the state was saved with."""
    here = {name: version(name) for name in versions}
    return [
        f"{name} was {versions[name]} when the state was saved and is {here[name]} now: the run "
        f"goes on, perhaps not with the same bits"
        for name in versions
        if versions[name] != here[name]
    ]


def going_on(asked: TrainConfig, found: dict[str, Any]) -> tuple[TrainConfig, StoppedRun]:
    """The settings with what the run found out when it began, and the run that goes on.

    Args:
        asked: settings of now.
        found: what `stopped_run` gave.

    Raises:
        SettingError: something that would make it another run, or another folder.
    """
    before, root = TrainConfig(**found["before"]), Path(found["root"])
    config = _as_decided(resolve_defaults(asked)[0], before)
    config = replaced(config, start=before.start, model=config.model or before.model)
    changes, notes = _changes(root, before, config), list(found["notes"])
    if asked.compile and not config.compile:
        notes.append("compile: the run began without it, and goes on so")
    for flag, name in (("find_lr", "lr"), ("find_batch_size", "batch_size")):
        if getattr(asked, flag) and not getattr(before, flag):
            notes.append(f"{flag}: the run began with {name} {getattr(config, name)}, and keeps it")
    stopped = StoppedRun(
        root, Path(found["state"]), found["unvalidated"], tuple(notes), tuple(changes)
    )
    return config, stopped


def decided_before(config: TrainConfig) -> TrainConfig:
    """Take over what a run decided that ended before its first state, where `auto` starts it again.

    So it ends with the bits that the first attempt would have had. Nothing is taken over from a run
    with other settings, or one whose settings cannot be read.
    """
    if config.resume != "auto" or config.output is None:
        return config
    try:
        before = TrainConfig(**read_yaml(RunFolder(Path(config.output)).config))
    except SettingError:
        return config
    taken = _as_decided(config, before)
    now, then = resolve_defaults(taken)[0].to_json(), before.to_json()
    return taken if all(now[name] == then[name] for name in FIXED) else config


def _as_decided(config: TrainConfig, before: TrainConfig) -> TrainConfig:
    """The settings, with what they leave open as an earlier attempt decided it."""
    names = [name for name in ("amp", "attention_kernel") if getattr(config, name) == "auto"]
    names += ["lr", "min_lr"] * config.find_lr + ["batch_size"] * config.find_batch_size
    names += ["threads"] * (config.threads is None)
    return replaced(
        config,
        **{name: getattr(before, name) for name in names},
        compile=config.compile and before.compile,
        find_lr=False,
        find_batch_size=False,
    )


def _changes(root: Path, earlier: TrainConfig, config: TrainConfig) -> list[str]:
    """What differs from the run that goes on.

    Raises:
        SettingError: something that would make it another run, or another folder.
    """
    before, now = earlier.to_json(), config.to_json()
    if config.output is not None and Path(config.output).resolve() != root.resolve():
        raise SettingError(
            f"--resume {root} goes on in that folder; leave out --output {config.output}"
        )
    free = [key for key in now if key not in (*FIXED, *WHEREABOUTS) and before[key] != now[key]]
    changed = [f"{key}: {before[key]} -> {now[key]}" for key in FIXED if before[key] != now[key]]
    if changed:
        raise SettingError(
            f"--resume {root}: these settings differ from the run's: {'; '.join(changed)}; "
            f"leave them out (or undo them in {root / 'config.yaml'}), or start afresh with "
            f"another --output"
        )
    return [f"{key} {before[key]} -> {now[key]}" for key in free]
