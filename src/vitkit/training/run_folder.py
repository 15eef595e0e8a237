"""The folder of a run: its files, its lock, and who may write there."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from vitkit import errors, messages
from vitkit.data.sources.image_folder import refuse_run_folder
from vitkit.data.sources.open import NAMES
from vitkit.io.atomic import output_error
from vitkit.training.config.train_config import DEFAULT_MODEL, TrainConfig, leaves_model_open
from vitkit.training.state.state_folder import list_states

LOCK = ".lock"


class Entry:
    """A file or folder of a run, by its path below the run's folder."""

    def __init__(self, *parts: str) -> None:
        self.parts = parts

    def __get__(self, folder: RunFolder | None, owner: type) -> Path:
        """Return the path in a folder; of the class, the path below it."""
        return (Path() if folder is None else folder.root).joinpath(*self.parts)


@dataclass(frozen=True)
class RunFolder:
    """The paths inside the folder of one run."""

    root: Path

    config = Entry("config.yaml")
    """Every setting, resolved; `--resume` reads it."""
    metrics = Entry("metrics.csv")
    """One row per epoch."""
    lines = Entry("metrics.jsonl")
    """One JSON object per logged step, epoch and test."""
    predictions = Entry("predictions.csv")
    """The prediction and the loss of every test image, by the best weights."""
    trackers = Entry("trackers.json")
    """The names of the run in experiment trackers."""
    search = Entry("search.json")
    """The results of `--auto`, one per candidate."""
    relabel = Entry("relabel.csv")
    """The corrected labels that the run began with, a copy of the file of `relabel`."""
    suspects = Entry("suspects.csv")
    """The images whose labels are probably wrong, as `vitkit report --suspects` finds them."""
    check = Entry("check.json")
    """The report of the check of the images, as `vitkit check` writes it."""
    report = Entry("report.html")
    """The run as one page, for a browser."""
    log = Entry("train.log")
    """All lines that were printed."""
    confusion = Entry("confusion_matrix.png")
    """Confusion matrix of the best weights: of the test split, or of validation without one."""
    curves = Entry("curves.png")
    """Losses, accuracy and learning rate over the epochs; also as .svg."""
    tensorboard = Entry("tensorboard")
    """Curves for TensorBoard."""
    best = Entry("weights", "best.safetensors")
    """Weights of the best epoch, for sharing."""
    last = Entry("weights", "last.safetensors")
    """Weights of the last step, for sharing."""
    state = Entry("state")
    """States that `--resume` continues from."""
    held_out = Entry("state", "validation.safetensors")
    """Validation logits that the temperature will be fitted on."""

    def resume_hint(self, how: str | None = None) -> str:
        """Return one line with the newest state of the run, and how it is resumed.

        Args:
            how: the command or, of a run with passed objects, the call in Python.
        """
        saved = list_states(self.state)
        if not saved:
            return f"no state is saved in {self.root}"
        how = how or f"resume with: vitkit train --resume {shlex.quote(str(self.root))}"
        return f"the newest state is {saved[-1]}, {how}"

    def last_state_hint(self) -> str:
        """Name the newest state to continue from, if there is one."""
        saved = list_states(self.state)
        if saved:
            return f"the last good state is {saved[-1]}"
        return "no state is saved yet"


CONFIG_KEYS = {"data", "start", "resume", "overwrite"}
"""Keys of every config.yaml that a run wrote; a recipe written by hand lacks some of them."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run folder while the block runs.

    The operating system releases it when the process ends, however it ends.

    Raises:
        OutputError: another process holds the lock, or the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)  # refuse at once instead of waiting
    except Timeout:
        raise errors.OutputError(
            f"{folder} is in use by another process; wait for it to end, stop it, or choose "
            "another --output"
        ) from None
    except OSError as error:
        raise output_error(folder / LOCK, error) from error
    try:
        yield
    finally:
        lock.release()


def resumed_folder(resume: str, output: str | None) -> RunFolder | None:
    """Return the folder of the run to resume; `None` if `auto` finds no run to resume.

    Args:
        resume: a run folder, or `auto` for the one of `output`.
        output: the setting `output`.

    Raises:
        SettingError: `auto` without an output.
        OutputError: the run does not exist, or has no saved state.
    """
    if resume == "auto" and not output:
        raise errors.SettingError("--resume auto needs --output, the run folder to resume")
    folder = RunFolder(Path(os.path.expanduser(output or "" if resume == "auto" else resume)))
    if os.path.isfile(folder.config) and list_states(folder.state):
        return folder
    if resume == "auto":
        return None
    problem = f"no such run folder; {messages.nearest_parent(folder.root)}"
    if folder.root.is_dir():
        problem = (
            "not a run folder, it has no config.yaml of a run; name the folder that the run named "
            "at its start, such as runs/photos-vit-1"
        )
    if _is_run(folder):
        problem = (
            f"no saved state in {folder.state}; start without --resume (add --overwrite to rename "
            "this folder), or name one of the folders in it if they are the candidates of --auto"
        )
    raise errors.OutputError(f"--resume {resume}: {problem}")


def _is_run(folder: RunFolder) -> bool:
    """Return whether the files in a folder are those of a run, of any version of vitkit."""
    if (folder.root / LOCK).exists() or folder.search.is_file():
        return True
    try:
        lines = folder.config.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return False
    # Not parsed: a run may have a damaged config.yaml.
    return {line.partition(":")[0] for line in lines} >= CONFIG_KEYS


def check_output(config: TrainConfig) -> None:
    """Refuse an output folder that a new run must not use; nothing is written.

    With `resume: auto` a run without a state is renamed, as with `overwrite`.

    Raises:
        OutputError: it is a file; it contains the data or lies inside them; or it is not empty and
            must not be renamed: it is no run of vitkit, it is the working folder, or `overwrite` is
            not set.
    """
    root = Path("runs" if config.output is None else config.output)
    _refuse_among_data(root, config)
    entries, problem = list[str](), ""
    try:
        if config.output is None or not root.exists():
            return
        if root.is_dir():
            entries = sorted(os.listdir(root))
        else:
            problem = "is a file; name a folder"
    except OSError as error:  # no permission, or a name that is too long
        raise output_error(root, error) from None
    if entries and not _is_run(RunFolder(root)):
        problem = (
            f"contains {entries[0]} and is not a run of vitkit, so --overwrite does not rename it; "
            "choose another --output"
        )
    # Renaming it would leave the user's shell in the old run.
    elif entries and root.resolve() in (Path.cwd(), *Path.cwd().parents):
        problem = (
            "is or contains the working folder, so --overwrite cannot rename it; choose another "
            "--output"
        )
    elif entries and config.resume != "auto" and not config.overwrite:
        problem = (
            f"exists; resume with --resume {root}, choose another --output, or pass --overwrite to "
            "rename the old folder"
        )
    if problem:
        raise errors.OutputError(f"--output {root} {problem}")


def _refuse_among_data(root: Path, config: TrainConfig) -> None:
    """Raise `OutputError` if the run folder contains the data, or lies inside them.

    Data that are the folder of a run are a `DataError`.
    """
    resolved = root.resolve()
    names = [] if config.data_root is None else [config.data_root]
    if config.data not in NAMES and "://" not in config.data:
        # Of shards, `train-{000..009}.tar`, the part before the numbers.
        names.append(config.data.removeprefix("wds:").partition("{")[0])
    for name in names:
        refuse_run_folder(Path(os.path.expanduser(name)))
        data = Path(os.path.expanduser(name)).resolve()
        problem = ""
        if resolved == data or resolved in data.parents:
            problem = "contains"
        elif name != config.data_root and data.is_dir() and data in resolved.parents:
            problem = "lies inside"
        if problem:
            start = f"--output {root}"
            if not config.output:  # the folder of numbered runs
                start = f"the run would be written to {root}, which"
            raise errors.OutputError(f"{start} {problem} the data {name}; choose another --output")


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
