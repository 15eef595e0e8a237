"""The data of a run: opened, split and checked."""

from __future__ import annotations

from vitkit.data.checks.check import Report, drop_or_refuse_unreadable
from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.label_changes import LabelChanges, read_label_changes
from vitkit.data.datasets.pixel_cache import cached, show_progress
from vitkit.data.datasets.relabelling import relabel
from vitkit.data.datasets.splitting import POOL_FRACTIONS, with_validation
from vitkit.data.sources.open import open_dataset
from vitkit.errors import SettingError
from vitkit.messages import plural
from vitkit.training.config.sections.data import DataSettings
from vitkit.training.config.train_config import TrainConfig
from vitkit.training.run_folder import RunFolder
from vitkit.training.state.data_record import restore_labels


def open_training_data(
    config: TrainConfig, resumed: RunFolder | None
) -> tuple[Dataset, list[str], Report | None]:
    """Open, split and check the data.

    Args:
        config: the settings.
        resumed: the run to resume.

    Returns:
        The dataset, whose images can all be decoded, notes on it, and the report of its check; None
        where images in memory were not checked.

    Raises:
        DataError: data that cannot be trained on, or corrected labels of other data.
        SettingError: a validation fraction that the data leave no room for.
    """
    changes, change_notes = _label_changes(config.relabel, resumed)
    dataset = open_dataset(
        config.data,
        data_root=config.data_root,
        ignore_extra_classes=config.ignore_extra_classes,
        follow_links=config.follow_links,
    )
    if resumed is None:  # an older run may resume with a fraction that had no effect
        _refuse_val_fraction(dataset, config.val_fraction)
    dataset, notes, report = _checked(dataset, config, changes, quiet=config.quiet)
    return dataset, [*notes, *change_notes], report


def _label_changes(
    file: str | None, resumed: RunFolder | None
) -> tuple[LabelChanges | None, list[str]]:
    """Return the corrected labels (for a resumed run, its own copy) and notes on them."""
    if resumed is not None:
        return restore_labels(resumed.relabel, file, resumed.config)
    return (None, []) if file is None else (read_label_changes(file), [])


def _refuse_val_fraction(dataset: Dataset, fraction: float) -> None:
    """Refuse another fraction where all images were divided by fixed shares."""
    # a pool too small for a validation split has none, and its train split is divided again
    if dataset.cut and "val" in dataset.splits and fraction != DataSettings.val_fraction:
        shares = ", ".join(f"{share:.0%} {name}" for name, share in POOL_FRACTIONS.items())
        raise SettingError(
            f"--val-fraction {fraction:g} has no effect on {dataset.name}: the data have no splits "
            f"and are always divided into {shares}; leave it out, or put the training images into "
            "a train split"
        )


def _checked(
    dataset: Dataset, settings: DataSettings, changes: LabelChanges | None, *, quiet: bool
) -> tuple[Dataset, list[str], Report | None]:
    """Cut the validation split where there is none, correct labels, and check every image."""
    if settings.cache is not None:
        folder = None if settings.cache == "auto" else settings.cache
        dataset = cached(dataset, folder, progress=None if quiet else show_progress)
    has_val = "val" in dataset.splits
    if settings.val_fraction > 0:
        # before the check, which then also finds copies across this cut
        dataset = with_validation(dataset, settings.val_fraction)
    if changes is not None:
        # after the cut, so that the run validates on the images of a run without corrections
        dataset = relabel(dataset, changes)
    dataset, report = drop_or_refuse_unreadable(dataset, settings.bad_images)
    notes = [*report.notes, *report.warnings()]
    if has_val and not dataset.cut and settings.val_fraction != DataSettings.val_fraction:
        notes.append(
            f"--val-fraction {settings.val_fraction:g} has no effect: the data have a val split"
        )
    for split, problems in report.problems.items():
        notes += [f"skipped {plural(len(problems), 'image')} of {split} that cannot be decoded:"]
        notes += [f"  {problem.name}: {problem.reason}: {problem.detail}" for problem in problems]
    is_whole = not any(split.in_memory for split in dataset.splits.values())
    return dataset, notes, report if is_whole else None
