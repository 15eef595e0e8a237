"""Training with a report at its end: for `vitkit train` and `vitkit.train`."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from vitkit.errors import Interrupted
from vitkit.reporting.write import report
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.interrupts import raise_on_signal
from vitkit.training.monitoring.terminal import Display
from vitkit.training.result import TrainResult
from vitkit.training.run_folder import RunFolder


def train_and_report(config: TrainConfig) -> tuple[TrainResult, Path | None]:
    """Train, or search with `auto`, and write the report of the run where the setting is on.

    Args:
        config: every setting.

    Returns:
        The result, and the path of the report; None without one.

    Raises:
        VitkitError: as `train` and `run_search`. A report that cannot be written is a line in the
            log.
    """
    # imported here: a search is rare, and imports much more
    if config.auto:
        from vitkit.training.auto import run_search

        result = run_search(config)
    else:
        from vitkit.training.train import train

        result = train(config)
    return result, _report(result, config)


def _report(result: TrainResult, config: TrainConfig) -> Path | None:
    """Write the report at the end of training; if that fails, log a line.

    Args:
        result: result of the run; after `--auto` the winner's run has the report.
        config: the settings; `report` and `quiet` are used.

    Returns:
        The path of the report; None without one.
    """
    folder = RunFolder(result.run)
    if not folder.config.exists():
        folder = RunFolder(result.last.parents[1])
    # one of several processes writes it; a probe by nearest neighbours leaves no weights
    is_first = os.environ.get("RANK", "0") == "0"
    if not config.report or not folder.config.exists() or not is_first:
        return None
    try:
        with raise_on_signal(folder.resume_hint):
            return report(folder.root)
    except Interrupted:
        raise
    except Exception as error:  # noqa: BLE001 - a report must never fail a run
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        _log(
            folder,
            f"warning: {folder.report.name} is not written: {reason}; the results are complete "
            "without it",
            quiet=config.quiet,
        )
    return None


def _log(folder: RunFolder, line: str, *, quiet: bool) -> None:
    """Print a line, and add it to the log of a run that has ended."""
    Display(total=0, done=0, quiet=quiet).print(line)
    # a full disk must not fail a run whose results are written
    with suppress(OSError), folder.log.open("a", encoding="utf-8") as file:
        file.write(f"{datetime.now().isoformat(timespec='seconds')} {line}\n")
