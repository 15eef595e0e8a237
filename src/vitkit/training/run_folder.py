"""The folder of a run: its files, its lock, and who may write there."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from vitkit.data.sources.image_folder import refuse_run_folder
from vitkit.data.sources.open import NAMES
from vitkit.errors import OutputError, SettingError
from vitkit.io.atomic import is_temporary, output_error
from vitkit.messages import nearest_parent
from vitkit.training.config.data_settings import DEFAULT_MODEL
from vitkit.training.config.train_config import TrainConfig, leaves_model_open
from vitkit.training.state.state_folder import list_states

LOCK, OWNER = ".lock", ".owner.json"


@dataclass(frozen=True)
class RunFolder:
    """The paths inside the folder of one run."""

    root: Path

    @property
    def config(self) -> Path:
        """Every setting, resolved; `--resume` reads it."""
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        """One row per epoch."""
        return self.root / "metrics.csv"

    @property
    def lines(self) -> Path:
        """One JSON object per logged step, epoch and test."""
        return self.root / "metrics.jsonl"

    @property
    def predictions(self) -> Path:
        """The prediction and the loss of every test image, by the best weights."""
        return self.root / "predictions.csv"

    @property
    def trackers(self) -> Path:
        """The names of the run in experiment trackers."""
        return self.root / "trackers.json"

    @property
    def search(self) -> Path:
        """The results of `--auto`, one per candidate."""
        return self.root / "search.json"

    @property
    def relabel(self) -> Path:
        """The corrected labels that the run began with, a copy of the file of `relabel`."""
        return self.root / "relabel.csv"

    @property
    def suspects(self) -> Path:
        """The images whose labels are probably wrong, as `vitkit report --suspects` finds them."""
        return self.root / "suspects.csv"

    @property
    def augmented(self) -> Path:
        """Augmented images of the first step, as a grid."""
        return self.root / "augmented.png"

    @property
    def check(self) -> Path:
        """The report of the check of the images, as `vitkit check` writes it."""
        return self.root / "check.json"

    @property
    def report(self) -> Path:
        """The run as one page, for a browser."""
        return self.root / "report.html"

    @property
    def log(self) -> Path:
        """All lines that were printed."""
        return self.root / "train.log"

    @property
    def confusion(self) -> Path:
        """Confusion matrix of the best weights: of the test split, or of validation without one."""
        return self.root / "confusion_matrix.png"

    @property
    def curves(self) -> Path:
        """Losses, accuracy and learning rate over the epochs; also as .svg."""
        return self.root / "curves.png"

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
    def state(self) -> Path:
        """States that `--resume` continues from."""
        return self.root / "state"

    @property
    def held_out(self) -> Path:
        """Validation logits that the temperature will be fitted on."""
        return self.state / "validation.safetensors"

    def resume_hint(self, call: str | None = None) -> str:
        """Return one line with the newest state of the run and the command that resumes it.

        Args:
            call: the call in Python that resumes it instead, of a run with passed objects.
        """
        saved = list_states(self.state)
        if not saved:
            return f"no state is saved in {self.root}"
        how = f"resume with: vitkit train --resume {shlex.quote(str(self.root))}"
        if call is not None:
            how = f"resume with the same objects: {call}"
        return f"the newest state is {saved[-1]}, {how}"

    def last_state_hint(self) -> str:
        """Name the newest state to continue from, if there is one."""
        saved = list_states(self.state)
        return f"the last good state is {saved[-1]}" if saved else "no state is saved yet"


LR_FINDER = "lr_finder.png"
"""The figure of the search for a learning rate, `--find-lr`; beside it is one that ends in .svg."""
FILES = {LOCK, OWNER, "wandb", LR_FINDER, "lr_finder.svg", "confusion_matrix.svg", "curves.svg"}
EARLIER_FILES = {"images.npz", "teacher"}
"""Files that earlier versions left, which nothing reads any more."""
RUN_ENTRIES = (
    EARLIER_FILES
    | FILES
    | {
        entry.fget(RunFolder(Path())).parts[0]
        for entry in vars(RunFolder).values()
        if isinstance(entry, property) and entry.fget is not None
    }
)
"""Names of all files and folders that a run may leave in its folder."""
CONFIG_KEYS = {"data", "start", "resume", "overwrite"}
"""Keys of every config.yaml that a run wrote; a recipe written by hand lacks some of them."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder while the block runs.

    The operating system releases it when the process ends, however it ends.

    Raises:
        OutputError: another process holds the lock (the message has its number and host), or the
            folder cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)  # refuse at once instead of waiting
    except Timeout:
        raise OutputError(
            f"{folder} is in use by {_owner(folder)}; wait for it to end, stop it, or choose "
            "another --output"
        ) from None
    except OSError as error:
        raise output_error(folder / LOCK, error) from error
    try:
        _write_owner(folder)
        yield
    finally:
        # The file first, while no other process can have written one.
        (folder / OWNER).unlink(missing_ok=True)
        lock.release()


def _write_owner(folder: Path) -> None:
    owner = {"pid": os.getpid(), "host": socket.gethostname()}
    try:
        (folder / OWNER).write_text(json.dumps(owner))
    except OSError as error:
        raise output_error(folder / OWNER, error) from error


def _owner(folder: Path) -> str:
    """Describe the process that holds the lock."""
    try:
        owner = json.loads((folder / OWNER).read_text())
        return f"process {owner['pid']} on {owner['host']}"
    except (OSError, ValueError, LookupError, TypeError):
        return "another process"


def resumed_folder(resume: str, output: str | None) -> RunFolder | None:
    """Return the folder of the run to resume; `None` if `auto` finds no run to resume.

    Args:
        resume: a run folder, or `auto` for the one of `output`.
        output: the setting `output`.

    Raises:
        SettingError: `auto` without an output.
        OutputError: the run does not exist, or has no saved state.
    """
    if resume == "auto":
        if not output:
            raise SettingError("--resume auto needs --output, the run folder to resume")
        folder = RunFolder(Path(os.path.expanduser(output)))
        return folder if _has_state(folder) else None
    folder = RunFolder(Path(os.path.expanduser(resume)))
    if not folder.root.is_dir():
        raise OutputError(f"--resume {resume}: no such run folder; {nearest_parent(folder.root)}")
    if not _has_state(folder):
        if not _is_run(folder):
            raise OutputError(
                f"--resume {resume}: not a run folder, it has no config.yaml of a run; name the "
                "folder that the run named at its start, such as runs/photos-vit-1"
            )
        mend = "start without --resume (add --overwrite to rename this folder)"
        for config in folder.root.glob("*/config.yaml"):  # the run is a search: name its candidates
            if _has_state(RunFolder(config.parent)):
                mend = f"resume one of its candidates, such as --resume {config.parent}"
        raise OutputError(f"--resume {resume}: no saved state in {folder.state}; {mend}")
    return folder


def _has_state(folder: RunFolder) -> bool:
    """Return whether there is a state to resume from."""
    return folder.config.is_file() and bool(list_states(folder.state))


def _died_early(folder: RunFolder) -> bool:
    """Return whether a folder is a run that ended before its first state, and nothing else."""
    names = {path.name for path in folder.root.iterdir()}
    # The lock is written before the settings.
    begun = _has_run_config(folder) or (LOCK in names and folder.config.name not in names)
    if not begun or not all(name in RUN_ENTRIES or is_temporary(name) for name in names):
        return False
    weights = folder.best.parent.glob("*.safetensors")
    return not list_states(folder.state) and not any(weights)


def _is_run(folder: RunFolder) -> bool:
    return _has_run_config(folder) or folder.search.is_file() or _died_early(folder)


def _has_run_config(folder: RunFolder) -> bool:
    """Return whether config.yaml exists and was written by a run, of any version of vitkit."""
    try:
        lines = folder.config.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    # Not parsed: a run may have a damaged config.yaml.
    return {line.partition(":")[0] for line in lines} >= CONFIG_KEYS


def check_output(config: TrainConfig) -> None:
    """Refuse an output folder that a new run must not use; nothing is written.

    Raises:
        OutputError: it is a file; it contains the data or lies inside them; or it is not empty and
            must not be renamed: it is no run of vitkit, it is the working folder, or `overwrite` is
            not set.
    """
    if config.output is None:
        _refuse_among_data(Path("runs"), config)
        return
    if not config.output:
        raise OutputError("--output is empty; name a folder, such as --output runs/first")
    root = Path(config.output)
    if root.exists() and not root.is_dir():
        raise OutputError(f"--output {root} is a file; name a folder")
    _refuse_among_data(root, config)
    try:
        entries = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    except OSError as error:
        raise output_error(root, error) from error
    if entries:
        _refuse_to_put_aside(RunFolder(root), entries, config)


def _refuse_among_data(root: Path, config: TrainConfig) -> None:
    """Raise `OutputError` if the run folder contains the data, or lies inside them.

    Data that are the folder of a run are a `DataError`.
    """
    start = f"--output {root}"
    if not config.output:  # the folder of numbered runs
        start = f"the run would be written to {root}, which"
    resolved = root.resolve()
    names = [] if config.data_root is None else [config.data_root]
    if config.data not in NAMES and "://" not in config.data:
        # Of shards, `train-{000..009}.tar`, the part before the numbers.
        names.append(config.data.removeprefix("wds:").partition("{")[0])
    for name in names:
        refuse_run_folder(Path(os.path.expanduser(name)))
        data = Path(os.path.expanduser(name)).resolve()
        if resolved == data or resolved in data.parents:
            raise OutputError(f"{start} contains the data {name}; choose another --output")
        if name != config.data_root and data.is_dir() and data in resolved.parents:
            raise OutputError(f"{start} lies inside the data {name}; choose another --output")


def _refuse_to_put_aside(folder: RunFolder, entries: list[str], config: TrainConfig) -> None:
    """Raise `OutputError` unless a folder that is not empty is a run that may be renamed."""
    root = folder.root
    here = Path.cwd()
    if not _is_run(folder):
        strange = next((name for name in entries if name not in RUN_ENTRIES), entries[0])
        raise OutputError(
            f"--output {root} contains {strange} and is not a run of vitkit, so --overwrite does "
            "not rename it; choose another --output"
        )
    # Renaming it would leave the user's shell in the old run.
    if root.resolve() in (here, *here.parents):
        raise OutputError(
            f"--output {root} is or contains the working folder, so --overwrite cannot rename "
            "it; choose another --output"
        )
    if config.resume == "auto" and not _died_early(folder):
        raise OutputError(
            f"--resume auto: {root} has no saved state, but files of a run; choose another "
            "--output, or pass --overwrite instead of --resume auto to rename it"
        )
    if config.resume != "auto" and not config.overwrite:
        # a run that failed before its first state cannot be resumed
        resume = f"resume with --resume {root}, " if _has_state(folder) else ""
        raise OutputError(
            f"--output {root} exists; {resume}choose another --output, or pass --overwrite to "
            "rename the old folder"
        )


def new_folder(config: TrainConfig, log: Callable[[str], object]) -> RunFolder:
    """Create the folder of a new run; an existing run is renamed, not deleted.

    Args:
        config: settings; `output`, `overwrite` and `resume` are used.
        log: called with a line on the renamed folder.

    Raises:
        OutputError: as `check_output`; another process trains there; or it cannot be created.
    """
    check_output(config)
    try:
        if config.output is None:
            return RunFolder(_next_numbered(config))
        root = Path(config.output)
        if root.is_dir() and any(root.iterdir()):  # `check_output` has allowed it
            resolved = root.resolve()
            with locked(resolved):  # another process may be training there
                renamed = _first_free(resolved)
                resolved.rename(renamed)
            log(f"renamed: the files of {root} are now in {renamed}")
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise output_error(Path(config.output or "runs"), error) from error
    return RunFolder(root)


# Names of run folders: runs/DATA-MODEL-N by default, and FOLDER.old-N of renamed ones.


def _next_numbered(config: TrainConfig) -> Path:
    """Create runs/DATA-MODEL-N with the first free N."""
    model = config.model
    if model is None and config.pretrained:
        model = "pretrained"
    elif model is None:
        # a model chosen from the data has no name
        model = "vit" if leaves_model_open(config) else DEFAULT_MODEL
    number = 1
    while True:
        root = Path("runs") / f"{_file_name(config.data)}-{_file_name(model)}-{number}"
        try:
            root.mkdir(parents=True)
        except FileExistsError:  # perhaps created by a process started at the same moment
            number += 1
        else:
            return root


def _file_name(name: str) -> str:
    """Turn the name of data or of a model into a part of a file name."""
    return re.sub(r"[^\w.-]+", "-", Path(name).name).strip("-.") or "data"


def _first_free(resolved: Path) -> Path:
    """Return FOLDER.old-N with the first free N."""
    paths = (resolved.with_name(f"{resolved.name}.old-{number}") for number in count(1))
    return next(path for path in paths if not path.exists())
