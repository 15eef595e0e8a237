"""The training batches of a run, and the processes that load them."""

from __future__ import annotations

from vitkit.data.datasets.dataset import Dataset
from vitkit.data.datasets.split import Split
from vitkit.data.loading.loader import TrainingSteps
from vitkit.data.loading.sampler import class_counts, sizes_of_epochs
from vitkit.distributed import ProcessGroup
from vitkit.messages import plural
from vitkit.process import available_cores
from vitkit.spec import Preprocess
from vitkit.training.config.run_config import RunConfig
from vitkit.training.config.sections.data import DataSettings
from vitkit.training.setup.build_augmentation import augmentation_of, user_transform

MOST_WORKERS = 8
"""Loader processes of each process by default, at most."""


def training_steps(
    config: RunConfig, train: Split, preprocess: Preprocess, world: ProcessGroup
) -> TrainingSteps:
    """Return every training batch of the run, of which this process loads its part.

    Args:
        config: the settings, all of them decided.
        train: the training images.
        preprocess: size of the model's images.
        world: the processes that share each batch.

    Raises:
        UserError: more images in a batch than there are, or a transform that cannot be imported.
    """
    batch_size = config.batch_size
    if config.probe is not None or config.find_batch_size:
        # neither a probe nor a later search must be refused for small data
        batch_size = min(batch_size, len(train))
    return TrainingSteps(
        train,
        preprocess,
        augmentation_of(config),
        batch_size=batch_size,
        seed=config.seed,
        rank=world.rank,
        world_size=world.size,
        balance=config.balance,
        sizes=sizes_of_epochs(config.progressive, config.epochs),
        repeats=config.repeated_aug,
        fill=config.last_batch == "fill",
        transform=user_transform(config),
    )


def loader_processes(
    workers: int | None, train: Split, world: ProcessGroup
) -> tuple[int, list[str]]:
    """Return the number of loader processes, and a note where it exceeds the cores.

    Args:
        workers: the setting; `None` for the default.
        train: the images; those in memory need no workers.
        world: processes on this machine share its cores.
    """
    cores = max(1, available_cores() // world.local_size)
    if workers is None:
        # images in memory take longer to send to another process than to read
        return (0 if train.in_memory else min(cores, MOST_WORKERS)), []
    if workers > cores:
        return workers, [f"--workers {workers} on {plural(cores, 'core')}: fewer would be as fast"]
    return workers, []


def balance_notes(settings: DataSettings, dataset: Dataset) -> list[str]:
    """Return a line on how uneven the classes are, where they are drawn equally often."""
    if not settings.balance:
        return []
    return [class_counts(dataset.splits["train"].labels, dataset.classes)]
