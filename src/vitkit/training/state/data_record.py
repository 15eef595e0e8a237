"""The record of a run's data: the report of their check, and the corrected labels."""

from __future__ import annotations

import json
import os
from pathlib import Path

from vitkit.data.checks.check import Report
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import LabelChanges, read_label_changes
from vitkit.errors import DataError, SettingError
from vitkit.io.atomic import write_bytes
from vitkit.training.config.merging import read_yaml

IMAGES_OF_A_FINDING = 20
"""Images that the report lists of a finding; `more` counts the others."""


def record_data(
    dataset: Dataset,
    check: Report | None,
    *,
    check_file: Path,
    relabel_file: Path,
) -> None:
    """Write the record of a new run's data into its folder.

    Args:
        dataset: the images, with the corrected labels.
        check: the report of their check, if there was one.
        check_file: the report.
        relabel_file: the corrected labels, if there are any.

    Raises:
        OutputError: a file cannot be written.
    """
    if check is not None:
        document = json.dumps(check.as_dict(most=IMAGES_OF_A_FINDING), indent=1)
        write_bytes(check_file, f"{document}\n".encode())
    if dataset.relabelled is not None:
        write_bytes(relabel_file, dataset.relabelled.to_csv())


def restore_labels(
    copy: Path, file: str | None, config: Path
) -> tuple[LabelChanges | None, list[str]]:
    """Return the corrected labels that a stopped run began with, and a note if its file changed.

    Args:
        copy: the list in the folder of the run.
        file: the setting `relabel` now.
        config: config.yaml, which has that setting as it was when the run began.

    Raises:
        DataError: the copy is missing or damaged, or another file cannot be read.
        SettingError: another file with other labels.
    """
    root = copy.parent
    began_with = read_yaml(config).get("relabel")
    if began_with is None:
        if file is not None:
            raise SettingError(
                f"--resume {root}: that run began without --relabel; leave it out, or start afresh "
                "with another --output"
            )
        return None, []
    if not copy.is_file():
        raise DataError(
            f"{copy} is missing, which has the labels that the run began with; restore it, or "
            "start afresh"
        )
    kept = read_label_changes(copy)
    if file is not None and file != began_with:
        if read_label_changes(file).digest != kept.digest:
            raise SettingError(
                f"--resume {root}: --relabel {file} has other labels than the run began with; "
                "leave it out, or start afresh with another --output"
            )
        return kept, []
    if file is None or not _has_changed(file, kept):
        return kept, []
    return kept, [
        f"{file} has changed since the run began, which continues with the labels in {copy}; start "
        "afresh to train with the new ones"
    ]


def _has_changed(file: str, kept: LabelChanges) -> bool:
    """Return whether a file has other labels now; False where it is gone, as the copy serves."""
    # `Path.expanduser` raises for a user that this machine does not have
    if not os.path.exists(os.path.expanduser(file)):
        return False
    try:
        return read_label_changes(file).digest != kept.digest
    except DataError:
        return True
