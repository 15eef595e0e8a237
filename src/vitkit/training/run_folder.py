"""The folder of a run: where it is, what lies in it, and who may write there."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from vitkit.data.sources.open import NAMES
from vitkit.errors import OutputError, SettingError, nearest_parent
from vitkit.io.atomic import is_temporary, output_error
from vitkit.training.config.train_config import DEFAULT_MODEL, TrainConfig
from vitkit.training.run_lock import LOCK, OWNER, locked
from vitkit.training.state.save import states


@dataclass(frozen=True)
class RunFolder:
    """The places inside one run's folder."""

    root: Path

    @property
    def config(self) -> Path:
        """Every setting, resolved; `--resume` reads it."""
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One row an epoch."""
        return self.root / "metrics.csv"

    @property
    def lines(self) -> Path:
        """One JSON object a logged step, an epoch and a test."""
        return self.root / "metrics.jsonl"

    @property
    def trackers(self) -> Path:
        """Under which names other services know the run."""
        return self.root / "trackers.json"

    @property
    def ladder(self) -> Path:
        """What `--auto` came to, rung by rung."""
        return self.root / "ladder.json"

    @property
    def images(self) -> Path:
        """Names and hashes of the image files that the run began with, where it is about files."""
        return self.root / "images.npz"

    @property
    def augmented(self) -> Path:
        """What the model is fed in the first step, as an image."""
        return self.root / "augmented.png"

    @property
    def log(self) -> Path:
        """What was printed."""
        return self.root / "train.log"

    @property
    def confusion(self) -> Path:
        """What the best weights take the validation images for, as an image."""
        return self.root / "confusion_matrix.png"

    @property
    def tensorboard(self) -> Path:
        """Curves for TensorBoard."""
        return self.root / "tensorboard"

    @property
    def best(self) -> Path:
        """Weights of the best epoch, for sharing."""
        return self.root / "weights" / "best.safetensors"

    @property
    def last(self) -> Path:
        """Weights of the last step, for sharing."""
        return self.root / "weights" / "last.safetensors"

    @property
    def teacher(self) -> Path:
        """What a teacher says of every view of the images; made again where it is missing."""
        return self.root / "teacher"

    @property
    def state(self) -> Path:
        """What `--resume` goes on from."""
        return self.root / "state"


LEFT = {LOCK, OWNER, "wandb"} | {
    place.fget(RunFolder(Path())).parts[0]
    for place in vars(RunFolder).values()
    if isinstance(place, property) and place.fget is not None
}
"""Names of everything that a run leaves in its folder."""
WRITTEN = {"data", "start", "resume", "overwrite"}
"""Keys that vitkit writes into every config.yaml, and that a recipe written by hand has not."""


def resumed_folder(resume: str, output: str | None) -> RunFolder | None:
    """The run that `--resume` means; `None` where `auto` finds nothing to go on with.

    Raises:
        SettingError: `auto` without an output.
        OutputError: a run that is not there, or one without a saved state.
    """
    if resume == "auto":
        if not output:
            raise SettingError("--resume auto needs --output, the run folder to look in")
        folder = RunFolder(Path(output))
        return folder if has_state(folder) else None
    folder = RunFolder(Path(resume))
    if not folder.root.is_dir():
        raise OutputError(f"--resume {resume}: no such run folder; {nearest_parent(folder.root)}")
    if not has_state(folder):
        afresh = " (add --overwrite to put this one aside)" if _is_run(folder) else ""
        raise OutputError(
            f"--resume {resume}: no saved state in {folder.state}; start afresh without --resume"
            f"{afresh}"
        )
    return folder


def has_state(folder: RunFolder) -> bool:
    """Whether there is anything to resume from."""
    return folder.config.is_file() and bool(states(folder.state))


def what_is_left(folder: RunFolder) -> str:
    """Say which state a run can go on from, and by which command."""
    kept = states(folder.state)
    if not kept:
        return f"no state is saved in {folder.root}"
    return (
        f"the newest state is {kept[-1]}, go on with: vitkit train --resume "
        f"{shlex.quote(str(folder.root))}"
    )


def died_early(folder: RunFolder) -> bool:
    """Tell whether a folder is a run that ended before its first state, and nothing else.

    It has nothing but what a run leaves, and neither a state nor weights.
    """
    names = {path.name for path in folder.root.iterdir()}
    begun = _wrote_settings(folder) or (LOCK in names and folder.config.name not in names)
    weights = folder.best.parent.glob("*.safetensors")
    only_ours = all(name in LEFT or is_temporary(name) for name in names)
    return begun and only_ours and not states(folder.state) and not any(weights)


def _is_run(folder: RunFolder) -> bool:
    return _wrote_settings(folder) or folder.ladder.is_file() or died_early(folder)


def _wrote_settings(folder: RunFolder) -> bool:
    """Tell whether config.yaml is there and was written by a run, of any version of vitkit."""
    try:
        lines = folder.config.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    return {line.partition(":")[0] for line in lines} >= WRITTEN


def check_output(config: TrainConfig) -> None:
    """Refuse a folder that a new run must not use; nothing is written.

    Raises:
        OutputError: it is a file; it holds the data or lies inside them; or something is in it that
            may not be put aside: no run of vitkit, the working folder, or a run without
            `overwrite`.
    """
    if config.output is None:
        _refuse_among_data(Path("runs"), config)
        return
    if not config.output:
        raise OutputError("--output is empty; name a folder, such as --output runs/first")
    root = Path(config.output)
    if root.exists() and not root.is_dir():
        raise OutputError(f"{root} is a file; choose another --output")
    _refuse_among_data(root, config)
    try:
        entries = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise output_error(root, error) from error
    if entries:
        _refuse_to_put_aside(RunFolder(root), entries, config)


def _refuse_among_data(root: Path, config: TrainConfig) -> None:
    """Raise `OutputError` where the data lie in the run folder, or it would lie in them."""
    whole = root.resolve()
    named = [] if config.data_root is None else [config.data_root]
    if config.data not in NAMES and "://" not in config.data:
        named.append(config.data.removeprefix("wds:").partition("{")[0])
    for name in named:
        data = Path(os.path.expanduser(name))
        if whole in (data.resolve(), *data.resolve().parents):
            raise OutputError(f"--output {root} holds the data {name}; choose another --output")
        if name != config.data_root and data.is_dir() and data.resolve() in whole.parents:
            raise OutputError(
                f"the run folder {root} would lie inside the data {name}; choose an --output "
                f"outside of them"
            )


def _refuse_to_put_aside(folder: RunFolder, entries: list[str], config: TrainConfig) -> None:
    """Raise `OutputError` unless a folder with something in it is a run that may be put aside."""
    root, here = folder.root, Path.cwd()
    if not _is_run(folder):
        strange = next((name for name in entries if name not in LEFT), entries[0])
        raise OutputError(
            f"{root} holds {strange} and is no run of vitkit, so it is left alone; choose another "
            f"--output"
        )
    if root.resolve() in (here, *here.parents):
        raise OutputError(
            f"{root} is the working folder or holds it, so it cannot be put aside; choose another "
            f"--output"
        )
    if config.resume == "auto" and not died_early(folder):
        raise OutputError(
            f"{root} has no state to go on from, but more than a run leaves that ended before its "
            f"first state; choose another --output, or pass --overwrite instead of --resume auto "
            f"to put it aside"
        )
    if config.resume != "auto" and not config.overwrite:
        raise OutputError(
            f"{root} exists; go on with --resume {root}, choose another --output, or pass "
            f"--overwrite to put it aside"
        )


def new_folder(config: TrainConfig, say: Callable[[str], object]) -> RunFolder:
    """Make the folder of a new run; a run that is there is put aside: renamed, not deleted.

    Args:
        config: its `output`, `overwrite` and `resume` decide.
        say: told what was put aside, and where.

    Raises:
        OutputError: as `check_output`; another process trains there; or it cannot be made.
    """
    check_output(config)
    try:
        if config.output is None:
            return RunFolder(_next_numbered(config))
        root = Path(config.output)
        if root.is_dir() and any(root.iterdir()):
            whole = root.resolve()
            with locked(whole):  # another process may be training there
                aside = _first_free(whole.with_name(f"{whole.name}.old-{n}") for n in count(1))
                whole.rename(aside)
            say(f"put aside: what was in {root} is now in {aside}")
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise output_error(Path(config.output or "runs"), error) from error
    return RunFolder(root)


def _next_numbered(config: TrainConfig) -> Path:
    """runs/DATA-MODEL-N for the first N that nobody has."""
    model = config.model or ("pretrained" if config.pretrained else DEFAULT_MODEL)
    data, model = (re.sub(r"[^\w.-]+", "-", Path(name).name).strip("-.") or "data"
                   for name in (config.data, model))  # fmt: skip
    for n in count(1):
        root = Path("runs") / f"{data}-{model}-{n}"
        try:
            root.mkdir(parents=True)
        except FileExistsError:
            continue
        return root
    raise AssertionError("count() does not end")


def _first_free(candidates: Iterator[Path]) -> Path:
    return next(path for path in candidates if not path.exists())
