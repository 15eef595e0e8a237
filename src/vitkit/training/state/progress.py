"""`Progress`: the counters of a run, such as its steps, best epoch, patience and seconds.

The number of the epoch follows from that of the step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from vitkit.errors import CheckpointError
from vitkit.training.state.registry import Metadata, Tensors, check_same_names


@dataclass
class Progress:
    """The counters of the training loop.

    Attributes:
        step: optimizer steps done.
        loss_sum: sum of the training losses of this epoch's steps so far.
        losses: number of losses in that sum.
        best_top1: best validation top-1 so far; -1 before the first.
        best_loss: validation loss of the best epoch.
        best_epoch: number of the best epoch, counted from 1.
        stale: epochs without a higher top-1.
        skipped: steps left out because a number was not finite.
        skipped_in_a_row: the same, since the last step that was made.
        seconds: time spent training, over all sessions.
        data: fingerprint of the dataset.
        unvalidated: True if this step ends an epoch that still has to be validated and logged.
    """

    step: int = 0
    loss_sum: float = 0.0
    losses: int = 0
    best_top1: float = -1.0
    best_loss: float = 0.0
    best_epoch: int = 0
    stale: int = 0
    skipped: int = 0
    skipped_in_a_row: int = 0
    seconds: float = 0.0
    data: str = ""
    unvalidated: bool = False

    @property
    def mean_loss(self) -> float:
        """Mean training loss of this epoch's steps so far."""
        return self.loss_sum / max(self.losses, 1)

    def count_loss(self, loss: float) -> None:
        """Count a step whose numbers are all finite."""
        self.loss_sum += loss
        self.losses += 1
        self.skipped_in_a_row = 0

    def close_epoch(self) -> float:
        """Begin the next epoch; returns the mean training loss of this one."""
        mean = self.mean_loss
        self.loss_sum, self.losses, self.unvalidated = 0.0, 0, False
        return mean

    def count_best(self, epoch: int, validation: Mapping[str, float]) -> bool:
        """Return whether this epoch is the best so far, by validation top-1, then by loss."""
        if not validation:  # without a validation split the last epoch is the best
            return True
        top1, loss = validation["top1"], validation["loss"]
        self.stale = 0 if top1 > self.best_top1 else self.stale + 1
        if (top1, -loss) <= (self.best_top1, -self.best_loss):
            return False
        self.best_top1 = top1
        self.best_loss = loss
        self.best_epoch = epoch
        return True

    def tensors(self) -> Tensors:
        """Return no tensors."""
        return {}

    def metadata(self) -> Metadata:
        """Return all counters."""
        return dataclasses.asdict(self)

    def load(self, tensors: Tensors, metadata: Metadata) -> None:
        """Restore all counters. Raises `CheckpointError` for other names or types."""
        own = self.metadata()
        check_same_names("progress", own, metadata)
        for name, value in metadata.items():
            # Compared exactly: True would pass for 1.
            if type(value) is not type(own[name]):
                raise CheckpointError(
                    f"progress: {name} is {value!r}; expected {type(own[name]).__name__}"
                )
            setattr(self, name, value)
