"""The folder of a run: where it is, what lies in it, and who may write there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from vitkit.errors import OutputError, SettingError, nearest_parent
from vitkit.training.config import DEFAULT_MODEL, TrainConfig
from vitkit.training.lock import locked
from vitkit.weights.files import output_error


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
    def augmented(self) -> Path:
        """What the model is fed in the first step, as a picture."""
        return self.root / "augmented.png"

    @property
    def log(self) -> Path:
        """What was printed."""
        return self.root / "train.log"

    @property
    def confusion(self) -> Path:
        """What the best weights take the validation pictures for, as a picture."""
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
        """What a teacher says of every view of the pictures; made again where it is missing."""
        return self.root / "teacher"

    @property
    def state(self) -> Path:
        """What `--resume` goes on from."""
        return self.root / "state"


def resumed_folder(resume: str, output: str | None) -> RunFolder | None:
    """The run that `--resume` means; `None` where `auto` finds nothing to go on with.

    Raises:
        SettingError: `auto` without an output.
        OutputError: a run that is not there, or one without a saved state.
    """
    if resume == "auto":
        if output is None:
            raise SettingError("--resume auto needs --output, the run folder to look in")
        folder = RunFolder(Path(output))
        return folder if has_state(folder) else None
    folder = RunFolder(Path(resume))
    if not folder.root.is_dir():
        raise OutputError(f"--resume {resume}: no such run folder; {nearest_parent(folder.root)}")
    if not has_state(folder):
        raise OutputError(
            f"--resume {resume}: no saved state in {folder.state}; "
            f"start afresh without --resume (add --overwrite to use this folder)"
        )
    return folder


def has_state(folder: RunFolder) -> bool:
    """Whether there is anything to resume from."""
    return folder.config.is_file() and any(folder.state.glob("step-*"))


def new_folder(config: TrainConfig) -> RunFolder:
    """Make the folder of a new run.

    Raises:
        OutputError: it exists and `overwrite` is off, another process trains in it, or it cannot be
            made.
    """
    try:
        if config.output is None:
            return RunFolder(_next_numbered(config))
        root = Path(config.output)
        if root.exists() and not root.is_dir():
            raise OutputError(f"{root} is a file; choose another --output")
        if root.is_dir() and any(root.iterdir()):
            # With `--resume auto` a folder without a state is a run that died before its first one.
            if not config.overwrite and config.resume != "auto":
                raise OutputError(
                    f"{root} exists; go on with --resume {root}, choose another --output, "
                    f"or pass --overwrite to put it aside"
                )
            whole = root.resolve()
            with locked(whole):  # another process may be training there
                aside = (whole.with_name(f"{whole.name}.old-{n}") for n in count(1))
                whole.rename(_first_free(aside))
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
